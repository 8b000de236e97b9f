"""The console's listing of runs, and what it reads of the store."""

import os
from datetime import UTC, datetime, timedelta

import pytest

from evernear.common.run_record import RunRecord, StepRecord
from evernear.common.store import FileStore, Store
from evernear.console import run_records
from evernear.console.run_records import RunRecords
from evernear.reporting.notify import RunOutcome

NOW = datetime.now(UTC)


@pytest.fixture
def listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is listed below ``runs/``, listing after listing. Nothing is reused."""
    monkeypatch.setattr(run_records, "LISTING_S", 0.0)
    prefixes: list[str] = []
    for name in ("list", "children"):
        method = getattr(store, name)
        monkeypatch.setattr(store, name, lambda prefix, method=method: prefixes.append(prefix) or method(prefix))
    return prefixes


def end(store: Store, run: str, age: timedelta) -> None:
    """A run that ended ``age`` ago."""
    record = RunRecord(store, run)
    record.save_step(StepRecord.of_this_process("train", NOW - age))
    record.save(outcome=RunOutcome(run=run, state="held").model_dump(mode="json"))
    assert isinstance(store, FileStore)
    for info in list(store.list(f"runs/{run}/")):
        at_s = (NOW - age).timestamp()
        os.utime(store.path(info.key), (at_s, at_s))


def test_runs_that_ended_long_ago_are_not_listed_again(store: Store, listed: list[str]) -> None:
    for number in range(30):
        end(store, f"run-{number:02}", timedelta(hours=number + 1))
    listed.clear()
    records = RunRecords(store)
    assert [entry.run for entry in records.entries()] == [f"run-{number:02}" for number in range(30)]
    assert listed == ["runs", "runs/"], "one listing of all is the cheapest way to read many"
    RunRecord(store, "new").save_step(StepRecord.of_this_process("train", NOW))
    listed.clear()
    assert [entry.run for entry in records.entries()][:2] == ["new", "run-00"]
    assert listed == ["runs", "runs/new/"]
    end(store, "new", timedelta(0))
    assert records.entries()[0].ended


def test_a_run_that_was_pruned_is_gone(store: Store, listed: list[str]) -> None:
    end(store, "run", timedelta(hours=1))
    records = RunRecords(store)
    assert len(records.entries()) == 1
    for info in list(store.list("runs/run/")):
        store.delete(info.key)
    assert records.entries() == []
