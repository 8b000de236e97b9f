"""The outcome of a run, derived from its record."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from evernear.common.progress import COMMAND_VARIABLE, RunCommand
from evernear.common.run_record import RunRecord, StepRecord
from evernear.reporting.notify import (
    CONFUSION_MATRIX,
    NO_ERROR,
    NextStep,
    RunOutcome,
    finalize,
    load_outcome,
    load_rules,
)
from evernear.settings import load
from evernear.steps import notify

PROMOTE = {"promote": True, "reasons": ["Accuracy is 99%."]}
HOLD = {"promote": False, "reasons": ["Accuracy is 80%."]}
VERSION = "20261120.140501.1a2b3c4d"
DEPLOYED = {"version": VERSION, "url": "http://127.0.0.1:8080/predictions/embedding"}
RECORDED = {"version": VERSION, "url": None}


@pytest.mark.parametrize(
    ("recorded", "state", "summary"),
    [
        ({"verdict": PROMOTE, "deployment": DEPLOYED}, "SUCCEEDED", f"promoted: release {VERSION} is live"),
        ({"verdict": HOLD}, "SUCCEEDED", "held: Accuracy is 80%."),
        # KFP's server reports COMPLETE. It reports a held run as RUNNING, because the skipped group
        # is not counted, or as FAILED if a step was retried.
        ({"verdict": PROMOTE, "deployment": DEPLOYED}, "COMPLETE", f"promoted: release {VERSION} is live"),
        ({"verdict": HOLD, "archived": DEPLOYED}, "RUNNING", "held: Accuracy is 80%."),
        ({"verdict": HOLD, "archived": DEPLOYED}, "FAILED", "held: Accuracy is 80%."),
        ({"verdict": HOLD}, "FAILED", f"failed: {NO_ERROR}"),
        ({}, "RUNNING", f"failed: {NO_ERROR}"),
        ({"verdict": PROMOTE}, "SUCCEEDED", "failed: The gate promoted the candidate, but it was not deployed."),
        (
            {"verdict": PROMOTE, "deployment": DEPLOYED},
            "CANCELED",
            f"stopped in Kubeflow Pipelines. Nevertheless, release {VERSION} is live.",
        ),
        (
            {"verdict": PROMOTE, "deployment": RECORDED},
            "SUCCEEDED",
            f"promoted: release {VERSION} is the champion; servers load it when they start",
        ),
        (
            {"rollback": RECORDED | {"why": "It calls every 7 a 1."}},
            "SUCCEEDED",
            f"rolled back: release {VERSION} is the champion; servers load it when they start. It calls every 7 a 1.",
        ),
        (
            {"rollback": DEPLOYED | {"why": "It calls every 7 a 1."}},
            "SUCCEEDED",
            f"rolled back: release {VERSION} is live again. It calls every 7 a 1.",
        ),
        (
            {"promotion": DEPLOYED | {"why": "The test images were mislabeled."}},
            "SUCCEEDED",
            f"promoted: release {VERSION} is live",
        ),
    ],
)
def test_outcome_is_derived_from_the_record(record: RunRecord, recorded: dict, state: str, summary: str) -> None:
    RunRecord(record.store, "another run").save(verdict=PROMOTE, deployment=DEPLOYED)
    record.save(**recorded)
    outcome = finalize(record, "continuous-training", state, "")
    assert outcome.summary() == summary
    assert RunOutcome.model_validate_json(record.store.get("runs/run/outcome.json")) == outcome


def step(name: str, state: str, message: str = "") -> StepRecord:
    return StepRecord(step=name, state=state, message=message, started=datetime.now(UTC))


@pytest.mark.parametrize(("name", "limit"), [("train", "train_memory"), ("embed", "task_memory")])
def test_step_that_a_cluster_killed_names_the_memory_limit(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch, name: str, limit: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    record.save_step(step(name, "running"))
    outcome = finalize(record, "continuous-training", "FAILED", "")
    assert f"`evernear pipeline upload --set pipeline.{limit}=...` raises its memory limit" in outcome.summary()


def test_failed_run_names_step_error_and_next_command(record: RunRecord) -> None:
    for failing in (step("ingest", "finished"), step("train", "running"), step("probe", "failed", "The disk is full.")):
        record.save_step(failing)
    record.save_step(step("notify", "running"))
    outcome = finalize(record, "continuous-training", "FAILED", "")
    assert outcome.summary() == (
        "failed at probe: The disk is full. "
        "train: The step ended without recording an error: it was stopped, evicted or out of memory."
    )
    assert outcome.next_steps() == (NextStep("run again", "evernear pipeline run continuous-training"),)


def test_successful_retry_is_not_a_failure(record: RunRecord) -> None:
    record.save_step(step("train", "failed", "The store did not answer."))
    record.save_step(step("train", "finished"))
    record.save_step(step("index", "failed", "The index is empty."))
    assert finalize(record, "reindex", "FAILED", "").summary() == "failed at index: The index is empty."


def test_stopped_run_names_who_stopped_it(record: RunRecord) -> None:
    record.save_step(step("train", "running"))
    record.save_stop("ada (U0ADA in Slack)", datetime.now(UTC))
    outcome = finalize(record, "continuous-training", "FAILED", "")
    assert outcome.summary() == "stopped by ada (U0ADA in Slack)."


def test_kfp_error_is_used_without_a_record(record: RunRecord) -> None:
    assert finalize(record, "reindex", "FAILED", "OOMKilled").summary() == "failed: OOMKilled"


def test_held_release_can_be_loaded_with_its_figures(record: RunRecord) -> None:
    store = record.store
    record.save(verdict=HOLD, archived={"version": VERSION})
    record.put(CONFUSION_MATRIX, b"PNG")
    assert load_outcome(store, "run") is None
    outcome = finalize(record, "continuous-training", "SUCCEEDED", "")
    assert (outcome.state, outcome.release, outcome.candidate) == ("held", None, VERSION)
    again, inspect, promote = outcome.next_steps()
    assert again.command == "evernear pipeline run continuous-training"
    assert inspect.command == f"evernear inspect run {VERSION} --image IMAGE"
    assert promote.command == f"evernear registry promote {VERSION} --force --why REASON"
    assert load_outcome(store, "run") == outcome
    assert record.get(CONFUSION_MATRIX) == b"PNG"
    assert (RunRecord(store, "other").get(CONFUSION_MATRIX), load_rules(store, "other")) == (None, ())


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        (("gate.accuracy_floor=0.8", "gate.beat_baseline=false"), True),
        (("gate.accuracy_floor=0.8", ""), False),  # a rule that no setting should override
    ],
)
def test_held_run_knows_the_settings_that_would_promote_it(
    record: RunRecord, settings: tuple[str, ...], known: bool
) -> None:
    rules = [{"name": "other", "passed": True, "reason": "Fine."}]
    rules += [{"name": "rule", "passed": False, "reason": "Bad.", "setting": setting} for setting in settings]
    record.save(verdict=HOLD | {"rules": rules}, archived={"version": VERSION})
    outcome = finalize(record, "reindex", "SUCCEEDED", "")
    assert outcome.gate_settings == (settings if known else ())
    assert not [step for step in outcome.next_steps() if "gate." in step.command]
    assert outcome.without_reasons() == f"held: release {VERSION} is not promoted"


@pytest.mark.parametrize(
    ("pipeline", "epochs", "shown"),
    [
        ("continuous-training", 1, "1 epoch"),
        ("continuous-training", 3, "3 epochs"),
        ("continuous-training", 30, ""),
        ("continuous-training", None, ""),
        ("reindex", 3, ""),
    ],
)
def test_held_run_of_few_epochs_is_advised_to_train_longer(
    record: RunRecord, pipeline: str, epochs: int | None, shown: str
) -> None:
    record.save(verdict=HOLD, archived={"version": VERSION}, settings={"train": {"epochs": epochs}})
    outcome = finalize(record, pipeline, "SUCCEEDED", "", ("run", "--preset", "quick"))
    first = outcome.next_steps()[0]
    if shown:
        assert first.purpose == f"train longer than {shown}, with the default preset"
        assert first.command == "evernear run --preset default --set train.epochs=null"
        assert load(preset="default", environment={}, overrides=["train.epochs=null"]) == load(environment={})
    else:
        assert first.purpose == "look at its worst mistakes"


def test_longer_training_is_not_advised_where_the_data_holds_a_run(record: RunRecord) -> None:
    leaked = {"name": "test_images_unseen", "passed": False, "reason": "Leaked."}
    for rules, epochs in (([leaked], 0), ([leaked, {"name": "no_worse", "passed": False, "reason": "Worse."}], 2)):
        record.save(verdict=HOLD | {"rules": rules}, archived={"version": VERSION}, settings={"train": {"epochs": 2}})
        assert finalize(record, "continuous-training", "SUCCEEDED", "").few_epochs == epochs


def test_next_steps_of_a_local_run_repeat_only_where_it_is() -> None:
    words = ("run", "--retire", "cat", "--workdir=my w", "--set", "store=s3://b/p", "--set=train.epochs=3")
    setting = "gate.beat_baseline=false"
    held = RunOutcome(run="1", state="held", candidate=VERSION, gate_settings=(setting,), command=words)
    shared = "'--workdir=my w' --set store=s3://b/p"
    again = f"evernear run --retire cat {shared} --set=train.epochs=3"
    inspect = f"evernear inspect run {VERSION} --image IMAGE {shared}"
    better = [
        f"evernear report --open {shared}",
        f"evernear labels check {shared}",
        again,
        inspect,
        f"evernear registry promote {VERSION} --force --why REASON {shared}",
        f"evernear console {shared}",
    ]
    assert [step.command for step in held.next_steps()] == better
    assert [step.command for step in held.next_steps("run page")] == better[1:], "the page does not name itself"
    assert [step.command for step in held.next_steps("console")] == better[:-1]
    promoted = held.model_copy(update={"state": "promoted", "release": VERSION})
    assert [step.command for step in promoted.next_steps()] == [
        inspect,
        f"evernear registry rollback --why REASON {shared}",
        f"evernear console {shared}",
    ]
    failed = held.model_copy(update={"state": "failed"})
    assert failed.next_steps() == (NextStep("run again", again),)


@pytest.mark.parametrize(
    ("command", "target", "deployed", "recognize"),
    [
        (("run", "--workdir", "mine"), "local", DEPLOYED, "evernear predict --workdir mine IMAGE"),
        (("run",), "registry", RECORDED, f"evernear inspect run {VERSION} --image IMAGE"),
        (("run",), "kubernetes", DEPLOYED, f"evernear inspect run {VERSION} --image IMAGE"),
        ((), "local", DEPLOYED, f"evernear inspect run {VERSION} --image IMAGE"),  # in a pod of KFP
    ],
)
def test_release_on_the_server_of_this_machine_is_asked_there(
    record: RunRecord, command: tuple[str, ...], target: str, deployed: dict, recognize: str
) -> None:
    record.save(verdict=PROMOTE, deployment=deployed, archived={"version": VERSION}, settings={"target": target})
    outcome = finalize(record, "continuous-training", "SUCCEEDED", "", command)
    assert outcome.next_steps()[0] == NextStep("recognize an image", recognize)


@pytest.mark.parametrize(
    ("last_step", "command"), [("ingest", "evernear run --source s"), ("validate", "evernear run")]
)
def test_failed_run_repeats_its_options_unless_the_directory_remembers_them(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_step: str, command: str
) -> None:
    typed = RunCommand(typed=("run", "--source", "s"), later=("run",))
    monkeypatch.setenv(COMMAND_VARIABLE, typed.model_dump_json())
    record.save_step(step(last_step, "finished"))
    record.save_step(step("train", "failed", "The loss is not finite."))
    outcome, page = tmp_path / "outcome", tmp_path / "page.html"
    notify(record.run, record.store.uri, "continuous-training", "FAILED", "", str(outcome), str(page))
    assert RunOutcome.load(outcome).next_steps() == (NextStep("run again", command),)


def test_notice_of_a_promotion_warns_of_a_loss_that_it_would_not_have_detected():
    caution = "A loss of 15 points is detected with 90% probability."
    promoted = RunOutcome(run="1", state="promoted", release=VERSION, candidate=VERSION, caution=caution)
    assert promoted.summary().endswith(f". WARNING: {caution}")
    assert "WARNING" not in promoted.model_copy(update={"caution": ""}).summary()
