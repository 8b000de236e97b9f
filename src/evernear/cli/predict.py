"""``evernear predict`` with a running server, which imports neither torch nor FAISS, and
``batch-predict`` without one."""

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from evernear.cli.options import (
    JsonOption,
    OutOption,
    ReleaseOption,
    message_on_interrupt,
    options_of,
    output_uri,
    registry_settings,
    require_workdir,
    settings_anywhere,
)
from evernear.common.output import print_json, print_line, printable, quantity
from evernear.errors import (
    DataError,
    EvernearError,
    PredictionRejectedError,
    ServerUnreachableError,
    ServingError,
    SettingsError,
)
from evernear.serving.responses import answer as in_words
from evernear.serving.responses import nearest
from evernear.settings import DataSettings, Settings, parse
from evernear.settings.section import host_name
from evernear.settings.serving import MODEL_NAME

if TYPE_CHECKING:
    from evernear.serving.client import Client, Target
    from evernear.serving.responses import Metadata, Prediction

Format = Literal["rest", "grpc", "prep"]
STDIN = Path("-")
SHOWN_SKIPPED = 10
PIPE_WIDTH = 10_000
"""Table width in characters without a terminal, at which no row wraps."""
MAX_PROCESSES = 8
CPUS_PER_PROCESS = 4


def _path(text: str) -> Path:
    """Reject an empty path (an unset variable), which would be the current directory."""
    if not text:
        raise SettingsError('The path of an image is empty; name a file or a folder, or "." for this directory.')
    if "://" in text:
        raise SettingsError(f"{text} is not a file; download it, or recognize a bucket with `evernear batch-predict`.")
    return Path(text)


