"""What the exit step tells of a run, from what the steps before it left in the store."""

from pathlib import Path

import pytest

from evernear.reporting.notify import (
    Outcome,
    recall_confusion,
    recall_outcome,
    recall_rules,
    remember,
    remember_confusion,
    tell,
)
from evernear.store import Store, open_store

PROMOTE = {"promote": True, "reasons": ["Accuracy is 99%."]}
HOLD = {"promote": False, "reasons": ["Accuracy is 80%."]}
DEPLOYED = {"version": "20261120.140501.1a2b3c4d"}
SUCCEEDED = ("SUCCEEDED", "COMPLETE")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


@pytest.mark.parametrize(
    ("left", "state", "told"),
    [
        (
            {"verdict": PROMOTE, "deployment": DEPLOYED},
            "SUCCEEDED",
            "promoted: release 20261120.140501.1a2b3c4d serves",
        ),
        ({"verdict": HOLD}, "SUCCEEDED", "held: Accuracy is 80%."),
        # KFP's server says COMPLETE. A held run it leaves RUNNING, since the skipped group is the last to be counted;
        # or FAILED, if some step of it was tried again.
        (
            {"verdict": PROMOTE, "deployment": DEPLOYED},
            "COMPLETE",
            "promoted: release 20261120.140501.1a2b3c4d serves",
        ),
        ({"verdict": HOLD, "archived": DEPLOYED}, "RUNNING", "held: Accuracy is 80%."),
        ({"verdict": HOLD, "archived": DEPLOYED}, "FAILED", "held: Accuracy is 80%."),
        ({"verdict": HOLD}, "FAILED", "failed: the pipeline ended as FAILED. deploy: No Java."),
        ({}, "RUNNING", "failed: a step was stopped, or ended without a word. deploy: No Java."),
        (
            {"verdict": PROMOTE, "archived": DEPLOYED},
            "RUNNING",
            "failed: a step was stopped, or ended without a word. deploy: No Java.",
        ),
        (
            {"verdict": PROMOTE},
            "SUCCEEDED",
            "failed: the gate promoted the candidate, but no deployment followed.",
        ),
        ({"verdict": PROMOTE}, "FAILED", "failed: the pipeline ended as FAILED. deploy: No Java."),
        (
            {"verdict": PROMOTE, "deployment": DEPLOYED},
            "CANCELED",
            "failed: the pipeline ended as CANCELED. deploy: No Java. "
            "Release 20261120.140501.1a2b3c4d serves nevertheless.",
        ),
        (
            {"rollback": DEPLOYED | {"why": "It calls every 7 a 1."}},
            "SUCCEEDED",
            "rolled back: release 20261120.140501.1a2b3c4d serves again. It calls every 7 a 1.",
        ),
        (
            {"promotion": DEPLOYED | {"why": "The test images were mislabelled."}},
            "SUCCEEDED",
            "promoted: release 20261120.140501.1a2b3c4d serves",
        ),
        ({}, "FAILED", "failed: the pipeline ended as FAILED. deploy: No Java."),
    ],
)
def test_the_outcome_is_what_happened_and_is_kept(store: Store, left: dict, state: str, told: str) -> None:
    remember(store, "another run", verdict=PROMOTE, deployment=DEPLOYED)
    remember(store, "run", **left)
    outcome = tell(store, "run", state, "" if state in SUCCEEDED else "deploy: No Java.")
    assert outcome.summary() == told
    assert Outcome.model_validate_json(store.get("runs/run/outcome.json")) == outcome


def test_a_held_release_is_named_and_the_pictures_and_rules_are_found_again(store: Store) -> None:
    remember(store, "run", verdict=HOLD, archived={"version": DEPLOYED["version"]})
    remember_confusion(store, "run", b"PNG")
    assert recall_outcome(store, "run") is None
    told = tell(store, "run", "SUCCEEDED", "")
    assert (told.state, told.release, told.candidate) == ("held", None, DEPLOYED["version"])
    assert recall_outcome(store, "run") == told
    assert recall_confusion(store, "run") == b"PNG"
    assert (recall_confusion(store, "other"), recall_rules(store, "other")) == (None, ())
