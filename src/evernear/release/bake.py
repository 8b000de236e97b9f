"""What a bake compares: the live requests to a release with those to the previous release.

A rule is broken if the share of requests that it concerns has risen by more than a margin. The
comparison is repeated every few seconds, so a fixed significance level per comparison would
eventually roll back nearly every release. Each rule therefore uses an e-process, a mixture of
likelihood ratios against the largest share that it tolerates (Robbins 1970; Howard, Ramdas,
McAuliffe and Sekhon 2021). While the share is within the tolerance, the probability that it ever
exceeds 1 / level is at most the level, after any number of comparisons (Ville 1939).

Requests come in bursts. Their counts are therefore divided by their dispersion, the ratio of the
variance between the cells of a window to that of independent requests (Pearson's chi-squared
divided by its degrees of freedom, McCullagh and Nelder 1989).

In the store::

    triggers/bake.json                 pod counters, the last hour of requests, the bake
    triggers/breaches/<version>.json   a release that broke a rule

A release that broke a rule is never deployed again without a manual promotion. One watcher
(`evernear.triggers.watch.baker`) writes the state with compare-and-swap. It includes the pods'
counters, so that a new watcher can continue after the previous one was killed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar, NamedTuple, Self

from pydantic import AwareDatetime

from evernear.common.frozen import Document, Frozen
from evernear.common.store import Store
from evernear.errors import ConflictError
from evernear.index.description import DESCRIPTION_FILE, PARTS, clopper_pearson
from evernear.release.manifest import NETWORK_FILE, PREPROCESSING_FILE, ReleaseManifest, Version
from evernear.release.promotions import Cause

LEVEL = 0.005
"""Upper limit on the probability, for all rules together, of rolling back a release whose shares
are within the margins."""
ERROR_MARGIN = 0.01
SLOW_MARGIN = 0.01
UNKNOWN_MARGIN = 0.05
WITHOUT_REFERENCE = 0.05
"""Tolerated share of errors if no request of the previous release was counted."""
SLOWER = 1.4
"""A request is slow if it takes longer than this multiple of the previous release's p99 latency."""
MIN_CELLS = 3
"""With fewer cells, a rise cannot be distinguished from a burst."""
STATE = "triggers/bake.json"
BREACHES = "triggers/breaches/"
CELL = timedelta(minutes=1)
REFERENCE = timedelta(hours=1)
"""Time window in which the previous release is observed. It is short, because the mix of images
changes during the day."""
MAX_CELLS = 240
"""Maximum number of cells in a bake. Beyond it, adjacent cells are merged in pairs."""


class Figures(Frozen):
    """Request counts: the counter values of a pod, or their increments.

    The worker counts ``answered`` and ``refused`` requests (status 500 or more). ``failed`` counts
    all responses with such a status, also those because the queue is full or the worker is dead.
    ``timed`` requests got a prediction. ``within`` maps an upper bound in seconds to the number of
    those whose client waited no longer, queue included.
    """

    answered: int = 0
    refused: int = 0
    failed: int = 0
    predictions: int = 0
    unknown: int = 0
    timed: int = 0
    within: dict[float, int] = {}

    def __add__(self, other: Self) -> "Figures":
        return total((self, other))

    def since(self, earlier: Self) -> Self | None:
        """The increments, or None if a counter value decreased, as after a restart."""
        if any(getattr(self, name) < getattr(earlier, name) for name in _COUNTERS):
            return None
        counts = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS}
        within = {bound: count - earlier.within.get(bound, 0) for bound, count in self.within.items()}
        return self.model_copy(update=counts | {"within": within})

    @property
    def requests(self) -> int:
        return self.answered + max(0, self.failed - self.refused)

    @property
    def errors(self) -> int:
        """Requests for which the client received a status of 500 or more."""
        return max(self.failed, self.refused)

    @property
    def p99_s(self) -> float | None:
        """The smallest bound within which 99% of the clients got their prediction. None if no
        request was timed or no bound is large enough."""
        return next((bound for bound, count in sorted(self.within.items()) if count >= 0.99 * self.timed > 0), None)


_COUNTERS = ("answered", "refused", "failed", "predictions", "unknown", "timed")
Cells = Sequence[Figures]
"""The requests in a window, counted in short intervals."""


class Share(NamedTuple):
    events: float
    total: float

    def __str__(self) -> str:
        return f"{self.events / self.total:.1%}" if self.total else "none"


