"""Where a server takes its release from: a ``.mar`` that KServe mounted, or the registry."""

import argparse
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evernear.errors import IntegrityError, StoreError
from evernear.release.archive_reader import ARCHIVE_FILE, ReleaseParts, open_release, read_release_manifest
from evernear.release.manifest import ReleaseManifest
from evernear.release.registry import Registry
from evernear.store import open_store


@contextmanager
def opened_release(args: argparse.Namespace) -> Generator[ReleaseParts]:
    """The release that ``args`` name, unpacked and checked for as long as the context lasts.

    Raises:
        IntegrityError: it is damaged, or ``--model_dir`` holds none or several.
        StoreError: ``--store`` has no such release, or cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="evernear-") as directory:
        archive = Path(directory) / ARCHIVE_FILE
        if args.store:
            registry = Registry(open_store(args.store))
            registry.fetch(args.release or _champion(registry), archive)
        else:
            archive = _find_archive(Path(args.model_dir))
        yield open_release(archive, Path(directory) / "parts")


def manifest_of_release(args: argparse.Namespace) -> ReleaseManifest:
    """The manifest of the release that ``args`` name; nothing else of it is fetched or read.

    Raises:
        IntegrityError, StoreError: as `opened_release`.
    """
    if args.store:
        registry = Registry(open_store(args.store))
        return registry.get(args.release or _champion(registry)).manifest
    return read_release_manifest(_find_archive(Path(args.model_dir)))


def _champion(registry: Registry) -> str:
    champion = registry.champion()
    if champion is None:
        raise StoreError("The store has no champion yet; name a version with --release.")
    return champion.version


def _find_archive(place: Path) -> Path:
    found = [place] if place.is_file() else sorted(place.glob("*.mar"))
    if len(found) != 1:
        raise IntegrityError(f"{place} holds {len(found)} release archives (.mar); give --model_dir one.")
    return found[0]
