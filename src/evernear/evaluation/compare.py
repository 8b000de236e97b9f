"""The paired test: is the challenger worse than the champion on the very same queries?"""

from collections.abc import Iterable

import numpy as np
from pydantic import Field
from scipy.stats import binomtest

from evernear.errors import IntegrityError
from evernear.evaluation.measure import Outcomes
from evernear.frozen import Frozen


class PairedCounts(Frozen):
    """Queries by who answered them rightly; those that both or neither did tell nothing of who is better."""

    queries: int = Field(ge=0)
    regressions: int = Field(ge=0)
    """Right by the champion, wrong by the candidate."""
    improvements: int = Field(ge=0)
    """Wrong by the champion, right by the candidate."""

    @property
    def p_worse(self) -> float:
        """Chance of so many regressions, or more, if the two were equally good; see `mcnemar_worse`."""
        return mcnemar_worse(self.regressions, self.improvements)


class Comparison(Frozen):
    """Candidate against champion over all queries and within each class that has any."""

    overall: PairedCounts
    classes: dict[str, PairedCounts]

    def within(self, labels: Iterable[str]) -> PairedCounts:
        """The queries of ``labels`` alone."""
        chosen = [self.classes[label] for label in labels if label in self.classes]
        return PairedCounts(
            queries=sum(pairs.queries for pairs in chosen),
            regressions=sum(pairs.regressions for pairs in chosen),
            improvements=sum(pairs.improvements for pairs in chosen),
        )


def mcnemar_worse(regressions: int, improvements: int) -> float:
    """p-value of the exact one-sided McNemar test (McNemar 1947, Psychometrika 12:153).

    Of two equally good systems each is as likely as the other to be the one that is right where they differ,
    so the regressions among the ``regressions + improvements`` queries that tell are Binomial(n, 1/2); p is
    the chance of at least as many. It is the exact binomial and not its mid-p or chi-squared form, so that a
    level holds as an upper bound for any number of queries, a handful too.
    """
    differing = regressions + improvements
    return float(binomtest(regressions, differing, alternative="greater").pvalue) if differing else 1.0


def compare(candidate: Outcomes, champion: Outcomes, labels: tuple[str, ...]) -> Comparison:
    """Compare the outcomes of the same queries, whose label numbers index ``labels``.

    Raises:
        IntegrityError: they are not of the same queries.
    """
    truth = candidate.labels
    if not np.array_equal(truth, champion.labels):
        raise IntegrityError("Candidate and champion were not measured on the same queries; evaluate again.")
    regressed, improved = champion.right & ~candidate.right, candidate.right & ~champion.right
    totals, lost, won = (
        np.bincount(numbers, minlength=len(labels)).tolist() for numbers in (truth, truth[regressed], truth[improved])
    )
    return Comparison(
        overall=PairedCounts(queries=len(truth), regressions=int(regressed.sum()), improvements=int(improved.sum())),
        classes={
            label: PairedCounts(queries=total, regressions=less, improvements=more)
            for label, total, less, more in zip(labels, totals, lost, won, strict=True)
            if total
        },
    )