@dataclass(frozen=True)
class Rule:
    """A share of the requests that may rise by at most ``margin``. ``events`` completes a sentence
    that begins with the share. ``without_reference`` is the largest tolerated share if there are no
    earlier requests."""

    name: str
    events: str
    margin: float
    share: Callable[[Figures], Share]
    without_reference: float = 1.0

    def describe(self, reference: Share, now: Share) -> str:
        sentence = f"Rule {self.name}: {now} of {round(now.total):,} {self.events}"
        if not reference.total:
            return f"{sentence}, and at most {self.without_reference:.0%} are tolerated without a reference."
        return f"{sentence}, compared with {reference} of {round(reference.total):,} before the rollout."


def total(cells: Cells) -> Figures:
    counts = {name: sum(getattr(cell, name) for cell in cells) for name in _COUNTERS}
    bounds = {bound for cell in cells for bound in cell.within}
    within = {bound: sum(cell.within.get(bound, 0) for cell in cells) for bound in bounds}
    return Figures.model_validate(counts | {"within": within})


class Comparison:
    """Compares a release with the previous one, which answered the requests in ``before``. Without
    any, only errors are compared, with a fixed bound."""

    def __init__(self, before: Cells) -> None:
        reference = total(before)
        self._rules = rules_for(reference)
        self._references = [rule.share(reference) for rule in self._rules]
        self._dispersions = [dispersion([rule.share(cell) for cell in before]) for rule in self._rules]

    def find_breach(self, seen: Cells) -> str | None:
        """A sentence about the first broken rule, or None. ``seen`` are the requests since the
        rollout."""
        if len(seen) < MIN_CELLS:
            return None
        level, all_seen = LEVEL / len(self._rules), total(seen)
        for rule, reference, spread in zip(self._rules, self._references, self._dispersions, strict=True):
            now = rule.share(all_seen)
            if now.events <= rule.margin * now.total:
                continue
            spread = max(spread, dispersion([rule.share(cell) for cell in seen]))
            if reference.total:
                # The reference is also a sample, and uses half of the level.
                tolerated = clopper_pearson(*_thinned(reference, spread), level / 2)[1] + rule.margin
            else:
                tolerated = rule.without_reference
            if log_evidence(_thinned(now, spread), tolerated) > math.log(2 / level):
                return rule.describe(reference, now)
        return None


def rules_for(before: Figures) -> tuple[Rule, ...]:
    limit_s = slow_limit_s(before)

    def errors(figures: Figures) -> Share:
        return Share(figures.errors, figures.requests)

    def slow(figures: Figures) -> Share:
        if limit_s is None or limit_s not in figures.within:
            return Share(0, 0)
        return Share(figures.timed - figures.within[limit_s], figures.timed)

    def unknown(figures: Figures) -> Share:
        return Share(figures.unknown, figures.predictions)

    return (
        Rule("errors", "requests got an error", ERROR_MARGIN, errors, WITHOUT_REFERENCE),
        Rule("p99", f"clients waited longer than {limit_s or 0:g} s", SLOW_MARGIN, slow),
        Rule("unknown", "images are unknown", UNKNOWN_MARGIN, unknown),
    )


def slow_limit_s(before: Figures) -> float | None:
    """The smallest bound that is at least `SLOWER` times the p99 of ``before``. None if no bound is
    large enough, or if no request was timed."""
    p99_s = before.p99_s
    if p99_s is None:
        return None
    return next((bound for bound in sorted(before.within) if SLOWER * p99_s <= bound < math.inf), None)


def dispersion(shares: Sequence[Share]) -> float:
    """Pearson's chi-squared of the cells divided by its degrees of freedom, but at least 1."""
    shares = [share for share in shares if share.total]
    events, count = (sum(part) for part in zip(*shares, strict=True)) if shares else (0, 0)
    if len(shares) < MIN_CELLS or not 0 < events < count:
        return 1.0
    mean = events / count
    squares = sum((share.events - share.total * mean) ** 2 / share.total for share in shares)
    return max(1.0, squares / (mean * (1 - mean) * (len(shares) - 1)))


def log_evidence(share: Share, tolerated: float) -> float:
    """Logarithm of the e-process for the hypothesis that the share is above ``tolerated``: a
    uniform mixture over all such shares."""
    from scipy.special import betaincc, betaln

    if not 0 < tolerated < 1:
        return -math.inf
    events, others = share.events, share.total - share.events
    tail = float(betaincc(events + 1, others + 1, tolerated))
    if tail <= 0:
        return -math.inf
    mixture = float(betaln(events + 1, others + 1)) + math.log(tail) - math.log1p(-tolerated)
    return mixture - events * math.log(tolerated) - others * math.log1p(-tolerated)


def _thinned(share: Share, spread: float) -> Share:
    """Counts of independent requests that would be as informative as ``share``."""
    return Share(share.events / spread, share.total / spread)


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
