"""Accuracy in life: coverage, power and false alarms, simulated: ``python benchmarks/live_accuracy.py``.

A release has a true accuracy. Its test split and its labeled live queries are independent samples, and the expected
accuracy comes from that test split, as for a real release. Every label counts as a look.

- Coverage: the share of 95% intervals of 100 labels that contain the truth.
- Power: live accuracy is 10 points lower, from the first label, or from the beginning of the 13th month on. The result
  is the share of releases whose loss is significant within 150 labels.
- False alarms: live accuracy equals the true accuracy, with 100 labels a week for 12 months. The result is the share of
  months in which a loss becomes significant, and the share in the first month. Their excess over the level is due to
  test splits that were lucky.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine
from evernear.evaluation.live_accuracy import LEVEL, LOSS, expected_accuracy, is_loss
from evernear.evaluation.statistics import exact_proportion, proportion

TRUTHS = (0.8, 0.88, 0.93, 0.95, 0.97, 0.99)
TEST_IMAGES = (50, 200, 1000, 10_000)
INTERVAL_LABELS = 100
POWER_LABELS = 150
MONTHS = 12
MONTH_LABELS = 433
"""Labels of a month, at 100 a week."""
YEAR = np.repeat(np.arange(MONTHS), MONTH_LABELS)
LATE = np.concatenate([YEAR, np.full(POWER_LABELS, MONTHS)])


def measured(truth: float, test_images: int, rng: np.random.Generator) -> float:
    """The expected accuracy from a simulated test split, below 1."""
    accuracy = proportion(int(rng.binomial(test_images, truth)), test_images, 0.95)
    expected = expected_accuracy({"accuracy": accuracy.value, "accuracy_low": accuracy.low})
    assert expected is not None
    return expected


def coverage(truth: float, repetitions: int, rng: np.random.Generator) -> float:
    """The share of intervals that contain ``truth``."""
    counts = rng.binomial(INTERVAL_LABELS, truth, repetitions)
    intervals = [exact_proportion(int(count), INTERVAL_LABELS, 0.95) for count in counts]
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


def losses(
    truth: float, test_images: int, months: NDArray[np.int_], lost: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """With which labels a loss is significant, if the last ``lost`` labels are `LOSS` less accurate."""
    accuracy = np.full(len(months), truth)
    accuracy[len(months) - lost :] -= LOSS
    return is_loss(rng.random(len(months)) < accuracy, months, measured(truth, test_images, rng))


def main() -> None:
    """Simulate all cases and write their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    repetitions: int = parser.parse_args().repetitions
    machine_info = machine.describe()
    heading = ["accuracy", "test images", "coverage, 100 labels", "loss found within 150 labels"]
    table = [[*heading, "the same after a year", "false alarms, first month", "a month of the first year"]]
    results: list[dict[str, float]] = []
    rng = np.random.default_rng(0)
    for truth in TRUTHS:
        covered = coverage(truth, repetitions, rng)
        for test_images in TEST_IMAGES:
            early, late, first, monthly = [], [], [], []
            for _ in range(repetitions):
                early.append(losses(truth, test_images, LATE[-POWER_LABELS:], POWER_LABELS, rng).any())
                late.append(losses(truth, test_images, LATE, POWER_LABELS, rng)[-POWER_LABELS:].any())
                quiet = losses(truth, test_images, YEAR, 0, rng)
                alarmed = np.array([quiet[month == YEAR].any() for month in range(MONTHS)])
                first.append(alarmed[0])
                monthly.append(alarmed.mean())
            shares = [covered, *(float(np.mean(each)) for each in (early, late, first, monthly))]
            names = ("coverage", "power", "power_after_a_year", "false_alarms_first_month", "false_alarms_a_month")
            results.append({"truth": truth, "test_images": test_images, **dict(zip(names, shares, strict=True))})
            row = [f"{truth:.0%}", f"{test_images:,}", *(f"{share:.1%}" for share in shares)]
            table.append(row)
            print(" | ".join(row), flush=True)
    machine.write(
        "live_accuracy",
        "Accuracy in life: coverage, power and false alarms",
        machine_info,
        {"settings": {"level": LEVEL, "loss": LOSS, "repetitions": repetitions}, "cases": results},
        table,
    )


if __name__ == "__main__":
    main()
