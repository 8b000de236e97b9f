"""The loopback server with a plain ``kfp.Client``: upload, run, list, schedule, wait, terminate,
and errors."""

import json
from collections.abc import Iterator
from pathlib import Path

import kfp
import pytest
from kfp_server_api.exceptions import ApiException

from evernear.kubeflow import GOLDEN
from tests.loopback.kfp import KfpServer

COMPILED = str(GOLDEN / "continuous_training.yaml")
pytestmark = pytest.mark.filterwarnings("ignore:This client only works with:FutureWarning")


@pytest.fixture
def server() -> Iterator[KfpServer]:
    with KfpServer() as server:
        yield server


@pytest.fixture
def client(server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kfp.Client:
    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    return kfp.Client(host=server.url)


def test_invalid_requests_are_rejected(server: KfpServer, client: kfp.Client, tmp_path: Path) -> None:
    pipeline = client.upload_pipeline(COMPILED, pipeline_name="training")
    version = client.list_pipeline_versions(pipeline.pipeline_id).pipeline_versions[0]
    experiment = client.create_experiment("mine")
    nonsense = tmp_path / "nonsense.yaml"
    nonsense.write_text("a: [")
    target = {"pipeline_id": pipeline.pipeline_id, "version_id": version.pipeline_version_id}
    finished = client.run_pipeline(experiment.experiment_id, "done", **target).run_id
    server.run(finished).begin()
    server.run(finished).end()
    unknown_key = json.dumps({"predicates": [{"operation": "EQUALS", "key": "color", "string_value": "red"}]})
    experiment_id = experiment.experiment_id
    refusals = [
        (409, lambda: client.upload_pipeline(COMPILED, pipeline_name="Training")),
        (409, lambda: client.upload_pipeline_version(COMPILED, "training", pipeline_id=pipeline.pipeline_id)),
        (400, lambda: client.upload_pipeline(str(nonsense), pipeline_name="nonsense")),
        (404, lambda: client.get_run("nobody's")),
        (404, lambda: client.run_pipeline("no experiment", "x", **target)),
        (404, lambda: client.run_pipeline(experiment_id, "x", pipeline_id=pipeline.pipeline_id, version_id="none")),
        (400, lambda: client.run_pipeline(experiment_id, "x", params={"color": "red"}, **target)),
        (400, lambda: client.run_pipeline(experiment_id, "x", params={"target": 3}, **target)),
        (400, lambda: client.list_runs(sort_by="color")),
        (400, lambda: client.list_runs(filter=unknown_key)),
        (400, lambda: client.list_runs(page_token="bm8=")),
        (400, lambda: client.terminate_run(finished)),
        (400, lambda: client.create_recurring_run(experiment_id, "x", cron_expression="at three", **target)),
        (
            400,
            lambda: client.create_recurring_run(experiment_id, "x", interval_second=60, max_concurrency=11, **target),
        ),
    ]
    for status, request in refusals:
        with pytest.raises(ApiException) as error:
            request()
        assert error.value.status == status, error.value.body


def test_contract_violation_fails_the_test(client: kfp.Client) -> None:
    with KfpServer() as server:
        with pytest.raises(ApiException):
            kfp.Client(host=server.url).runs.run_service_create_run(run={"display_name": "x", "color": "red"})
        assert server.violations == [
            "request of run_service_create_run: V2beta1Run: Additional properties are not allowed "
            "('color' was unexpected)"
        ]
        server.violations.clear()


def test_token_and_namespace_are_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    with KfpServer(token="secret", namespaces={"alice"}) as server:
        refusals = [
            (401, kfp.Client(host=server.url, existing_token="wrong", namespace="alice"), "alice"),
            (403, kfp.Client(host=server.url, existing_token="secret", namespace="bob"), "bob"),
        ]
        for status, client, namespace in refusals:
            with pytest.raises(ApiException) as error:
                client.list_runs(namespace=namespace)
            assert error.value.status == status
        client = kfp.Client(host=server.url, existing_token="secret", namespace="alice")
        with pytest.raises(ApiException) as error:
            client.runs.run_service_list_runs()
        assert "empty namespace" in error.value.body
        assert client.list_runs(namespace="alice").runs is None
