"""How often and how soon a bake rolls back a release: ``python benchmarks/bake.py``.

Traffic is simulated and compared as by the watcher, which reads the pods every ten seconds: an hour
of the release before, by minute, then ``watch.bake_s`` of the new release. 5% of the queries are
unknown, 0.1% of the requests fail, and the time of a request is log-normal with a median of 40 ms.
The queries are

- ``independent``,
- ``bursts``: ten frames of a scene, which are all known or all unknown, or
- ``day``: the share of unknown swings by 4 points in the course of a day,
  and the rollout is at any time of it.

A *quiet* release is as the one before. The others have 20 more points of unknown, 5 more points of
errors, take twice as long, or let a request wait in the queue for an exponential time of 70 ms on
average, while its batch takes as long as before. The time to the rollback is that from the rollout
to the decision; the rollback itself takes as long as a rollout.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from benchmarks import machine
from evernear.release.bake import LEVEL, Comparison, Figures
from evernear.serving.metrics import SECONDS_BOUNDS
from evernear.settings import WatchSettings
from evernear.triggers.watch.baker import BAKE_INTERVAL_S

REFERENCE_CELLS, REFERENCE_CELL_S = 60, 60.0
DAY_S = 86_400.0
BURST = 10
UNKNOWN, ERRORS, MEDIAN_S = 0.05, 0.001, 0.04
SWING = 0.04
SAMPLES = 1_000_000

Traffic = Literal["independent", "bursts", "day"]


@dataclass(frozen=True)
class Change:
    """The difference of the new release."""

    name: str
    unknown: float = 0.0
    errors: float = 0.0
    times: float = 1.0
    wait_s: float = 0.0
    """Mean time in the queue in front of the worker."""


QUIET = Change("quiet")
CHANGES = (
    Change("+20 points unknown", unknown=0.2),
    Change("+5 points errors", errors=0.05),
    Change("twice as slow", times=2.0),
    Change("70 ms in the queue", wait_s=0.07),
)


@dataclass(frozen=True)
class Case:
    """Traffic of ``rate`` requests per second."""

    traffic: Traffic
    rate: float
    change: Change

    def bake(self, seed: int) -> float | None:
        """Seconds to the rollback of one simulated bake; None if it passes."""
        rng = np.random.default_rng(seed)
        start_s = rng.uniform(0, DAY_S)
        before = [
            self._cell(rng, start_s + cell * REFERENCE_CELL_S, REFERENCE_CELL_S, QUIET)
            for cell in range(REFERENCE_CELLS)
        ]
        rollout_s = start_s + REFERENCE_CELLS * REFERENCE_CELL_S
        comparison = Comparison(before)
        seen: list[Figures] = []
        for poll in range(int(WatchSettings().bake_s / BAKE_INTERVAL_S)):
            cell = self._cell(rng, rollout_s + poll * BAKE_INTERVAL_S, BAKE_INTERVAL_S, self.change)
            if cell.requests:
                seen.append(cell)
            if comparison.find_breach(seen):
                return (poll + 1) * BAKE_INTERVAL_S
        return None

    def _cell(self, rng: np.random.Generator, at_s: float, length_s: float, change: Change) -> Figures:
        size = BURST if self.traffic == "bursts" else 1
        requests = size * int(rng.poisson(self.rate * length_s / size))
        errors = int(rng.binomial(requests, ERRORS + change.errors))
        swing = SWING * math.sin(2 * math.pi * at_s / DAY_S) if self.traffic == "day" else 0.0
        unknown = size * int(rng.binomial((requests - errors) // size, UNKNOWN + swing + change.unknown))
        within = np.cumsum(rng.multinomial(requests, shares_of_times(change.times, change.wait_s)))[:-1]
        return Figures(
            answered=requests,
            refused=errors,
            predictions=requests - errors,
            unknown=unknown,
            timed=requests,
            within=dict(zip(SECONDS_BOUNDS, within.tolist(), strict=True)),
        )


@cache
def shares_of_times(factor: float, wait_s: float) -> NDArray[np.float64]:
    """The shares of the requests between two bounds of `SECONDS_BOUNDS`."""
    rng = np.random.default_rng(0)
    times_s = rng.lognormal(math.log(MEDIAN_S * factor), 0.5, SAMPLES) + wait_s * rng.exponential(size=SAMPLES)
    counts, _ = np.histogram(times_s, [0.0, *SECONDS_BOUNDS, math.inf])
    return counts / SAMPLES


def cases() -> Iterator[Case]:
    """Quiet releases first."""
    for change in (QUIET, *CHANGES):
        for traffic in ("independent", "bursts", "day"):
            for rate in (0.5, 5.0, 50.0):
                if (change in (QUIET, CHANGES[0]) and rate == 5.0) or traffic == "independent":
                    yield Case(traffic, rate, change)


def main() -> None:
    """Simulate the cases and write their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quiet", type=int, default=1000, help="quiet bakes of each case")
    parser.add_argument("--changed", type=int, default=200, help="bakes of each other case")
    arguments = parser.parse_args()
    machine_info = machine.describe()
    table = [["release", "queries", "requests/s", "rolled back (95%)", "median time", "95% within"]]
    results: list[dict[str, object]] = []
    for case in cases():
        count = arguments.quiet if case.change == QUIET else arguments.changed
        times_s = [case.bake(seed) for seed in range(count)]
        ended_s = [time_s for time_s in times_s if time_s is not None]
        interval = binomtest(len(ended_s), count).proportion_ci(0.95, method="exact")
        low, high = float(interval.low), float(interval.high)
        results.append(
            {**asdict(case), "bakes": count, "rolled_back": len(ended_s), "low": low, "high": high, "times_s": ended_s}
        )
        median, late = (_quantile(times_s, share) for share in (0.5, 0.95))
        share = f"{len(ended_s)} of {count:,} ({low:.1%} to {high:.1%})"
        table.append([case.change.name, case.traffic, f"{case.rate:g}", share, median, late])
        print(" | ".join(table[-1]), flush=True)
    settings = {"level": LEVEL, "bake_s": WatchSettings().bake_s, "interval_s": BAKE_INTERVAL_S}
    machine.write(
        "bake",
        "How often and how soon a bake rolls back a release",
        machine_info,
        {"settings": settings, "cases": results},
        table,
    )


def _quantile(times_s: list[float | None], share: float) -> str:
    """The time within which a share of all bakes rolled back."""
    ordered = sorted(math.inf if time_s is None else time_s for time_s in times_s)
    time_s = ordered[math.ceil(share * len(ordered)) - 1]
    return f"{time_s:.0f} s" if math.isfinite(time_s) else "-"


if __name__ == "__main__":
    main()