@options_of(settings_anywhere)
def predict(
    settings: Settings,
    images: Annotated[
        list[Path] | None, typer.Argument(help="PNG, JPEG, WebP or HEIC files.", metavar="IMAGE...", parser=_path)
    ] = None,
    image_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--image-file", metavar="PATH", help="A file, a folder, or - for stdin; repeatable.", parser=_path
        ),
    ] = None,
    format: Annotated[
        Format,
        typer.Option("--format", help="REST or gRPC of TorchServe, or the preprocessing server."),
    ] = "rest",
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="HOST",
            help="Remote server. Its token is in EVERNEAR_TOKEN or in the file EVERNEAR_TOKEN_FILE.",
        ),
    ] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535)] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS for --target; SSL_CERT_FILE names its CA.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout-s", min=0.001, help="Timeout of each prediction.")
    ] = None,
    model_name: Annotated[str | None, typer.Option("--model-name")] = None,
    version: Annotated[str | None, typer.Option("--version", help="A loaded release other than the default.")] = None,
    metadata: Annotated[bool, typer.Option("--metadata", help="Show the model's inputs and outputs instead.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of text.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Recognize images with the live release. `evernear batch-predict` recognizes images without a
    server."""
    from evernear.serving.client import Client

    if target is None and format != "prep" and not settings.store:
        require_workdir(settings.workdir)
    if metadata and target is None and format != "prep":
        _print_metadata(_local_metadata(settings, version), as_json)
        return
    if tls and target is None:
        raise SettingsError("--tls requires --target.")
    if as_json and as_csv:
        raise SettingsError("--csv and --json exclude each other.")
    as_ = "json" if as_json else "csv" if as_csv else "table"
    try:
        server = _with_overrides(_server(settings, target, format, tls), port, timeout_s, model_name)
        with Client(server) as client:
            if metadata:
                _print_metadata(client.metadata(), as_json)
                return
            files = _named_files([*(images or []), *(image_files or [])])
            exit_code = _print_answers(_predict_all(client, files, version, settings.store_uri), len(files), as_)
    except ServerUnreachableError as error:
        raise (error if target or port else _with_champion(error, settings)) from None
    if exit_code:
        sys.exit(exit_code)


def _server(settings: Settings, target: str | None, format: Format, tls: bool) -> "Target":
    from evernear.serving.client import Target

    return Target.remote(settings, _host(target), format, tls=tls) if target else Target.local(settings, format)


def _named_files(paths: list[Path]) -> list[Path]:
    files = list(_files(paths))
    if not files:
        raise SettingsError("No image: pass files, or --image-file with a file, a folder or -.")
    return files


def _print_answers(answers: "Iterator[Answer]", count: int, as_: Literal["json", "csv", "table"]) -> int:
    """Print the answers about ``count`` files as they arrive, and return the exit code."""
    # JSON lines on the same terminal already show the progress.
    shows_progress = as_ != "table" and sys.stdout.isatty()
    if count > 1 and sys.stderr.isatty() and not shows_progress:
        answers = _with_progress(answers, count, sys.stderr)
    match as_:
        case "json":
            return _print_json(answers)
        case "csv":
            return _print_csv(answers)
        case "table":
            return _print_table(answers, alone=count == 1)


def _with_champion(error: ServerUnreachableError, settings: Settings) -> EvernearError:
    """``error``, or if no server can be started yet, one with the first step to take."""
    from evernear.common.store.current import current_store
    from evernear.release.registry import Registry

    registry = Registry(current_store(settings.store_uri))
    return error if registry.champion() else ServingError(registry.explain_no_champion())


def _host(target: str) -> str:
    """Accept a host name or IP address, without a scheme or port."""
    try:
        return host_name(target)
    except ValueError:
        raise SettingsError(
            f"--target {target!r} is not a host name; pass the port as --port, and --tls instead of https."
        ) from None


def _with_overrides(target: "Target", port: int | None, timeout_s: float | None, model: str | None) -> "Target":
    if port:
        target = replace(target, port=port, hint="check its host and port")
    return replace(target, timeout_s=timeout_s or target.timeout_s, model=model or target.model)


def _files(paths: list[Path]) -> Iterator[Path]:
    """The files in ``paths``, with all images at any depth of a folder, even behind links."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        images, skipped = _images_in(path)
        if skipped:
            names = ", ".join(str(file.relative_to(path)) for file in skipped[:SHOWN_SKIPPED])
            more = " and more" if len(skipped) > SHOWN_SKIPPED else ""
            count = quantity(len(skipped), "file or folder that is no image", "files or folders that are no images")
            print_line(f"Skipped {count} in {path}: {names}{more}.", sys.stderr)
        if not images:
            raise DataError(f"The folder {path} contains no image.")
        yield from images


def _images_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The images below ``folder``, by a source's rule, and the skipped files, both sorted."""
    from evernear.data.image_tree import walk_images

    images: list[Path] = []
    skipped: list[Path] = []
    for path, is_image in walk_images(folder):
        (images if is_image else skipped).append(path)
    return sorted(images), sorted(skipped)


Answer = tuple[Path, dict[str, Any] | EvernearError]


def _predict_all(client: "Client", files: list[Path], version: str | None, store_uri: str) -> Iterator[Answer]:
    """Yield each file's answer or error. Raise an error that concerns them all."""
    from evernear.serving.client import read_file

    for file in files:
        try:
            image = sys.stdin.buffer.read() if file == STDIN else read_file(file)
            yield file, _predict(client, image, version, store_uri).model_dump(mode="json")
        except (PredictionRejectedError, DataError) as error:
            yield file, error


def _predict(client: "Client", image: bytes, version: str | None, store_uri: str) -> "Prediction":
    if len(image) <= client.max_size_bytes:
        return client.predict(image, version)
    from evernear.serving.shrink import predict_shrunk  # imports numpy and Pillow

    return predict_shrunk(client, image, version, store_uri)


def _with_progress(answers: Iterator[Answer], total: int, terminal: TextIO) -> Iterator[Answer]:
    """Show on ``terminal`` how many of ``total`` answers have arrived, and the remaining time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("recognizing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=terminal)
    # stdout may be a pipe, so stdout is not redirected to the terminal.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        yield from progress.track(answers, total=total)


def _print_json(answers: Iterator[Answer]) -> int:
    """Print each answer as a JSON line as soon as it arrives, and return the exit code."""
    exit_code = 0
    for file, answer in answers:
        if isinstance(answer, EvernearError):
            exit_code, answer = answer.exit_code, {"error": str(answer)}
        print_json({"image": str(file), **answer})
    return exit_code


def _print_csv(answers: Iterator[Answer]) -> int:
    """Print each answer as a row as soon as it arrives, and return the exit code."""
    exit_code = 0
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(("image", "answer", "unknown", "distance", "release", "error"))
    for file, answer in answers:
        if isinstance(answer, EvernearError):
            exit_code, cells = answer.exit_code, ("", "", "", "", str(answer))
        else:
            unknown = str(answer["unknown"]).lower()
            cells = (answer["pred"], unknown, f"{answer['dist']:.4f}", answer["version"], "")
        rows.writerow(printable(cell) for cell in (str(file), *cells))
        sys.stdout.flush()
    return exit_code


def _print_table(answers: Iterator[Answer], *, alone: bool) -> int:
    """Print a table, even of the answers before an error. Return the exit code."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    exit_code = 0
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("image", "answer", "distance", "neighbors", "release"):
        table.add_column(name, overflow="fold")
    try:
        for file, answer in answers:
            if isinstance(answer, EvernearError):
                if alone:
                    raise answer
                exit_code = answer.exit_code
                table.add_row(Text(printable(str(file))), Text(printable(str(answer)), "red"))
                continue
            label = in_words(answer["pred"], answer["unknown"])
            cells = (str(file), label, f"{answer['dist']:.3f}", nearest(answer), answer["version"])
            table.add_row(*(Text(printable(text)) for text in cells))
    finally:
        if table.row_count:
            (Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)).print(table)
    return exit_code


def _local_metadata(settings: Settings, version: str | None) -> "Metadata":
    """The metadata of a release that the local TorchServe has loaded, read from the registry."""
    from evernear.common.store.current import current_store
    from evernear.release.registry import Registry
    from evernear.serving.endpoints import Management, home_of
    from evernear.serving.responses import Metadata

    loaded = Management(home_of(settings.workdir)).describe(MODEL_NAME, version)
    return Metadata.of(Registry(current_store(settings.store_uri)).get(loaded.version).manifest, MODEL_NAME)


def _print_metadata(metadata: "Metadata", as_json: bool) -> None:
    if as_json:
        print_json(metadata)
        return
    fields = metadata.model_dump(mode="json")
    metrics = fields.pop("metrics")
    for name, value in fields.items():
        print_line(f"{name:<14} {', '.join(value) if isinstance(value, list) else value}")
    print_line("metrics")
    for name, value in sorted(metrics.items()):
        print_line(f"  {name:<28} {value:g}")


@options_of(registry_settings)
def batch_predict(
    settings: Settings,
    source: Annotated[
        str, typer.Option("--source", help="folder:DIR | s3://bucket/prefix; images at any depth, without classes.")
    ],
    out: OutOption,
    release: ReleaseOption = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Each loads the release. [one for 4 CPUs, at most 8]")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Pods of an Indexed Job instead of processes here."),
    ] = None,
    part_images: Annotated[
        int | None,
        typer.Option("--part-images", min=1, help="Images of one Parquet file; a killed part is repeated. [5000]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Use a release to recognize all images in a folder or bucket, without a server.

    Each part is a Parquet file with the columns path, digest (sha256 of the file), label, distance,
    unknown, neighbors, version and error. Run the same command again to continue.
    """
    from evernear.common.store import open_store
    from evernear.common.store.current import current_store
    from evernear.data.sources import require_outside
    from evernear.release.registry import Registry
    from evernear.serving.batch import PART_IMAGES, Shared, plan_predictions, summarize

    registry = Registry(current_store(settings.store_uri))
    shared = Shared(
        source=_absolute(source),
        store_uri=settings.store_uri,
        version=registry.get(release).manifest.version if release else registry.require_champion().version,
        part_images=part_images or PART_IMAGES,
    )
    output = open_store(output_uri(out))
    require_outside(output, settings.data.source, store_uri=settings.store_uri)
    run = _runner(processes, nodes, shared.source, settings.store_uri, output.uri)
    with message_on_interrupt("Interrupted. Finished parts stay; run the command again to continue."):
        parts = plan_predictions(shared, output)
        for note in parts.plan.notes:
            print_line(note, sys.stderr)
        images = quantity(parts.plan.units, "image")
        print_line(f"{images} in {shared.source}, listed {parts.plan.planned:%Y-%m-%d %H:%M} UTC.", sys.stderr)
        run(parts, on_parts=_parts_progress())
    summary = summarize(parts)
    if as_json:
        print_json({"out": output.uri, "version": shared.version, **summary.model_dump()})
    else:
        print_line(f"{summary.predicted()} by {shared.version} in {output.uri}.")
    if left_out := summary.left_out():
        print_line(f"{left_out}.", sys.stderr)
    summary.require_predictions(shared.source)


def _runner(processes: int | None, nodes: int | None, *uris: str) -> Callable[..., object]:
    """Runs parts in processes here or, if ``nodes`` is set, in pods that can read all ``uris``."""
    if nodes is None:
        from evernear.common.parts import run_in_processes
        from evernear.common.processes import available_cpus
        from evernear.serving.batch import open_worker

        count = processes or min(MAX_PROCESSES, max(1, available_cpus() // CPUS_PER_PROCESS))
        return partial(run_in_processes, open_worker=open_worker, processes=count)
    from evernear.kubeflow.indexed_job import require_shared, run_on_nodes

    if processes:
        raise SettingsError("--processes and --nodes exclude each other: a pod of --nodes runs one process.")
    for uri, what in zip(uris, ("the source", "the store of the release", "the output"), strict=True):
        require_shared(uri, what)
    return partial(run_on_nodes, nodes=nodes, report=lambda text: print_line(text, sys.stderr))


def _absolute(source: str) -> str:
    """Make a path absolute, as in `data.source`, so that any directory can continue the command."""
    if not source:
        raise SettingsError("--source is empty; name folder:DIRECTORY or s3://bucket/prefix.")
    return parse(DataSettings, {"source": source}).source


def _parts_progress() -> Callable[[int, int], None]:
    """Print the number of finished parts and the remaining time to stderr."""
    from evernear.common.progress import Countdown

    countdown = Countdown(lambda text: print_line(text, sys.stderr))
    return lambda done, total: countdown(done, total, f"{done:,} of {quantity(total, 'part')} done")
