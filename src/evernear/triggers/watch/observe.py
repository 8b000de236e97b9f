"""Observe images that are new to the champion, and differences between live queries and the
reference.

The releases specify which images were used for training and for the gallery. The champion's
manifest specifies the snapshot of its gallery. The manifest of the champion's oldest ancestor with
the same network specifies the snapshot that was used for training, because a reindex reuses the
network. The watcher itself does not store these snapshots, so a restart changes nothing.

A snapshot also records the source from which it was ingested. The watcher observes this source
unless a different source is configured.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from evernear.common.store import Store
from evernear.common.text import class_name
from evernear.data.list import ClassMinimum
from evernear.data.manifest import Manifest, find_manifest, manifest_key
from evernear.data.snapshots import Snapshots
from evernear.data.source_diff import SourceDiff, diff_source
from evernear.errors import EvernearError, SettingsError, StoreError
from evernear.evaluation.live_accuracy import Assessment, assess, expected_accuracy
from evernear.release.archive_reader import ARCHIVE_FILE, read_part
from evernear.release.drift_baseline import DriftBaseline
from evernear.release.manifest import DRIFT_BASELINE_FILE, ReleaseManifest
from evernear.release.registry import Registry
from evernear.review.live_labels import labels_of_release
from evernear.review.renames import with_renames
from evernear.serving.live_queries import Queries, live_queries, reference_queries
from evernear.settings import ClassSettings, DataSettings, Settings
from evernear.triggers.watch.drift import Measure, Shift, independent_queries, measure_drift

DRIFT_WINDOW_S = 24 * 3600.0
"""Age of the live queries that a check reads: a day, since the hours of a day differ."""
MIN_QUERIES = 200
"""Smallest sample of live queries to test for drift. If fewer of them are independent, a check also
reads older ones, up to ``watch.query_retention_s``. In smaller samples, random differences exceed
`BOUNDS`."""
FALSE_ALARM_RATE = 0.001
"""Largest share of checks that may report drift by chance: with a check an hour, once in six
weeks."""
BOUNDS: dict[Measure, float] = {"unknown_rise": 0.05, "embedding_shift": 0.005}
"""Smallest effects to report, because tiny ones are significant in a large sample: a rise of the
unknown rate as a share of all queries, and the energy coefficient of the embeddings."""
_T = TypeVar("_T")
_WINDOW_MARGIN = 1.2
"""Safety factor for extending a window. The window is this factor longer than the rate of
independent queries requires."""


@dataclass(frozen=True)
class SourceChanges:
    """Differences between the source and the champion's snapshots."""

    gallery: SourceDiff
    """Since the champion's index was built."""
    train: SourceDiff
    """Since the champion's network was trained."""
    trained_on: int
    """Number of images with which the network was trained."""
    new_classes: Mapping[str, int]
    """Number of files in each class that the champion does not know."""

    @property
    def train_images(self) -> float:
        """Expected number of new training images."""
        return self.train.expected("train")

    @property
    def gallery_images(self) -> float:
        return self.gallery.expected("gallery")


class ClassShare(NamedTuple):
    """The share of live queries, and the share of reference images, for which one class is
    predicted."""

    label: str
    live: float
    reference: float


@dataclass(frozen=True)
class Drift:
    """Differences between the champion's ``live`` queries and its ``reference``.

    ``shifts`` is empty if the sample is too small.
    """

    shifts: tuple[Shift, ...]
    reference: Queries
    live: Queries
    independent: int
    """Number of live queries that are at least `gap_s` apart, so that they are independent of each
    other."""
    gap_s: float
    window_s: float
    """Age of the oldest queries. The age exceeds `DRIFT_WINDOW_S` if that window contains too few
    independent queries."""

    @property
    def detected(self) -> list[Shift]:
        return [shift for shift in self.shifts if shift.detected]

    def class_mix(self) -> list[ClassShare]:
        """The class shares, sorted by descending difference. Empty without live queries."""
        known, asked = (Counter[str](side.labels.tolist()) for side in (self.reference, self.live))
        if not asked:
            return []
        shares = [
            ClassShare(label, asked[label] / len(self.live), known[label] / max(1, len(self.reference)))
            for label in sorted(known | asked)
        ]
        return sorted(shares, key=lambda share: -abs(share.live - share.reference))


@dataclass(frozen=True)
class Observation:
    """The input of a decision. If a part failed, its field is None, and ``faults`` says so."""

    champion: str | None
    source: str
    champion_since: datetime | None = None
    changes: SourceChanges | None = None
    drift: Drift | None = None
    live: Assessment | None = None
    """The champion's accuracy on labeled live queries, or None if there are no recent labels."""
    faults: tuple[str, ...] = ()


