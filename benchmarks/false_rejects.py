"""The share of new images of known classes that is called unknown, compared with
`index.false_reject_rate`: ``python benchmarks/false_rejects.py``.

Each repetition divides the 1,797 handwritten digits of scikit-learn into a gallery of
500, a query split, and new images. The vectors are the pixels, scaled to length 1. The
share depends on the ranks of the distances only, so a network would not change it. The
threshold is set on the query split, as for a release, and the share is counted on the
new images. "Stated range" is the range that a release prints with its threshold.
"""

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from benchmarks import machine
from evernear.index.calibrate import threshold_rejecting
from evernear.index.description import Calibration

RATE = 0.05
GALLERY = 500
QUERIES = (10, 20, 50, 100, 200)
HIGH = 0.1
"""The share above which `gate.false_reject_ceiling` holds a release."""


def distances_of_digits() -> NDArray[np.float32]:
    """The distance between each two digits, (N, N)."""
    digits: Any = load_digits()
    vectors = digits.data.astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.sqrt(np.maximum(2 - 2 * vectors @ vectors.T, 0))


def simulate(
    distances: NDArray[np.float32], queries: int, rng: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """The share of new images beyond the threshold, and the stated range."""
    order = rng.permutation(len(distances))
    nearest = distances[np.ix_(order[GALLERY:], order[:GALLERY])].min(axis=1)
    known, new = nearest[:queries], nearest[queries:]
    threshold = threshold_rejecting(known, RATE)
    calibration = Calibration(
        found_by="unseen classes",
        stated_false_accept_rate=RATE,
        stated_false_reject_rate=RATE,
        threshold=threshold,
        queries=queries,
        false_accepts=0,
        false_rejects=int((known > threshold).sum()),
        nearest_found=queries,
    )
    return float((new > threshold).mean()), calibration.expected_false_rejects()


def main() -> None:
    """Simulate all query splits and write their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    repetitions: int = parser.parse_args().repetitions
    description = machine.describe()
    distances, rng = distances_of_digits(), np.random.default_rng(0)
    table = [["query images", "called unknown, mean", "highest", f"above {HIGH:.0%}", "stated range, median", "in it"]]
    cases: list[dict[str, float]] = []
    for queries in QUERIES:
        results = [simulate(distances, queries, rng) for _ in range(repetitions)]
        shares = np.array([share for share, _ in results])
        low, high = np.array([stated for _, stated in results]).T
        inside = float(((low <= shares) & (shares <= high)).mean())
        above = float((shares > HIGH).mean())
        case = {"mean": float(shares.mean()), "highest": float(shares.max()), "above": above, "inside": inside}
        cases.append({"queries": queries, **case, "low": float(np.median(low)), "high": float(np.median(high))})
        row = [f"{queries}", f"{shares.mean():.1%}", f"{shares.max():.1%}", f"{above:.1%}"]
        table.append([*row, f"{np.median(low):.1%} to {np.median(high):.1%}", f"{inside:.1%}"])
    machine.write(
        "false_rejects",
        "Known images called unknown, with small query splits",
        description,
        {"settings": {"rate": RATE, "repetitions": repetitions}, "cases": cases},
        table,
    )


if __name__ == "__main__":
    main()
