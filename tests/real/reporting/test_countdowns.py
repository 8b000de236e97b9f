"""What a run says about its whole time, before most of it has passed."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from evernear.common.progress import Step, duration
from evernear.common.run_record import StepProgress
from evernear.embedding.recipe import expected_probe_s, with_defaults
from evernear.reporting.countdowns import whole_run
from evernear.settings import TrainSettings
from tests.releases import System


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    monkeypatch.setattr(Step, "note", lambda _, message: noted.append(message))
    monkeypatch.setattr(Step, "progressed", lambda *_: None)
    return noted


@pytest.mark.parametrize(("load", "rest_s"), [(0.1, 25.0), (3.2, 40.0), (40.0, 50.0)])
def test_total_is_said_once_and_counts_what_has_passed_and_what_follows(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch, load: float, rest_s: float
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    now = datetime.now(UTC)
    running = Step("train", "run-1", (tmp_path / "store").as_uri())
    record = whole_run(running, now - timedelta(seconds=20), lambda train_s: 0.5 * train_s, 25.0)
    at = now + timedelta(seconds=10)
    record(StepProgress(at=at, message="before the first unit"))
    assert notes == []
    record(StepProgress(at=at, message="", left_s=190.0))
    record(StepProgress(at=at + timedelta(seconds=10), message="", left_s=180.0))
    left_s = 190 + 0.5 * (10 + 190) + rest_s
    assert notes == [f"The run takes about {duration(30 + left_s)} in all; about {duration(left_s)} are left."], (
        "training, probe and the other steps, which are slower on a busy machine"
    )


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [
        ({"epochs": 12, "min_steps": 0}, 25.0),
        ({"epochs": 10, "min_steps": 0, "muon": True}, 60.0),
        ({"epochs": 12, "min_steps": 300}, 100.0),
        ({"layers": "head", "weights": "w.pth", "frozen": True}, 8.0),
    ],
)
def test_probe_takes_a_share_of_the_training(system: System, changes: dict[str, object], expected_s: float) -> None:
    given = {name: changes[name] for name in changes if name in TrainSettings.model_fields}
    recipe = with_defaults(TrainSettings.model_validate(given), system.dataset, muon="muon" in changes)
    assert expected_probe_s(recipe, 0, system.dataset)(100.0) == pytest.approx(expected_s)


def test_probe_epochs_of_the_settings_count(system: System) -> None:
    recipe = with_defaults(TrainSettings(epochs=10, min_steps=0), system.dataset)
    assert expected_probe_s(recipe, 1, system.dataset)(100.0) == pytest.approx(10.0)
