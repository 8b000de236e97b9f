"""Live accuracy: coverage, power and false alarms, simulated:
``python benchmarks/live_accuracy.py``.

A release has a true accuracy. Its test split and its labeled live queries are
independent samples, and the expected accuracy comes from that test split, as for a real
release. Every label counts as a look. A month has 433 labels.

- Coverage: the share of 95% intervals of 100 labels that contain the truth.
- Power: live accuracy is 10 points lower, from the first label, or from the beginning
  of the 13th month on. The result is the share of releases whose loss is significant
  within 150 labels. If the loss begins at a random label of the second month, the share
  is of 300 labels.
- Best possible: a single look at all 150 labels, which raises exactly 2% of false
  alarms because it is chosen with the true accuracy (randomized where no limit does).
  No test with this level finds the loss more often.
- False alarms: live accuracy equals the true accuracy for 12 months. The result is the
  share of months in which a loss becomes significant, and the share in the first month.
"""

import argparse

import numpy as np
from numpy.typing import NDArray
from scipy.stats import betabinom

from benchmarks import machine
from evernear.evaluation.live_accuracy import LEVEL, ExpectedAccuracy, expected_accuracy, is_loss
from evernear.evaluation.statistics import exact_proportion, proportion

TRUTHS = (0.8, 0.88, 0.93, 0.95, 0.97, 0.99)
TEST_IMAGES = (50, 200, 1000, 10_000)
LOSS = 0.1
INTERVAL_LABELS = 100
POWER_LABELS = 150
MONTHS = 12
MONTH_LABELS = 433
"""Labels of a month, at 100 a week."""
LATE = np.repeat(np.arange(MONTHS + 1), [*[MONTH_LABELS] * MONTHS, POWER_LABELS])
ANY_TIME_LABELS = 300


def measured(truth: float, test_images: int, rng: np.random.Generator) -> ExpectedAccuracy:
    """The accuracy on a simulated test split."""
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
    truth: float, expected: ExpectedAccuracy, months: NDArray[np.int_], lost: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """With which labels a loss is significant,
    if the last ``lost`` labels are `LOSS` less accurate.
    """
    accuracy = np.full(len(months), truth)
    accuracy[len(months) - lost :] -= LOSS
    return is_loss(rng.random(len(months)) < accuracy, months, expected)


def best_possible(truth: float, test_images: int, rng: np.random.Generator, repetitions: int = 20_000) -> float:
    """The share of losses that a single look at `POWER_LABELS` labels finds, with
    exactly `LEVEL` of false alarms.
    """
    right = rng.binomial(test_images, truth, repetitions)
    usual, worse = (
        betabinom.cdf(
            rng.binomial(POWER_LABELS, accuracy, repetitions), POWER_LABELS, right + 0.5, test_images - right + 0.5
        )
        for accuracy in (truth, truth - LOSS)
    )
    limit = np.quantile(usual, LEVEL, method="higher")
    beyond, at_limit = np.mean(usual < limit), np.mean(usual == limit)
    return float(np.mean(worse < limit) + np.mean(worse == limit) * (LEVEL - beyond) / at_limit)


def found_at_any_time(truth: float, expected: ExpectedAccuracy, rng: np.random.Generator) -> bool:
    """Whether a loss from a random label of the second month on is found within
    `ANY_TIME_LABELS`.
    """
    labels = MONTH_LABELS + int(rng.integers(MONTH_LABELS)) + ANY_TIME_LABELS
    return bool(losses(truth, expected, LATE[:labels], ANY_TIME_LABELS, rng)[-ANY_TIME_LABELS:].any())


def main() -> None:
    """Simulate all cases and write their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    repetitions: int = parser.parse_args().repetitions
    machine_info = machine.describe()
    heading = ["accuracy", "test images", "coverage, 100 labels", "loss found within 150 labels", "best possible"]
    heading += ["after a year", "at any time, within 300 labels", "false alarms, first month"]
    table = [[*heading, "a month of the first year"]]
    results: list[dict[str, float]] = []
    rng = np.random.default_rng(0)
    for truth in TRUTHS:
        covered = coverage(truth, repetitions, rng)
        for test_images in TEST_IMAGES:
            early, late, any_time, first, monthly = [], [], [], [], []
            for _ in range(repetitions):
                expected = measured(truth, test_images, rng)
                early.append(losses(truth, expected, LATE[-POWER_LABELS:], POWER_LABELS, rng).any())
                any_time.append(found_at_any_time(truth, expected, rng))
                lost = losses(truth, expected, LATE, POWER_LABELS, rng)
                late.append(lost[-POWER_LABELS:].any())
                alarmed = np.array([lost[month == LATE].any() for month in range(MONTHS)])
                first.append(alarmed[0])
                monthly.append(alarmed.mean())
            best = best_possible(truth, test_images, rng)
            shares = [covered, float(np.mean(early)), best]
            shares += [float(np.mean(each)) for each in (late, any_time, first, monthly)]
            names = ("coverage", "power", "best_possible", "power_after_a_year", "power_at_any_time")
            names += ("false_alarms_first_month", "false_alarms_a_month")
            results.append({"truth": truth, "test_images": test_images, **dict(zip(names, shares, strict=True))})
            row = [f"{truth:.0%}", f"{test_images:,}", *(f"{share:.1%}" for share in shares)]
            table.append(row)
            print(" | ".join(row), flush=True)
    machine.write(
        "live_accuracy",
        "Live accuracy: coverage, power and false alarms",
        machine_info,
        {"settings": {"level": LEVEL, "loss": LOSS, "repetitions": repetitions}, "cases": results},
        table,
    )


if __name__ == "__main__":
    main()