@dataclass
class Observer:
    """Observes one source and one store. ``cache`` is a directory for downloaded tables, whose
    files never change."""

    settings: Settings
    store: Store
    cache: Path
    _baselines: dict[str, DriftBaseline] = field(default_factory=dict[str, DriftBaseline])

    def __post_init__(self) -> None:
        self._registry = Registry(self.store)

    def observe(self, now: datetime) -> Observation:
        """Compare the source and the live queries with the champion.

        If the source or a part of the store is unavailable, ``faults`` reports the failure, and all
        other parts are still observed.

        Raises:
            StoreError, IntegrityError: the champion cannot be read.
        """
        pointer = self._registry.champion()
        champion = self._registry.get(pointer.version).manifest if pointer else None
        faults: list[str] = []
        drift = live = None
        data = attempt(lambda: self._watched(champion), faults)
        changes = attempt(lambda: self._changes(champion, data), faults) if data else None
        if champion:
            drift = attempt(lambda: self._drift(champion, now, faults), faults)
            live = attempt(lambda: self._live_accuracy(champion, now, faults), faults)
        return Observation(
            champion=pointer.version if pointer else None,
            source=data.source if data else "",
            champion_since=self._registry.pointer.made_live(pointer).since if pointer else None,
            changes=changes,
            drift=drift,
            live=live,
            faults=tuple(faults),
        )

    def _watched(self, champion: ReleaseManifest | None) -> DataSettings:
        """The data settings. If no source is configured, the source of the champion's snapshot is
        used."""
        data = self.settings.data
        if "source" in data.model_fields_set and data.source:
            return data
        if champion is None and (self.settings.pipeline.endpoint or "KUBERNETES_SERVICE_HOST" in os.environ):
            raise SettingsError("No source is configured and no release is live yet; set data.source.")
        if champion is None:
            return data
        return data.model_copy(update={"source": self._snapshot(champion).source})

    def _changes(self, champion: ReleaseManifest | None, data: DataSettings) -> SourceChanges:
        if champion is None:
            (every,) = diff_source(data, self.store, [None], minimum=self._minimum(()))
            return SourceChanges(every, every, 0, every.labels)
        indexed = self._snapshot(champion)
        trained = self._snapshot(self._first_with_network(champion))
        newest = Snapshots(self.store, indexed.name).head() or indexed
        minimum = self._minimum(champion.labels)
        compared = [indexed] if indexed.digest == trained.digest else [indexed, trained]
        renamed = with_renames(ClassSettings(), self.store, newest.images_by_class()).renamed
        diffs = diff_source(data, self.store, compared, newest, minimum, self.cache, renamed)
        gallery, train = diffs[0], diffs[-1]
        known = set(map(class_name, champion.labels))
        new_classes = {label: count for label, count in gallery.labels.items() if label not in known}
        return SourceChanges(gallery, train, trained.count("train"), new_classes)

    def _first_with_network(self, champion: ReleaseManifest) -> ReleaseManifest:
        """The champion's oldest ancestor with the same network. The network was trained on the
        snapshot of this ancestor."""
        release = champion
        while release.parent is not None:
            parent = self._registry.get(release.parent, include_pruned=True).manifest
            if parent.network_sha256 != champion.network_sha256:
                break
            release = parent
        return release

    def _minimum(self, champion_labels: Sequence[str]) -> ClassMinimum:
        return ClassMinimum(self.settings.validation.min_class_images, [*map(class_name, champion_labels)])

    def _snapshot(self, release: ReleaseManifest) -> Manifest:
        manifest = find_manifest(self.store, release.dataset_name, release.dataset_digest)
        if manifest is None:
            key = manifest_key(release.dataset_name, release.dataset_digest)
            raise StoreError(
                f"New images cannot be counted: {key}, from which release {release.version} was made, is no longer in"
                " the store; train once more."
            )
        return manifest

    def _drift(self, champion: ReleaseManifest, now: datetime, faults: list[str]) -> Drift:
        reference = reference_queries(self._baseline(champion.version))
        window_s, retention_s = DRIFT_WINDOW_S, self.settings.watch.query_retention_s
        live, damaged = self._queries(champion, now, window_s)
        independent, gap_s = independent_queries(live)
        if len(independent) < MIN_QUERIES and window_s < retention_s:
            window_s = min(_WINDOW_MARGIN * window_s * MIN_QUERIES / max(1, len(independent)), retention_s)
            live, damaged = self._queries(champion, now, window_s)
            independent, gap_s = independent_queries(live)
        faults += damaged
        is_enough = len(live) >= MIN_QUERIES
        return Drift(
            shifts=tuple(measure_drift(reference, independent, BOUNDS, FALSE_ALARM_RATE)) if is_enough else (),
            reference=reference,
            live=live,
            independent=len(independent),
            gap_s=gap_s,
            window_s=window_s,
        )

    def _queries(self, champion: ReleaseManifest, now: datetime, window_s: float) -> tuple[Queries, list[str]]:
        return live_queries(self.store, champion.version, now - timedelta(seconds=window_s), now)

    def _live_accuracy(self, champion: ReleaseManifest, now: datetime, faults: list[str]) -> Assessment | None:
        labels = labels_of_release(self.store, champion.version)
        faults += labels.damaged.values()
        return assess(labels.queries, expected_accuracy(champion.metrics), now)

    def _baseline(self, version: str) -> DriftBaseline:
        if version not in self._baselines:
            with tempfile.TemporaryDirectory(prefix="evernear-champion-") as temporary:
                archive = Path(temporary) / ARCHIVE_FILE
                self._registry.fetch(version, archive)
                data = read_part(archive, DRIFT_BASELINE_FILE) or b""
            self._baselines = {version: DriftBaseline.parse(data, f"{DRIFT_BASELINE_FILE} of release {version}")}
        return self._baselines[version]


def attempt(act: Callable[[], _T], faults: list[str]) -> _T | None:
    """The result of ``act``, or None after a failure, which ``faults`` receives."""
    try:
        return act()
    except EvernearError as error:
        faults.append(str(error))
        return None
