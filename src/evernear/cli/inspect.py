"""``evernear inspect``: show the contents of a release, and predict with the release
without a server.
"""

import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.options import ConfigOption, JsonOption, SetOption, WorkdirOption
from evernear.cli.releases import StoreOption, registry_of
from evernear.common.disk import open_regular
from evernear.common.output import print_json, print_line, printable, quantity
from evernear.errors import DataError, IntegrityError, PredictionRejectedError

if TYPE_CHECKING:
    from evernear.release.describe import Description, Signature
    from evernear.release.registry import Registry
    from evernear.serving.responses import Prediction, Rejection

BATCH = 32
SHOWN_LABELS = 50
app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Show a release's signature, metrics and lineage; predict without a server.",
)
ReleaseArgument = Annotated[str, typer.Argument(metavar="RELEASE", help="A .mar file or a version in the registry.")]


@app.command()
def show(
    release: ReleaseArgument,
    as_json: JsonOption = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Show the signature, preprocessing, index, labels, metrics and lineage of a
    release, without running its code."""
    from evernear.release.describe import describe
    from evernear.serving import HANDLER

    registry = registry_of(store, config, overrides, workdir)

    with _archive(release, registry) as archive:
        description = describe(archive, HANDLER)
    if as_json:
        print_json(description)
    else:
        _print_description(description)


@app.command()
def run(
    release: ReleaseArgument,
    images: Annotated[list[Path], typer.Option("--image", metavar="FILE", help="PNG, JPEG or WebP; repeatable.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More images.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Load a .mar that is not in the registry. It can run arbitrary code.")
    ] = False,
    as_json: JsonOption = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Use a release to recognize images, without a server."""
    registry = registry_of(store, config, overrides, workdir)
    with (
        _archive(release, registry) as archive,
        tempfile.TemporaryDirectory(prefix="evernear-inspect-") as temporary,
    ):
        # Use a copy, so that the file cannot change between the check and the loading.
        copy = Path(temporary) / "release.mar"
        with open_regular(archive) as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target)
        if not trust and not registry.contains(copy):
            raise IntegrityError(
                f"{release} is not in the registry {registry.uri}, and loading it can run arbitrary code. "
                "`evernear inspect show` is safe; add --trust if you trust the source of the file."
            )
        from evernear.release.archive_reader import open_release
        from evernear.serving.core import Predictor

        try:
            core = Predictor.open(open_release(copy, Path(temporary) / "release"))
        except IntegrityError as error:
            raise IntegrityError(str(error).replace(str(copy), release)) from None
        files = [*images, *(more or [])]
        rejected = False
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            for file, answer in zip(batch, core.predict([_read(file) for file in batch]), strict=True):
                rejected |= _print_answer(file, answer, as_json)
    if rejected:
        sys.exit(PredictionRejectedError.exit_code)


@contextmanager
def _archive(release: str, registry: "Registry") -> Generator[Path]:
    """The file ``release``, or the downloaded archive of the version ``release`` in a
    temporary directory.
    """
    from evernear.release.manifest import is_version

    if Path(release).is_file() or not is_version(release):
        yield Path(release)
        return
    with tempfile.TemporaryDirectory(prefix="evernear-inspect-") as temporary:
        registry.fetch(release, Path(temporary) / "release.mar")
        yield Path(temporary) / "release.mar"


def _read(image: Path) -> bytes:
    try:
        with open_regular(image) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{image} cannot be read: {error.strerror}.") from None


def _print_answer(file: Path, answer: "Prediction | Rejection", as_json: bool) -> bool:
    """Print one answer. Return whether the answer is a rejection."""
    fields = answer.model_dump(mode="json")
    rejected = "message" in fields
    if as_json:
        print_json({"image": str(file), **({"error": fields["message"]} if rejected else fields)})
    elif rejected:
        print_line(f"{file}: {fields['message']}")
    else:
        neighbors = ", ".join(f"{_safe(n['label'])} at {n['dist']:.3f}" for n in fields["neighbors"])
        label = f"unknown (nearest {_safe(fields['pred'])})" if fields["unknown"] else _safe(fields["pred"])
        details = f"distance {fields['dist']:.3f}, neighbors {neighbors}, release {fields['version']}"
        print_line(f"{file}: {label}, {details}")
    return rejected


def _print_description(description: "Description") -> None:
    from evernear.index.description import describe_threshold

    index, lineage, shape = description.index, description.lineage, description.preprocessing
    size_mb = description.archive_size_bytes / 1e6
    print_line(f"release {description.version}, {size_mb:.1f} MB, sha256 {description.archive_sha256}")
    _print_signature("POST /predictions/MODEL", description.request)
    _print_signature("network", description.network)
    _heading("preprocessing")
    print_line(
        f"  {shape.height_px} x {shape.width_px} pixels, {'grayscale' if shape.channels == 1 else 'RGB'}, "
        f"{shape.interpolation}, 16-bit images read as {shape.bit_depth} bits; in the network: mean "
        f"{_numbers(shape.mean)}, std {_numbers(shape.std)}"
    )
    _heading("index")
    search = f" ({_safe(index.search)})" if index.search else ""
    print_line(
        f"  {_safe(index.factory)}{search}, {quantity(index.size, 'vector')} of {index.dim}, metric {index.metric}"
    )
    if index.reason:
        print_line(f"  chosen because {_safe(index.reason)}")
    print_line(f"  label by {index.label_by} of {index.k}, {describe_threshold(index.threshold)}")
    _heading(f"labels ({len(description.labels)})")
    more = f" and {len(description.labels) - SHOWN_LABELS:,} more" if len(description.labels) > SHOWN_LABELS else ""
    print_line("  " + " ".join(_safe(label) for label in description.labels[:SHOWN_LABELS]) + more)
    _heading("lineage")
    for name, value in lineage.model_dump(mode="json", exclude={"own_handler"}).items():
        print_line(f"  {name.replace('_', ' '):<18} {_safe(str(value or '-'))}")
    handler = "the handler of this evernear version" if lineage.own_handler else "custom code; TorchServe would run it"
    print_line(f"  {'handler':<18} {handler}")
    _heading("training settings")
    for name, value in description.training.items():
        print_line(f"  {_safe(name):<28} {_safe(str(value))}")
    _heading(f"verdict: {'promote' if description.verdict.promote else 'hold'}")
    for reason in description.verdict.reasons:
        print_line(f"  - {_safe(reason, 500)}")
    _heading("metrics")
    for name, value in sorted(description.metrics.items()):
        print_line(f"  {_safe(name):<28} {value:g}")


def _print_signature(title: str, signature: "Signature") -> None:
    _heading(title)
    for side, values in (("in", signature.inputs), ("out", signature.outputs)):
        for value in values:
            shape = str(value.shape).replace("'", "")
            print_line(f"  {side:<4}{value.name:<16} {value.dtype:<8} {shape:<16} {_safe(value.meaning)}")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _safe(text: str, limit: int = 100) -> str:
    """Text from an archive, truncated and without control characters."""
    return printable(text, limit)


def _heading(text: str) -> None:
    print_line()
    print_line(text)
