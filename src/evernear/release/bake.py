"""The stored state of a bake, and the records of releases that a bake rolled back.

::

    triggers/bake.json                 pod counters, the last hour of requests, the bake
    triggers/breaches/<version>.json   a release that broke a rule

A release that broke a rule is never deployed again without a manual promotion.

One watcher writes the state with compare-and-swap. It includes the pods' counters, so that a new
watcher can continue after the previous one was killed.
"""

from datetime import datetime, timedelta
from typing import ClassVar, Self

from pydantic import AwareDatetime

from evernear.common.frozen import Document, Frozen
from evernear.common.store import Store
from evernear.errors import ConflictError
from evernear.evaluation.bake import Figures
from evernear.index.description import DESCRIPTION_FILE, PARTS
from evernear.release.manifest import NETWORK_FILE, PREPROCESSING_FILE, ReleaseManifest, Version
from evernear.release.promotions import Cause

STATE = "triggers/bake.json"
BREACHES = "triggers/breaches/"
CELL = timedelta(minutes=1)
REFERENCE = timedelta(hours=1)
"""Time window in which the previous release is observed. It is short, because the mix of images
changes during the day."""
MAX_CELLS = 240
"""Maximum number of cells in a bake. Beyond it, adjacent cells are merged in pairs."""


class PodCounters(Frozen):
    version: str
    figures: Figures


class Cell(Frozen):
    """The requests that a release answered in the minute that begins at ``at``."""

    version: str
    at: AwareDatetime
    figures: Figures


class Bake(Frozen):
    """The comparison of ``version`` with the previous release."""

    version: Version
    number: int
    """The promotion's."""
    previous: Version
    ends: AwareDatetime
    before: tuple[Figures, ...]
    seen: tuple[Figures, ...] = ()
    """The requests since the rollout, for each poll."""
    breach: str = ""
    """A sentence about the broken rule. If it is not empty, the rollback is in progress."""

    def add(self, figures: Figures) -> Self:
        if not figures.requests:
            return self
        seen = (*self.seen, figures)
        if len(seen) > MAX_CELLS:
            seen = tuple(left + right for left, right in zip(seen[::2], (*seen[1::2], Figures()), strict=False))
        return self.model_copy(update={"seen": seen})


class BakeState(Document):
    """The object at `STATE`. ``number`` is the newest promotion that the watcher has noticed, and
    ``version`` its champion."""

    remedy: ClassVar[str] = "remove it to start over"

    version: Version
    number: int
    pods: dict[str, PodCounters] = {}
    """Keyed by address."""
    recent: tuple[Cell, ...] = ()
    bake: Bake | None = None
    last: str = ""

    def observe(self, pods: dict[str, PodCounters], now: datetime) -> Self:
        """The state after a poll of the pods. Only increments count. The first counter values of a
        new or restarted pod are ignored, because they include start-up queries."""
        increments = self._increments(pods)
        bake = self.bake and self.bake.add(increments.get(self.bake.version, Figures()))
        recent = self.recent
        for version, figures in increments.items():
            if figures.requests:
                recent = _add(recent, Cell(version=version, at=now, figures=figures))
        if self.version in increments:
            recent = tuple(cell for cell in recent if now - REFERENCE <= cell.at <= now)
        # A pod that did not respond to this poll is remembered as long as its release is live.
        known = {address: pod for address, pod in self.pods.items() if pod.version == self.version}
        return self.model_copy(update={"pods": known | pods, "recent": recent, "bake": bake})

    def _increments(self, pods: dict[str, PodCounters]) -> dict[str, Figures]:
        """By release."""
        increments: dict[str, Figures] = {}
        for address, pod in pods.items():
            earlier = self.pods.get(address)
            increment = pod.figures.since(earlier.figures) if earlier and earlier.version == pod.version else None
            if increment is not None:
                increments[pod.version] = increments.get(pod.version, Figures()) + increment
        return increments

    def answered_by(self, version: str, before: datetime) -> tuple[Figures, ...]:
        """The requests that ``version`` answered in the hour before ``before``, for each minute."""
        cells = [cell for cell in self.recent if cell.version == version and before - REFERENCE <= cell.at <= before]
        return tuple(cell.figures for cell in cells)


