"""Error rates of the gate on simulated cases: ``python benchmarks/gate.py``.

The outcomes of champion and challenger are simulated with a known difference and evaluated with the gate's comparison,
rules and default bounds. The difference is simulated in one of two ways:

- ``drawn``: The models differ, and the test split is a sample, so the challenger's accuracy on it varies. The gate's
  level refers to this case.
- ``frozen``: The difference applies to the test split itself: the challenger has an exact number of additional errors.

``shared`` is the fraction of the better model's errors that the other model repeats. Two seeds of the default recipe
share 60% on MNIST's 10,000 test images (25 of 40, at 99.60% and 99.54% after four epochs). 0% is the harder case: the
less two models agree, the more of their difference is due to chance.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import machine
import numpy as np
from scipy.stats import binomtest

from evernear.evaluation.compare import compare
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate import decide
from evernear.evaluation.measure import Measurement, Outcomes
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.statistics import proportion
from evernear.settings import EvaluationSettings, GateSettings

CONFIDENCE = EvaluationSettings().confidence
LABELS = tuple("0123456789")
MEASURED_SHARED = 0.6
CUSTOMARY = 0.05
"""A level for comparison with the default."""


@dataclass(frozen=True)
class Case:
    """A simulated pair: ``difference_points`` is challenger minus champion, in points of accuracy."""

    planted: Literal["drawn", "frozen"]
    queries: int
    champion_accuracy: float
    difference_points: float
    shared: float

    def outcomes(self, seed: int) -> tuple[Outcomes, Outcomes]:
        """Simulate challenger and champion on the same queries."""
        rng = np.random.default_rng(seed)
        champion_errs = 1 - self.champion_accuracy
        challenger_errs = champion_errs - self.difference_points / 100
        if challenger_errs < 0:
            raise ValueError(f"{self} would be correct more than 100% of the time")
        both = self.shared * min(champion_errs, challenger_errs)
        if not self.shared:
            both = champion_errs * challenger_errs
        chances = np.array([both, champion_errs - both, challenger_errs - both, 0.0])
        chances[3] = 1 - chances.sum()
        if self.planted == "drawn":
            counts = rng.multinomial(self.queries, chances)
        else:
            counts = (chances * self.queries).round().astype(int)
            counts[3] = self.queries - counts[:3].sum()
        # Both wrong, champion wrong, challenger wrong, both correct.
        kind = rng.permutation(np.repeat(np.arange(4), counts))
        labels = rng.integers(0, len(LABELS), self.queries, dtype=np.int32)
        return Outcomes((kind == 1) | (kind == 3), labels), Outcomes((kind == 2) | (kind == 3), labels)


def cases() -> Iterator[Case]:
    """Yield cases of MNIST's size and target accuracy, then of a test split of scikit-learn's digits.

    On such a small split, most equal models that fail are below the accuracy floor, not behind the champion.
    """
    for planted in ("drawn", "frozen"):
        for shared in (MEASURED_SHARED, 0.0):
            for points in (0.0, -0.3, +0.3):
                yield Case(planted, 10_000, 0.996, points, shared)
    for points in (0.0, -3.0, -5.0, -10.0, +2.0):
        yield Case("drawn", 180, 0.97, points, MEASURED_SHARED)


def evaluated(challenger: Outcomes, champion: Outcomes, labels: tuple[str, ...] = LABELS) -> Evaluation:
    """Evaluate two systems that differ only in these outcomes."""
    return Evaluation(
        candidate=measured("challenger", challenger, labels),
        champion=measured("champion", champion, labels),
        comparison=compare(challenger, champion, labels),
        open_set=OpenSet(held_out=()),
        leakage={"train": 0, "gallery": 0, "query": 0},
        champion_leakage={"train": 0, "gallery": 0, "query": 0},
        champion_test_overlap=1.0,
    )


def measured(name: str, outcomes: Outcomes, labels: tuple[str, ...]) -> Measurement:
    totals = np.bincount(outcomes.labels, minlength=len(labels))
    rights = np.bincount(outcomes.labels[outcomes.correct], minlength=len(labels))
    accuracy = proportion(int(outcomes.correct.sum()), len(outcomes.correct), CONFIDENCE)
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
        accuracy=accuracy,
        recall_at_1=accuracy,
        recall_at_5=accuracy,
        false_rejects=proportion(0, accuracy.total, CONFIDENCE),
        index_recall=proportion(accuracy.total, accuracy.total, CONFIDENCE),
        class_recall={
            label: proportion(int(correct), int(total), CONFIDENCE)
            for label, correct, total in zip(labels, rights, totals, strict=True)
            if total
        },
        confusions=(),
    )


def stopped(case: Case, seeds: int, levels: Sequence[float]) -> list[int]:
    """Count at each of ``levels`` how many of ``seeds`` simulations of ``case`` fail the gate."""
    counts = [0] * len(levels)
    for seed in range(seeds):
        evaluation = evaluated(*case.outcomes(seed))
        for number, level in enumerate(levels):
            counts[number] += not decide(evaluation, GateSettings(significance=level)).promote
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    arguments = parser.parse_args()
    described, settings = machine.describe(), GateSettings()
    levels = (settings.significance, CUSTOMARY)
    results: list[dict[str, object]] = []
    stops = [f"stopped at level {level:g} (95% interval)" for level in levels]
    table = [["queries", "champion", "challenger", "planted", "errors shared", *stops]]
    for case in cases():
        row = [
            f"{case.queries:,}",
            f"{case.champion_accuracy:.1%}",
            truth(case),
            case.planted,
            f"{case.shared:.0%}",
        ]
        for level, count in zip(levels, stopped(case, arguments.seeds, levels), strict=True):
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
    machine.write("gate", described, {"settings": settings.model_dump(), "cases": results}, table)


def truth(case: Case) -> str:
    """Describe the true difference of the challenger."""
    if case.difference_points == 0:
        return "equal"
    return f"{abs(case.difference_points):.1f} points {'better' if case.difference_points > 0 else 'worse'}"


if __name__ == "__main__":
    main()
