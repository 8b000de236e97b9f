import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.options import JsonOption, group, options_of, registry_settings_anywhere
from evernear.cli.releases import registry_beside, safe
from evernear.common.disk import open_regular
from evernear.common.output import print_json, print_line
from evernear.errors import DataError, IntegrityError, PredictionRejectedError
from evernear.serving.responses import Rejection
from evernear.serving.responses import answer as in_words
from evernear.settings import Settings

if TYPE_CHECKING:
    from evernear.release.registry import Registry
    from evernear.serving.responses import Prediction

BATCH = 32
app = group("inspect", "Recognize images with a release, without a server.")
ReleaseArgument = Annotated[str, typer.Argument(metavar="RELEASE", help="A .mar file or a version in the registry.")]


@app.command()
@options_of(registry_settings_anywhere)
def run(
    settings: Settings,
    release: ReleaseArgument,
    images: Annotated[list[Path], typer.Option("--image", metavar="FILE", help="PNG, JPEG, WebP or HEIC; repeatable.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More images.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Load a .mar that is not in the registry. It can run arbitrary code.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Use a release to recognize images, without a server."""
    registry = registry_beside(release, settings)
    with (
        _archive(release, registry) as archive,
        tempfile.TemporaryDirectory(prefix="evernear-inspect-") as temporary,
    ):
        # Use a copy, so that the file cannot change between the check and the loading.
        copy = Path(temporary) / "release.mar"
        _copy(archive, copy)
        try:
            if not trust and not registry.contains(copy):
                raise IntegrityError(
                    f"{release} is not in the registry {registry.uri}, and loading it can run arbitrary code. "
                    "`evernear registry show` is safe; add --trust if you trust the source of the file."
                )
            from evernear.release.archive_reader import open_release
            from evernear.serving.core import Predictor

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
    """The file ``release``, or the archive of that version in a temporary directory."""
    from evernear.release.manifest import is_version

    if Path(release).is_file() or not is_version(release):
        yield Path(release)
        return
    with tempfile.TemporaryDirectory(prefix="evernear-inspect-") as temporary:
        registry.fetch(release, Path(temporary) / "release.mar")
        yield Path(temporary) / "release.mar"


def _copy(archive: Path, copy: Path) -> None:
    try:
        source = open_regular(archive)
    except FileNotFoundError:
        raise DataError(
            f"{archive} is neither a file nor the version of a release; `evernear registry list` shows the versions."
        ) from None
    except OSError as error:
        raise DataError(f"{archive} cannot be read as a release: {error.strerror}.") from None
    with source, copy.open("wb") as target:
        shutil.copyfileobj(source, target)


def _read(image: Path) -> "bytes | Rejection":
    try:
        with open_regular(image) as file:
            return file.read()
    except OSError as error:
        return Rejection(message=f"The file cannot be read: {error.strerror}.")


def _print_answer(file: Path, answer: "Prediction | Rejection", as_json: bool) -> bool:
    """Print one answer. Return whether it is a rejection."""
    fields = answer.model_dump(mode="json")
    rejected = "message" in fields
    if as_json:
        print_json({"image": str(file), **({"error": fields["message"]} if rejected else fields)})
    elif rejected:
        print_line(f"{file}: {fields['message']}")
    else:
        neighbors = ", ".join(f"{safe(n['label'])} at {n['dist']:.3f}" for n in fields["neighbors"])
        label = in_words(safe(fields["pred"]), fields["unknown"])
        details = f"distance {fields['dist']:.3f}, neighbors {neighbors}, release {fields['version']}"
        print_line(f"{file}: {label}, {details}")
    return rejected
