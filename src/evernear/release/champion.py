"""The release that serves, opened to be measured beside a candidate."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evernear.data.shards import Dataset
from evernear.errors import IntegrityError
from evernear.evaluation.recognizer import Recognizer
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.store import Store


@contextmanager
def open_champion(store: Store) -> Generator[tuple[Recognizer | None, Dataset | None]]:
    """The champion of a store, named by its version, and the snapshot it was made from, as far as they exist.

    Its files lie in a temporary directory that is gone afterwards.

    Raises:
        IntegrityError: the champion's archive is damaged.
        StoreError: the store cannot be reached.
    """
    registry = Registry(store)
    champion = registry.champion()
    if champion is None:
        yield None, None
        return
    with tempfile.TemporaryDirectory(prefix="evernear-champion-") as temporary:
        archive = Path(temporary) / "champion.mar"
        try:
            manifest = registry.fetch(champion.version, archive).manifest
            parts = open_release(archive, Path(temporary) / "release")
            recognizer = Recognizer.open(parts.directory, parts.directory, champion.version)
        except IntegrityError as error:
            raise IntegrityError(
                f"The champion {champion.version} cannot be compared with: {str(error).removesuffix('.')}; put the "
                "file back, or let another release serve (`evernear registry promote VERSION`), and run again."
            ) from error
        yield recognizer, Dataset.find(store, manifest.dataset_name, manifest.dataset_digest)
