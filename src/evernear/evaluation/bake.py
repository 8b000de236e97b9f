"""Compare the live requests to a release with those to the previous release.

A rule is broken if the share of requests that it concerns has risen by more than a margin. The
comparison is repeated every few seconds, so a fixed significance level per comparison would
eventually roll back nearly every release. Each rule therefore uses an e-process, a mixture of
likelihood ratios against the largest share that it tolerates (Robbins 1970; Howard, Ramdas,
McAuliffe and Sekhon 2021). While the share is within the tolerance, the probability that it ever
exceeds 1 / level is at most the level, after any number of comparisons (Ville 1939).

Requests come in bursts. Their counts are therefore divided by their dispersion, the ratio of the
variance between the cells of a window to that of independent requests (Pearson's chi-squared
divided by its degrees of freedom, McCullagh and Nelder 1989).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from evernear.common.frozen import Frozen
from evernear.index.description import clopper_pearson

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
