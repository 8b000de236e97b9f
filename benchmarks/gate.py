"""Error rates of the gate on simulated cases: ``python benchmarks/gate.py``.

The outcomes of champion and challenger are simulated with a known difference and
evaluated with the gate's comparison, rules and default thresholds. The difference is
simulated in one of two ways:

- ``drawn``: The models differ, and the test split is a sample, so the challenger's
  accuracy on it varies. The gate's level refers to this case.
- ``frozen``: The difference applies to the test split itself: the challenger has an
  exact number of additional errors.

``shared`` is the fraction of the better model's errors that the other model repeats.
Two seeds of the default recipe share 60% on MNIST's 10,000 test images (25 of 40, at
99.60% and 99.54% after four epochs). 0% is the harder case: the less two models agree,
the more of their difference is due to chance.

Three more tables concern the anchor. Their models answer one frozen test split, and each pair
shares the given fraction of errors: a query has a difficulty, and a model a deviation from it, both
normal.

- Equal: champion, anchor and candidate are equally good. Every hold is a false one.
- Chains: each of ten candidates is a point worse than the one before it. The result is
  the accuracy of the last champion. Without an anchor, only the test against the
  champion stops a chain.
- Detectable losses, as the verdict states them, by the size of the test split.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binomtest, multivariate_normal

from benchmarks import machine
from evernear.evaluation.compare import compare, compare_refusals
from evernear.evaluation.evaluate import AnchorEvaluation, Evaluation
from evernear.evaluation.gate import decide
from evernear.evaluation.measure import OTHER_LABEL, Measurement, Outcomes
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.statistics import CONFIDENCE, Interval, proportion
from evernear.settings import GateSettings

LABELS = tuple("0123456789")
MEASURED_SHARED = 0.6
UNSEEN_ACCEPTED = proportion(5, 100, CONFIDENCE)
"""By both systems, of the images of classes that nobody trained on."""
CONVENTIONAL_LEVEL = 0.05
"""A significance level for comparison with the default."""


@dataclass(frozen=True)
class Case:
    """A simulated pair: ``difference_points`` is challenger minus champion, in points of
    accuracy."""

    planted: Literal["drawn", "frozen"]
    queries: int
    champion_accuracy: float
    difference_points: float
    shared: float

    def outcomes(self, seed: int) -> tuple[Outcomes, Outcomes]:
        """Simulate challenger and champion on the same queries."""
        rng = np.random.default_rng(seed)
        champion_error_rate = 1 - self.champion_accuracy
        challenger_error_rate = champion_error_rate - self.difference_points / 100
        if challenger_error_rate < 0:
            raise ValueError(f"{self} would be correct more than 100% of the time")
        both = self.shared * min(champion_error_rate, challenger_error_rate)
        if not self.shared:
            both = champion_error_rate * challenger_error_rate
        probabilities = np.array([both, champion_error_rate - both, challenger_error_rate - both, 0.0])
        probabilities[3] = 1 - probabilities.sum()
        if self.planted == "drawn":
            counts = rng.multinomial(self.queries, probabilities)
        else:
            counts = (probabilities * self.queries).round().astype(int)
            counts[3] = self.queries - counts[:3].sum()
        # Both wrong, champion wrong, challenger wrong, both correct.
        kind = rng.permutation(np.repeat(np.arange(4), counts))
        labels = rng.integers(0, len(LABELS), self.queries, dtype=np.int32)
        return Outcomes((kind == 1) | (kind == 3), labels), Outcomes((kind == 2) | (kind == 3), labels)


def cases() -> Iterator[Case]:
    """Yield cases of MNIST's size and target accuracy, then of a test split of scikit-learn's
    digits.

    On such a small split, most equal models that fail are below the accuracy floor, not behind the
    champion.
    """
    for planted in ("drawn", "frozen"):
        for shared in (MEASURED_SHARED, 0.0):
            for points in (0.0, -0.3, +0.3):
                yield Case(planted, 10_000, 0.996, points, shared)
    for points in (0.0, -3.0, -5.0, -10.0, +2.0):
        yield Case("drawn", 180, 0.97, points, MEASURED_SHARED)
    for queries in (50, 200, 1000, 2000):
        for shared in (MEASURED_SHARED, 0.0):
            yield Case("drawn", queries, 0.9, 0.0, shared)


class TestSplit:
    """A frozen test split, answered by models of which each pair shares the fraction ``shared`` of
    errors."""

    def __init__(self, queries: int, shared: float, error_rate: float, seed: int) -> None:
        """``shared`` holds for models of ``error_rate``, approximately also for others."""
        self._rng = np.random.default_rng(seed)
        self._correlation = correlation(shared, error_rate)
        self._difficulty = self._rng.standard_normal(queries)
        self._labels = self._rng.integers(0, len(LABELS), queries, dtype=np.int32)

    def outcomes(self, error_rate: float) -> Outcomes:
        """The outcomes of another model."""
        own: NDArray[np.float64] = self._rng.standard_normal(len(self._labels))
        score = np.sqrt(self._correlation) * self._difficulty + np.sqrt(1 - self._correlation) * own
        return Outcomes(score <= -NormalDist().inv_cdf(error_rate), self._labels)


@cache
def correlation(shared: float, error_rate: float) -> float:
    """The correlation of two models' scores with which they share the fraction ``shared`` of their
    errors."""
    limit = -NormalDist().inv_cdf(error_rate)

    def excess(correlation: float) -> float:
        both = multivariate_normal.cdf([-limit, -limit], cov=[[1, correlation], [correlation, 1]])  # pyright: ignore[reportArgumentType]
        return float(both) / error_rate - shared

    return float(brentq(excess, 0.0, 0.999)) if shared else 0.0  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Chain:
    """Ten candidates, each ``step_points`` worse than the one before it."""

    queries: int
    shared: float
    has_anchor: bool = True
    start: float = 0.97
    step_points: float = 1.0
    steps: int = 10

    def run(self, seed: int) -> tuple[float, int]:
        """The accuracy of the last champion, and the number of the first candidate that was held
        (0: none)."""
        split = TestSplit(self.queries, self.shared, 1 - self.start, seed)
        accuracy, first_held = self.start, 0
        champion = anchor = split.outcomes(1 - self.start)
        for step in range(1, self.steps + 1):
            candidate_accuracy = self.start - step * self.step_points / 100
            candidate = split.outcomes(1 - candidate_accuracy)
            fixed = anchor if champion is not anchor else None
            verdict = decide(make_evaluation(candidate, champion, anchor=fixed), GateSettings())
            rules = {rule.name: rule.passed for rule in verdict.rules}
            if verdict.promote if self.has_anchor else rules["no_worse"] and rules["class_recall"]:
                champion, accuracy = candidate, candidate_accuracy
                anchor = anchor if self.has_anchor else candidate
            else:
                first_held = first_held or step
        return accuracy, first_held


def chains() -> Iterator[Chain]:
    for queries in (20, 50, 200):
        for shared in (MEASURED_SHARED, 0.0):
            for has_anchor in (False, True):
                yield Chain(queries, shared, has_anchor)


def held_equal(queries: int, accuracy: float, shared: float, seed: int) -> set[str]:
    """The rules that hold a candidate that is as good as the champion and the anchor."""
    split = TestSplit(queries, shared, 1 - accuracy, seed)
    candidate, champion, anchor = (split.outcomes(1 - accuracy) for _ in range(3))
    verdict = decide(make_evaluation(candidate, champion, anchor=anchor), GateSettings())
    return {rule.name for rule in verdict.rules if not rule.passed}


def make_evaluation(
    challenger: Outcomes, champion: Outcomes, labels: tuple[str, ...] = LABELS, anchor: Outcomes | None = None
) -> Evaluation:
    """The evaluation of systems that differ only in these outcomes. Without ``anchor``, the
    champion is the anchor."""
    fixed = (
        AnchorEvaluation(
            name="anchor",
            measurement=make_measurement("anchor", anchor, labels),
            comparison=compare(challenger, anchor, labels),
            test_overlap=1.0,
        )
        if anchor
        else None
    )
    return Evaluation(
        candidate=make_measurement("challenger", challenger, labels),
        champion=make_measurement("champion", champion, labels),
        comparison=compare(challenger, champion, labels),
        refusals=compare_refusals(challenger, champion, labels),
        open_set=OpenSet(held_out=("held out",), draws=1, false_accepts=UNSEEN_ACCEPTED),
        champion_false_accepts=Interval(
            value=UNSEEN_ACCEPTED.value, low=UNSEEN_ACCEPTED.low, high=UNSEEN_ACCEPTED.high
        ),
        leakage={"train": 0, "gallery": 0, "query": 0},
        champion_leakage={"train": 0, "gallery": 0, "query": 0},
        champion_test_overlap=1.0,
        anchor=fixed,
    )


def make_measurement(name: str, outcomes: Outcomes, labels: tuple[str, ...]) -> Measurement:
    totals = np.bincount(outcomes.labels, minlength=len(labels))
    correct_counts = np.bincount(outcomes.labels[outcomes.correct], minlength=len(labels))
    label_right = proportion(int(outcomes.correct.sum()), len(outcomes.correct), CONFIDENCE)
    return Measurement(
        name=name,
        network_sha256=name,
        index_digest=name,
        dataset_digest="planted",
        queries_sha256="planted",
        labels=labels,
        known_labels=labels,
        threshold=1.0,
        parity_max_abs_difference=0.0,
        label_right=label_right,
        recall_at_5=label_right,
        false_rejects=proportion(int((~outcomes.named).sum()), label_right.total, CONFIDENCE),
        index_recall=proportion(label_right.total, label_right.total, CONFIDENCE),
        class_label_right={
            label: proportion(int(correct), int(total), CONFIDENCE)
            for label, correct, total in zip(labels, correct_counts, totals, strict=True)
            if total
        },
        confusions=_confusions(outcomes, labels),
    )


def _confusions(outcomes: Outcomes, labels: tuple[str, ...]) -> tuple[tuple[str, str, int, int], ...]:
    """All wrong labels are the same one."""
    pairs = 2 * outcomes.labels + outcomes.correct
    counts, unknown = np.bincount(pairs), np.bincount(pairs, weights=~outcomes.named)
    return tuple(
        (labels[pair // 2], labels[pair // 2] if pair % 2 else OTHER_LABEL, int(counts[pair]), int(unknown[pair]))
        for pair in np.flatnonzero(counts)
    )


def count_held(case: Case, seeds: int, levels: Sequence[float]) -> list[int]:
    """The number of ``seeds`` simulations of ``case`` that the gate holds, at each of
    ``levels``."""
    counts = [0] * len(levels)
    for seed in range(seeds):
        evaluation = make_evaluation(*case.outcomes(seed))
        for index, level in enumerate(levels):
            counts[index] += not decide(evaluation, GateSettings(significance=level)).promote
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    arguments = parser.parse_args()
    machine_info, settings = machine.describe(), GateSettings()
    levels = (settings.significance, CONVENTIONAL_LEVEL)
    results: list[dict[str, object]] = []
    held = [f"held at level {level:g} (95% interval)" for level in levels]
    table = [["queries", "champion", "challenger", "planted", "shared errors", *held]]
    for case in cases():
        row = [
            f"{case.queries:,}",
            f"{case.champion_accuracy:.1%}",
            describe_difference(case),
            case.planted,
            f"{case.shared:.0%}",
        ]
        for level, count in zip(levels, count_held(case, arguments.seeds, levels), strict=True):
            interval = binomtest(count, arguments.seeds).proportion_ci(0.95, method="exact")
            low, high = float(interval.low), float(interval.high)
            results.append(
                {
                    **asdict(case),
                    "level": level,
                    "stopped": count,
                    "seeds": arguments.seeds,
                    "low": low,
                    "high": high,
                }
            )
            row.append(f"{count / arguments.seeds:.1%} ({low:.1%} to {high:.1%})")
        table.append(row)
    machine.write(
        "gate",
        "How often the gate holds equal, worse and better candidates",
        machine_info,
        {"settings": settings.model_dump(), "cases": results},
        table,
    )
    machine.write(
        "gate_equal", "How often the gate holds equal candidates", machine_info, *equal_table(arguments.seeds // 2)
    )
    machine.write(
        "gate_chains", "Chains of candidates that each lose one point", machine_info, *chain_table(arguments.seeds // 5)
    )
    machine.write("gate_detectable", "The smallest loss that the gate detects", machine_info, *detectable_table(200))


def equal_table(seeds: int) -> tuple[dict[str, object], list[list[str]]]:
    names = ("no_worse", "class_recall", "no_worse_than_anchor")
    table = [
        [
            "test images",
            "accuracy",
            "shared errors",
            f"held in all ({seeds:,} trials)",
            *(name.replace("_", " ") for name in names),
        ]
    ]
    for queries in (50, 100, 200, 500, 1000, 2000):
        for accuracy in (0.97, 0.9):
            for shared in (MEASURED_SHARED, 0.0):
                held = [held_equal(queries, accuracy, shared, seed) for seed in range(seeds)]
                shares = [sum(map(bool, held)), *(sum(name in rules for rules in held) for name in names)]
                figures = [f"{count / seeds:.1%}" for count in shares]
                table.append([f"{queries:,}", f"{accuracy:.0%}", f"{shared:.0%}", *figures])
    return {"seeds": seeds, "rows": table}, table


def chain_table(seeds: int) -> tuple[dict[str, object], list[list[str]]]:
    table = [
        ["test images", "shared errors", "anchor", f"last champion (mean of {seeds:,} trials)", "held by the fifth"]
    ]
    for chain in chains():
        ends, held = zip(*(chain.run(seed) for seed in range(seeds)), strict=True)
        by_fifth = sum(0 < first <= 5 for first in held) / seeds
        row = ["yes" if chain.has_anchor else "no", f"{np.mean(ends):.2%}", f"{by_fifth:.0%}"]
        table.append([f"{chain.queries:,}", f"{chain.shared:.0%}", *row])
    return {"seeds": seeds, "rows": table}, table


def detectable_table(seeds: int) -> tuple[dict[str, object], list[list[str]]]:
    table = [["test images", "accuracy", f"detectable loss, points (median of {seeds:,} trials)"]]
    for queries in (20, 50, 75, 100, 150, 200, 500, 1000, 2000, 10_000):
        for accuracy in (0.97, 0.9):
            losses: list[float] = []
            for seed in range(seeds):
                split = TestSplit(queries, MEASURED_SHARED, 1 - accuracy, seed)
                candidate, champion, anchor = (split.outcomes(1 - accuracy) for _ in range(3))
                verdict = decide(make_evaluation(candidate, champion, anchor=anchor), GateSettings())
                losses.append(verdict.detectable_loss or 1.0)
            table.append([f"{queries:,}", f"{accuracy:.0%}", f"{100 * np.median(losses):.1f}"])
    return {"seeds": seeds, "rows": table}, table


def describe_difference(case: Case) -> str:
    """The true difference between challenger and champion, in words."""
    if case.difference_points == 0:
        return "equal"
    return f"{abs(case.difference_points):.1f} points {'better' if case.difference_points > 0 else 'worse'}"


if __name__ == "__main__":
    main()
