"""Open the live release to measure it together with a candidate."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.errors import IntegrityError
from evernear.evaluation.evaluate import LiveSystem
from evernear.evaluation.measure import NO_CHANGES
from evernear.evaluation.recognizer import Recognizer
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.settings import ClassSettings


@contextmanager
def open_champion(store: Store, classes: ClassSettings = NO_CHANGES) -> Generator[LiveSystem | None]:
    """The champion of a store, if there is one, with its removed and renamed ``classes``.

    The recognizer is named after the champion's version. Its files are in a temporary directory, deleted on exit.

    Raises:
        IntegrityError: the champion's archive is damaged.
        StoreError: the store cannot be reached.
    """
    registry = Registry(store)
    champion = registry.champion()
    if champion is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="evernear-champion-") as temporary:
        archive = Path(temporary) / "champion.mar"
        try:
            manifest = registry.fetch(champion.version, archive).manifest
            parts = open_release(archive, Path(temporary) / "release")
            recognizer = Recognizer.open(parts.directory, parts.directory, champion.version)
        except IntegrityError as error:
            raise IntegrityError(
                f"The champion {champion.version} cannot be opened for comparison: {str(error).removesuffix('.')}; "
                "restore the file or promote another release (`evernear registry promote VERSION`), and run again."
            ) from error
        try:
            dataset, fault = Dataset.find(store, manifest.dataset_name, manifest.dataset_digest), None
        except IntegrityError as error:
            dataset, fault = None, str(error)
        yield LiveSystem(recognizer, dataset, classes, fault)
