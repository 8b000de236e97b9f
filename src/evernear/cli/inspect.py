"""``evernear inspect``: what a release takes and gives, and what it answers, from its archive alone."""

import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.options import JsonOption, with_options
from evernear.cli.releases import registry_of
from evernear.disk import open_regular
from evernear.errors import DataError, IntegrityError, PredictionRejectedError
from evernear.output import print_json, print_line, printable

if TYPE_CHECKING:
    from evernear.release.describe import Description, Signature
    from evernear.release.registry import Registry
    from evernear.serving.responses import Prediction, Rejection

BATCH = 32
SHOWN_LABELS = 50
app = typer.Typer(
    rich_markup_mode="markdown", no_args_is_help=True, help="Look into a release: its signature, lineage and answers."
)
ReleaseArgument = Annotated[str, typer.Argument(metavar="RELEASE", help="A .mar file, or a version of the registry.")]


@app.command()
@with_options(registry=registry_of)
def show(registry: "Registry", release: ReleaseArgument, as_json: JsonOption = False) -> None:
    """Tell a release's signature, preprocessing, index, labels, metrics and lineage; runs none of its code."""
    from evernear.release.describe import describe
    from evernear.serving import HANDLER

    with _archive(release, registry) as archive:
        described = describe(archive, HANDLER)
    if as_json:
        print_json(described)
    else:
        _show(described)


@app.command()
@with_options(registry=registry_of)
def run(
    registry: "Registry",
    release: ReleaseArgument,
    images: Annotated[list[Path], typer.Option("--image", metavar="FILE", help="PNG or JPEG; may be repeated.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More images.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Load a .mar that is not in the registry: that can run its maker's code.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Recognise images with a release, without a server."""
    with (
        _archive(release, registry) as archive,
        tempfile.TemporaryDirectory(prefix="evernear-inspect-") as temporary,
    ):
        # A copy, so that what was vouched for is what is loaded.
        copy = Path(temporary) / "release.mar"
        with open_regular(archive) as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target)
        if not trust and not registry.contains(copy):
            raise IntegrityError(
                f"{release} is not a release that {registry.uri} holds, and loading a network or an index can run "
                "code of whoever made it; `evernear inspect show` is safe. If you know where it is from, add --trust."
            )
        from evernear.release.archive_reader import open_release
        from evernear.serving.core import Predictor

        try:
            core = Predictor.open(open_release(copy, Path(temporary) / "release"))
        except IntegrityError as error:
            raise IntegrityError(str(error).replace(str(copy), release)) from None
        files = [*images, *(more or [])]
        refused = False
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            for file, answer in zip(batch, core.predict([_read(file) for file in batch]), strict=True):
                refused |= _tell(file, answer, as_json)
    if refused:
        sys.exit(PredictionRejectedError.exit_code)


@contextmanager
def _archive(release: str, registry: "Registry") -> Generator[Path]:
    """The file that ``release`` names, or the archive of that version, fetched for the time being."""
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


def _tell(file: Path, answer: "Prediction | Rejection", as_json: bool) -> bool:
    """Print one answer; whether it is a refusal."""
    told = answer.model_dump(mode="json")
    refused = "message" in told
    if as_json:
        print_json({"image": str(file), **({"error": told["message"]} if refused else told)})
    elif refused:
        print_line(f"{file}: {told['message']}")
    else:
        near = ", ".join(f"{_safe(n['label'])} at {n['dist']:.3f}" for n in told["neighbors"])
        label = f"unknown (nearest {_safe(told['pred'])})" if told["unknown"] else _safe(told["pred"])
        print_line(f"{file}: {label}, distance {told['dist']:.3f}, neighbours {near}, release {told['version']}")
    return refused


def _show(
    told: "Description",
) -> None:
    index, lineage, shape = told.index, told.lineage, told.preprocessing
    print_line(f"release {told.version}, {told.archive_size_bytes / 1e6:.1f} MB, sha256 {told.archive_sha256}")
    _show_signature("POST /predictions/MODEL", told.request)
    _show_signature("network", told.network)
    _heading("preprocessing")
    print_line(
        f"  {shape.height_px} x {shape.width_px} pixels, {'grey' if shape.channels == 1 else 'RGB'}, "
        f"{shape.interpolation}; in the network: mean {_numbers(shape.mean)}, std {_numbers(shape.std)}"
    )
    _heading("index")
    search = f" ({_safe(index.search)})" if index.search else ""
    print_line(f"  {_safe(index.factory)}{search}, {index.size:,} vectors of {index.dim}, metric {index.metric}")
    print_line(f"  label by {index.label_by} of {index.k}, unknown beyond {index.threshold:.3f}")
    _heading(f"labels ({len(told.labels)})")
    more = f" and {len(told.labels) - SHOWN_LABELS:,} more" if len(told.labels) > SHOWN_LABELS else ""
    print_line("  " + " ".join(_safe(label) for label in told.labels[:SHOWN_LABELS]) + more)
    _heading("lineage")
    for name, value in lineage.model_dump(mode="json", exclude={"own_handler"}).items():
        print_line(f"  {name.replace('_', ' '):<18} {_safe(str(value or '-'))}")
    own = "that of this evernear" if lineage.own_handler else "not that of this evernear; TorchServe would run it"
    print_line(f"  {'handler':<18} {own}")
    _heading(f"verdict: {'promote' if told.verdict.promote else 'hold'}")
    for reason in told.verdict.reasons:
        print_line(f"  - {_safe(reason, 500)}")
    _heading("metrics")
    for name, value in sorted(told.metrics.items()):
        print_line(f"  {_safe(name):<28} {value:g}")


def _show_signature(title: str, signature: "Signature") -> None:
    _heading(f"{title}")
    for side, values in (("in", signature.inputs), ("out", signature.outputs)):
        for value in values:
            shape = f"({', '.join(map(str, value.shape))}{',' * (len(value.shape) == 1)})"
            print_line(f"  {side:<4}{value.name:<16} {value.dtype:<8} {shape:<16} {_safe(value.meaning)}")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _safe(text: str, limit: int = 100) -> str:
    """What an archive says, without what would steer the terminal or fill it."""
    return printable(text, limit)


def _heading(
    text: str,
) -> None:
    print_line()
    print_line(text)
