"""The comparison of a release with the one before it, also under repeated looks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from evernear.index.description import clopper_pearson
from evernear.release.bake import Comparison, Figures, Share, dispersion, log_evidence, slow_limit_s, total
from evernear.serving.metrics import SECONDS_BOUNDS


def cell(requests: int = 100, unknown: int = 5, errors: int = 0, slow: int = 0) -> Figures:
    """Requests of which all but ``slow`` take up to 10 ms, and those 10 s."""
    within = {bound: requests - slow if 0.01 <= bound < 10 else requests * (bound >= 10) for bound in SECONDS_BOUNDS}
    return Figures(
        answered=requests, refused=errors, predictions=requests - errors, unknown=unknown, timed=requests, within=within
    )


BEFORE = [cell()] * 30


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([cell(unknown=25)] * 4, "Rule unknown: 25.0% of 400 images are unknown, compared with 5.0% of 3,000 before"),
        ([cell(errors=6)] * 6, "Rule errors: 6.0% of 600 requests got an error, compared with 0.0% of 3,000 before"),
        ([cell(slow=8)] * 8, "Rule p99: 8.0% of 800 clients waited longer than 0.017 s, compared with 0.0% of 3,000"),
    ],
)
def test_broken_rule_is_named_with_its_figures(seen: list[Figures], expected: str) -> None:
    assert (Comparison(BEFORE).find_breach(seen) or "").startswith(expected)


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [cell(unknown=25)] * 2,  # too early to tell from a burst
        [cell(unknown=9)] * 90,  # within the margin
        [cell(errors=0, slow=1)] * 90,
        [cell(unknown=0)] * 90,  # better
        [cell()] * 40 + [cell(unknown=100)] + [cell()] * 10,  # one burst
        [cell()] * 40 + [cell(errors=50)] + [cell()] * 10,
    ],
)
def test_release_within_the_margins_stays(seen: list[Figures]) -> None:
    assert Comparison(BEFORE).find_breach(seen) is None


def test_only_errors_count_without_a_reference() -> None:
    comparison = Comparison([])
    assert comparison.find_breach([cell(unknown=90, slow=90)] * 30) is None
    assert comparison.find_breach([cell(errors=4)] * 30) is None
    sentence = "Rule errors: 20.0% of 600 requests got an error, and at most 5% are tolerated without a reference."
    assert comparison.find_breach([cell(errors=20)] * 6) == sentence


def test_bursts_in_the_traffic_need_more_evidence() -> None:
    """The same shares, but scenes of 50 frames that are all known or all unknown."""
    bursts = [cell(unknown=50)] * 3 + [cell(unknown=0)] * 27
    assert total(bursts).unknown == total(BEFORE).unknown
    seen = [cell(unknown=25)] * 4
    assert Comparison(BEFORE).find_breach(seen)
    assert Comparison(bursts).find_breach(seen) is None


def test_errors_are_those_that_clients_see() -> None:
    """TorchServe counts the worker's errors again, and those of requests without a worker."""
    assert Figures(answered=10, refused=2, failed=2).errors == 2
    assert Figures(answered=10, refused=2, failed=5).errors == 5
    assert Figures(answered=10, refused=2, failed=5).requests == 13
    assert Figures(answered=10, refused=2).errors == 2  # over gRPC


def test_restart_is_seen_by_counters_that_went_down() -> None:
    earlier, later = cell(100), cell(130)
    assert later.since(earlier) == cell(30, unknown=0)
    assert earlier.since(later) is None


def test_limit_of_slow_requests_is_above_the_p99() -> None:
    assert slow_limit_s(Figures()) is None
    assert slow_limit_s(Figures(timed=100, within={0.1: 98, 0.2: 99, 0.25: 99, 0.3: 100})) == 0.3
    assert slow_limit_s(Figures(timed=100, within={0.1: 50})) is None


def test_dispersion_of_independent_requests_is_one() -> None:
    rng = np.random.default_rng(0)
    independent = [Share(int(rng.binomial(100, 0.1)), 100) for _ in range(2000)]
    assert dispersion(independent) == pytest.approx(1.0, abs=0.1)
    bursts = [Share(10 * int(rng.binomial(10, 0.1)), 100) for _ in range(2000)]
    assert dispersion(bursts) == pytest.approx(10.0, rel=0.1)
    assert dispersion([]) == dispersion([Share(0, 10)] * 9) == dispersion([Share(1, 10)]) == 1.0


@given(st.integers(0, 400), st.integers(1, 400), st.floats(1e-4, 0.2))
def test_bound_of_clopper_and_pearson_is_exact(events: int, others: int, level: float) -> None:
    bound = clopper_pearson(events, events + others, level)[1]
    assert binom.cdf(events, events + others, bound) == pytest.approx(level, rel=1e-6)


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.01, 0.9))
def test_evidence_is_the_integral_of_the_likelihood_ratio(events: int, others: int, tolerated: float) -> None:
    shares = np.linspace(tolerated, 1, 200_001)[:-1] + (1 - tolerated) / 400_000
    ratios = np.exp(events * np.log(shares / tolerated) + others * np.log((1 - shares) / (1 - tolerated)))
    assert math.exp(log_evidence(Share(events, events + others), tolerated)) == pytest.approx(ratios.mean(), rel=1e-3)
