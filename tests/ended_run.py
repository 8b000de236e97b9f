"""The record of a run whose release is held."""

import json
from datetime import UTC, datetime

import pytest

from evernear.common.run_record import RunRecord, StepRecord
from evernear.common.store import Store
from evernear.release.registry import Registry
from evernear.reporting.notify import finalize
from evernear.settings import RunSettings
from tests.releases import MakeRelease

STARTED = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
EPOCHS = [
    {"epoch": n, "train_loss": 1 / n, "gallery_loss": 2 / n, "gallery_accuracy": 0.9, "learning_rate": 0.1}
    for n in (1, 2)
]


@pytest.fixture
def ended_run(store: Store, make_release: MakeRelease) -> RunRecord:
    """The record of a run whose release is held."""
    release = make_release(promote=False)
    Registry(store).publish(release.archive)
    record = RunRecord(store, "run-1")
    record.save_step(StepRecord(step="ingest", state="finished", started=STARTED, ended=STARTED))
    record.save(
        settings=RunSettings(store=store.uri).model_dump(mode="json"),
        training={"epochs": EPOCHS, "best_epoch": 2},
        metrics={"label_right": 0.875},
        archived={"version": release.version},
        verdict=json.loads(release.verdict.read_text()),
    )
    finalize(record, "continuous-training", "SUCCEEDED", "")
    return record