class BakeStore:
    def __init__(self, store: Store) -> None:
        self._store = store

    def load(self) -> tuple[BakeState | None, str | None]:
        """The state and its etag, or None for both before the first `save`."""
        stored = self._store.find(STATE)
        if stored is None:
            return None, None
        return BakeState.from_json(stored[0], f"{self._store.uri}/{STATE}"), stored[1]

    def save(self, state: BakeState, etag: str | None) -> str:
        """Replace the state if it still has the etag ``etag``, and return the new one."""
        return self._store.put_if(STATE, state.to_json(), etag)


class Breach(Document):
    """The record of a release that broke a rule after its rollout. ``parts`` contains the hashes of
    the parts that determine its predictions."""

    remedy: ClassVar[str] = "a person who removes it allows the release again"

    version: Version
    rule: str
    at: AwareDatetime
    parts: dict[str, str]
    overruled_by: str = ""

    @classmethod
    def of(cls, manifest: ReleaseManifest, rule: str, at: datetime) -> Self:
        return cls(version=manifest.version, rule=rule, at=at, parts=deciding_parts(manifest))


class Breaches:
    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, breach: Breach) -> None:
        """An existing record for the release is not changed."""
        try:
            self._store.put_if(_key(breach.version), breach.to_json(), None)
        except ConflictError:
            return

    def find(self, version: str) -> Breach | None:
        """Even if it was overruled."""
        stored = self._store.find(_key(version))
        return Breach.from_json(stored[0], f"{self._store.uri}/{_key(version)}") if stored else None

    def require_none(self, manifest: ReleaseManifest) -> None:
        """Check that no bake rolled back this release or one with the same network and index,
        unless it has been promoted manually since."""
        for info in list(self._store.list(BREACHES)):
            breach = self.find(info.key.removeprefix(BREACHES).removesuffix(".json"))
            if breach is None or breach.overruled_by or breach.parts != deciding_parts(manifest):
                continue
            same = "It" if breach.version == manifest.version else f"Release {breach.version}, which is the same one,"
            raise ConflictError(
                f"Release {manifest.version} is not deployed. {same} was rolled back after its rollout: {breach.rule} "
                f"A person can promote it: `evernear registry promote {breach.version} --why REASON`."
            )

    def overrule(self, version: str, cause: Cause | None) -> None:
        """Allow the deployment of a release that a bake rolled back, because it is being promoted
        manually."""
        breach = self.find(version)
        if breach is not None:
            by = (cause or Cause.of_this_process()).by
            self._store.put(_key(version), breach.model_copy(update={"overruled_by": by}).to_json())


def deciding_parts(manifest: ReleaseManifest) -> dict[str, str]:
    """The SHA-256 hash of each part that determines a release's predictions, and the name of its
    collection."""
    names = (NETWORK_FILE, DESCRIPTION_FILE, PREPROCESSING_FILE, *PARTS)
    parts = {name: manifest.parts[name].sha256 for name in names if name in manifest.parts}
    return parts | ({"collection": manifest.collection.name} if manifest.collection else {})


def _add(cells: tuple[Cell, ...], new: Cell) -> tuple[Cell, ...]:
    """Append a cell, or merge it into the last one if both have the same release and minute."""
    last = cells[-1] if cells else None
    if last is None or last.version != new.version or not last.at <= new.at < last.at + CELL:
        return (*cells, new)
    return (*cells[:-1], last.model_copy(update={"figures": last.figures + new.figures}))


def _key(version: str) -> str:
    return f"{BREACHES}{version}.json"
