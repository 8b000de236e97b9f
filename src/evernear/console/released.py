"""Which answers are in a release."""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from evernear.common.store import Store
from evernear.common.text import class_name
from evernear.console.answers import Answer, named_files
from evernear.data.manifest import Manifest, find_manifest
from evernear.data.snapshots import Snapshots
from evernear.data.sources.layout import Layout
from evernear.data.stored_ledger import answered_files
from evernear.release.manifest import ReleaseManifest


class ReleasedAnswers:
    """Looks answers up in the snapshot from which a release was built. For each release, the ledger
    of its snapshot, about 100 bytes per image, is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._read: tuple[Manifest | None, Mapping[str, str]] = (None, {})

    def missing(self, answers: Iterable[Answer], layout: Layout, release: ReleaseManifest) -> list[Answer]:
        """The answers whose images are not in ``release`` under the label that they give. If the
        store no longer has the release's snapshot, answers that are younger than the release count
        as missing."""
        labeled = [answer for answer in answers if answer.action == "label"]
        manifest = find_manifest(self._store, release.dataset_name, release.dataset_digest) if labeled else None
        if manifest is None:
            return [answer for answer in labeled if answer.at > release.created]
        with self._lock:
            known = self._labels(manifest)
        return [
            answer
            for answer in labeled
            if any(known.get(name) != class_name(answer.label) for name in named_files(answer, layout))
        ]

    def _labels(self, manifest: Manifest) -> Mapping[str, str]:
        if self._read[0] != manifest:
            with TemporaryDirectory(prefix="evernear-ledger-") as scratch:
                path = Path(scratch) / "ledger.sqlite"
                Snapshots(self._store, manifest.name).fetch_ledger(manifest, path)
                self._read = (manifest, answered_files(path))
        return self._read[1]
