"""What a look sees: images that are new to the champion, and how live queries differ from its reference.

What was trained on, and what the gallery holds, is read from releases: the champion names its dataset's snapshot, and
the oldest release in its line with the same network names the one that the network was trained on (a new index keeps
the network and changes the snapshot). So nothing is remembered here, and a restart changes nothing.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from evernear.data.drift import Measure, Shift, measure_drift
from evernear.data.manifest import Manifest, manifest_key
from evernear.data.source_diff import SourceDiff, diff_source, fetch_ledger
from evernear.errors import EvernearError, StoreError
from evernear.release.archive_reader import ARCHIVE_FILE, read_part
from evernear.release.drift_baseline import DriftBaseline
from evernear.release.manifest import DRIFT_BASELINE_FILE, ReleaseManifest
from evernear.release.registry import Registry
from evernear.settings import Settings
from evernear.store import Store
from evernear.triggers.watch.queries import live_queries, reference_queries

_Seen = TypeVar("_Seen")


@dataclass(frozen=True)
class News:
    """What is new in the source, for the champion."""

    train_images: float
    """Expected new images of the train split, against what the network was trained on."""
    trained_on: int
    """Images that the network was trained on."""
    gallery_images: float
    """Expected new images of the gallery, against what the champion's gallery holds."""
    new_files: int
    """Files that the champion's snapshot does not hold."""
    gone_files: int
    listed_files: int
    new_classes: dict[str, int]
    """Files of each class that the champion cannot answer with."""


@dataclass(frozen=True)
class Drift:
    """How live queries of the champion differ from its reference; no ``shifts`` where there was too little to tell."""

    shifts: tuple[Shift, ...]
    queries: int
    sampled: int
    unknown_rate: float
    reference_unknown_rate: float


@dataclass(frozen=True)
class Sight:
    """All that a decision is made of. What could not be looked at is None and has its sentence in ``faults``."""

    champion: str | None
    champion_since: datetime | None = None
    news: News | None = None
    drift: Drift | None = None
    faults: tuple[str, ...] = ()


@dataclass
class Looker:
    """Looks at one source and one store; ``cache`` is a directory for ledgers and references, which never change."""

    settings: Settings
    store: Store
    cache: Path
    _references: dict[str, DriftBaseline | None] = field(default_factory=dict[str, DriftBaseline | None])

    def look(self, now: datetime) -> Sight:
        """See what is new and what drifted.

        A source or a part of the store that fails is told in ``faults``, and hides nothing else.

        Raises:
            StoreError, IntegrityError: it cannot be told what serves.
        """
        registry = Registry(self.store)
        pointer = registry.champion()
        champion = registry.get(pointer.version).manifest if pointer else None
        faults: list[str] = []
        news = _try(lambda: self._news(registry, champion), faults)
        drift = _try(lambda: self._drift(registry, champion, now, faults), faults) if champion else None
        return Sight(
            champion=pointer.version if pointer else None,
            champion_since=pointer.promotion.since if pointer else None,
            news=news,
            drift=drift,
            faults=tuple(faults),
        )

    def _news(self, registry: Registry, champion: ReleaseManifest | None) -> News:
        if champion is None:
            (every,) = diff_source(self.settings.data, [None])
            return _as_news(every, every, 0, every.labels)
        served = self._snapshot(champion)
        trained = self._snapshot(_first_of_network(registry, champion))
        ledgers = [fetch_ledger(self.store, snapshot, self.cache) for snapshot in (served, trained)]
        self._drop_from_cache(keep=ledgers)
        if served.digest == trained.digest:
            (gallery,) = (train,) = diff_source(self.settings.data, ledgers[:1])
        else:
            gallery, train = diff_source(self.settings.data, ledgers)
        known = set(champion.labels)
        new_labels = {label: count for label, count in gallery.labels.items() if label not in known}
        return _as_news(gallery, train, trained.count("train"), new_labels)

    def _snapshot(self, release: ReleaseManifest) -> Manifest:
        key = manifest_key(release.dataset_name, release.dataset_digest)
        found = self.store.find(key)
        if found is None:
            raise StoreError(
                f"What is new cannot be told: the store no longer has {key}, which release {release.version} was made"
                " from; train once more."
            )
        return Manifest.from_json(found[0], f"{self.store.uri}/{key}")

    def _drift(self, registry: Registry, champion: ReleaseManifest, now: datetime, faults: list[str]) -> Drift | None:
        watch = self.settings.watch
        reference = self._reference(registry, champion.version)
        if reference is None:
            return None
        window = timedelta(seconds=watch.drift_window_s)
        live, damaged = live_queries(self.store, champion.version, now - window, now)
        faults += damaged
        measured = reference_queries(reference)
        enough = len(live.distances) >= watch.min_queries
        bounds: dict[Measure, float] = {
            "unknown_rise": watch.unknown_rise,
            "distance_shift": watch.distance_shift,
            "embedding_shift": watch.embedding_shift,
        }
        return Drift(
            shifts=tuple(measure_drift(measured, live, bounds, watch.false_alarm_rate)) if enough else (),
            queries=live.total,
            sampled=len(live.distances),
            unknown_rate=live.unknown_rate,
            reference_unknown_rate=measured.unknown_rate,
        )

    def _reference(self, registry: Registry, version: str) -> DriftBaseline | None:
        """The champion's; None for a release that was archived before there were references."""
        if version not in self._references:
            if DRIFT_BASELINE_FILE not in registry.get(version).manifest.parts:
                self._references = {version: None}
                return None
            with tempfile.TemporaryDirectory(prefix="evernear-champion-") as temporary:
                archive = Path(temporary) / ARCHIVE_FILE
                registry.fetch(version, archive)
                data = read_part(archive, DRIFT_BASELINE_FILE) or b""
            self._references = {version: DriftBaseline.parse(data, f"{DRIFT_BASELINE_FILE} of release {version}")}
        return self._references[version]

    def _drop_from_cache(self, keep: list[Path]) -> None:
        for path in self.cache.glob("*.sqlite"):
            if path not in keep:
                path.unlink(missing_ok=True)


def _first_of_network(registry: Registry, champion: ReleaseManifest) -> ReleaseManifest:
    """The oldest release in the champion's line that has its network: made from what that was trained on."""
    found = champion
    while found.parent is not None:
        parent = registry.get(found.parent, include_pruned=True).manifest
        if parent.network_sha256 != champion.network_sha256:
            break
        found = parent
    return found


def _as_news(gallery: SourceDiff, train: SourceDiff, trained_on: int, new_classes: Mapping[str, int]) -> News:
    return News(
        train_images=train.expected("train"),
        trained_on=trained_on,
        gallery_images=gallery.expected("gallery"),
        new_files=gallery.new,
        gone_files=gallery.gone,
        listed_files=gallery.listed,
        new_classes=dict(new_classes),
    )


def _try(look: Callable[[], _Seen], faults: list[str]) -> _Seen | None:
    try:
        return look()
    except EvernearError as error:
        faults.append(str(error))
        return None
