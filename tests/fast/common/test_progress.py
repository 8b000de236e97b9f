"""The estimate of the time left."""

import numpy as np
import pytest

from evernear.common.progress import Countdown, duration
from evernear.common.run_record import StepProgress


def test_time_left_follows_the_mean_duration_of_the_units() -> None:
    now_s = 0.0
    reports: list[str] = []
    countdown = Countdown(reports.append, clock=lambda: now_s)
    for completed in range(1, 101):
        now_s = 50.0 + (completed - 1) * 3.0  # the first unit, with its warm-up, takes 50 s
        countdown(completed, 100, f"step {completed}")
    assert reports[0] == "step 3, about 4 min 51 s left"
    assert reports[-1] == "step 99, about 3 s left"


def test_units_of_an_earlier_process_do_not_shorten_the_estimate() -> None:
    now_s = 0.0
    reports: list[str] = []
    countdown = Countdown(reports.append, clock=lambda: now_s)
    for completed in (900, 901, 902, 903):
        countdown(completed, 1000, "resumed")
        now_s += 10.0
    assert reports == ["resumed, about 16 min 30 s left", "resumed, about 16 min 10 s left"]


def test_numbers_are_recorded_every_five_seconds_of_a_long_step() -> None:
    now_s = 0.0
    reports: list[str] = []
    records: list[tuple[float, StepProgress]] = []
    countdown = Countdown(reports.append, lambda progress: records.append((now_s, progress)), clock=lambda: now_s)
    for completed in range(1, 100_001):
        now_s += 0.1
        countdown(completed, 100_000, f"{completed} of 100000")
    times_s = np.array([at_s for at_s, _ in records])
    assert 5 <= np.diff(times_s).min() <= np.diff(times_s).max() < 5.2
    assert 45 <= len(reports) <= 56, "the log has fewer lines"
    _, last = records[-1]
    assert last.total == 100_000
    assert last.done is not None
    assert last.left_s == pytest.approx((100_000 - last.done) * 0.1)
    assert last.message == f"{last.done} of 100000"


def test_no_time_is_said_before_a_hundredth_of_the_work() -> None:
    """The first steps of a training take seconds, the others milliseconds."""
    now_s = 0.0
    reports: list[str] = []
    countdown = Countdown(reports.append, clock=lambda: now_s)
    for completed in range(1, 601):
        now_s += 8.0 if completed < 4 else 0.1
        countdown(completed, 600, f"step {completed}")
    assert reports[0] == "step 2"
    said_s = [line for line in reports if "left" in line]
    assert said_s, "it is said later"
    assert " h " not in said_s[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3900, "1 h 5 min")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
