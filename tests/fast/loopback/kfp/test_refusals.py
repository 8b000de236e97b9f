"""The fake KFP API server refuses what a real one refuses. Tests of runs and schedules rely on what
it accepts."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from evernear.kubeflow import GOLDEN
from tests.loopback.kfp import contract
from tests.loopback.kfp.api import FIELDS, Api
from tests.loopback.kfp.listing import page
from tests.loopback.kfp.state import HTTP, ApiServerError, State

COMPILED = (GOLDEN / "continuous_training.yaml").read_bytes()
RED = '{"predicates": [{"operation": "EQUALS", "key": "color", "string_value": "red"}]}'


@pytest.fixture
def state() -> State:
    """A server with the pipeline ``training`` and its version."""
    state = State(lambda: datetime.now(UTC), frozenset())
    state.create_version(state.create_pipeline("training")["pipeline_id"], "training", COMPILED)
    return state


def request(state: State, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A request for a run, or for a recurring one."""
    (version,) = state.versions.values()
    reference = {key: version[key] for key in ("pipeline_id", "pipeline_version_id")}
    config = {"parameters": parameters or {}}
    return {"display_name": "x", "pipeline_version_reference": reference, "runtime_config": config} | fields


def recurring(state: State, concurrency: int = 1, **trigger: Any) -> dict[str, Any]:
    return state.create_recurring_run(request(state, max_concurrency=str(concurrency), trigger=trigger))


@pytest.mark.parametrize(
    ("status", "act"),
    [
        (409, lambda state: state.create_pipeline("Training")),
        (409, lambda state: state.create_version(next(iter(state.pipelines)), "training", COMPILED)),
        (404, lambda state: state.create_version("none", "training", COMPILED)),
        (400, lambda state: state.create_version(next(iter(state.pipelines)), "other", b"a: [")),
        (400, lambda state: state.create_version(next(iter(state.pipelines)), "other", b"a: 1")),
        (404, lambda state: state.create_run(request(state, experiment_id="none"))),
        (404, lambda state: state.create_run(request(state, pipeline_version_reference={}))),
        (400, lambda state: state.create_run(request(state, display_name=""))),
        (400, lambda state: state.create_run(request(state, {"color": "red"}))),
        (400, lambda state: state.create_run(request(state, {"target": 3}))),
        (400, lambda state: recurring(state, cron_schedule={"cron": "at three"})),
        (400, lambda state: recurring(state, 11, cron_schedule={"cron": "0 0 3 * * *"})),
        (400, lambda _: page([], {"sort_by": "color"}, FIELDS["run"], "run_id")),
        (400, lambda _: page([{}], {"filter": RED}, FIELDS["run"], "run_id")),
        (400, lambda _: page([], {"page_token": "bm8="}, FIELDS["run"], "run_id")),
    ],
)
def test_invalid_request_is_refused(state: State, status: int, act: Callable[[State], object]) -> None:
    with pytest.raises(ApiServerError) as refused:
        act(state)
    assert HTTP[refused.value.code] == status, refused.value


def test_violations_of_the_contract_are_detected() -> None:
    run = {"run_id": "a", "display_name": "b", "created_at": "2026-11-22T00:00:00Z", "state": "RUNNING"}
    assert contract.faults("V2beta1Run", run) == []
    for wrong in (
        {"created_at": "yesterday"},
        {"state": "Running"},
        {"name": "that was v1"},
        {"run_details": {"task_details": [{"state": 3}]}},
    ):
        assert contract.faults("V2beta1Run", run | wrong), wrong
    assert contract.faults("V2beta1RecurringRun", {"max_concurrency": 1}), "int64 is a string in protobuf's JSON"


def test_server_has_only_published_operations() -> None:
    published = {operation.name for operation in contract.operations()}
    assert {name for name in vars(Api) if not name.startswith("_")} <= published
