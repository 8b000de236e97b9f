"""Uploads and schedules through the real ``kfp.Client``, on a loopback server that enforces the
published API."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
import yaml

from evernear.errors import PipelineServerError, SettingsError
from evernear.kubeflow import NAMES
from evernear.kubeflow.publish import Publisher, as_manifests, fill_defaults, for_cluster
from evernear.settings import PipelineSettings
from tests.loopback.kfp import KfpServer

PIPELINE = "continuous-training"
IMAGE = "registry.example/evernear-train@sha256:" + "ab" * 32
COMPILED = for_cluster(PIPELINE, IMAGE, PipelineSettings())
COMMIT = "5b67dc9f1c0b6c0f5d9e7a1b2c3d4e5f60718293"
CREATE = "recurring_run_service_create_recurring_run"


pytestmark = pytest.mark.usefixtures("short_backoff")


@pytest.fixture
def publisher(kfp: KfpServer) -> Publisher:
    return publisher_to(kfp)


def publisher_to(server: KfpServer, **settings: Any) -> Publisher:
    return Publisher(PipelineSettings.model_validate({"endpoint": server.url, **settings}))


def test_upload_names_the_version_after_the_commit_and_is_idempotent(kfp: KfpServer, publisher: Publisher) -> None:
    first = publisher.upload(COMPILED, COMMIT)
    assert (first.pipeline, first.version, first.new) == (PIPELINE, COMMIT, True)
    again = publisher_to(kfp).upload(COMPILED, COMMIT)
    assert again == first.model_copy(update={"new": False})
    (pipeline,) = kfp.state.pipelines.values()
    (version,) = kfp.state.versions.values()
    assert (pipeline["name"], pipeline["display_name"]) == (PIPELINE, "Continuous training")
    assert pipeline["description"]
    assert (version["name"], version["display_name"]) == (f"{PIPELINE}-{COMMIT}", COMMIT)
    assert kfp.state.files[version["pipeline_version_id"]] == COMPILED


def test_upload_recognizes_a_version_that_the_server_reformatted(kfp: KfpServer, publisher: Publisher) -> None:
    """The server turns integers into floats or back, and drops fields with default values."""
    compiled = fill_defaults(COMPILED, {"settings": {"train": {"epochs": 3}}})
    publisher.upload(compiled, COMMIT)
    (version,) = kfp.state.versions.values()
    spec = copy.deepcopy(version["pipeline_spec"])
    parameters = spec["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    parameters["settings"]["defaultValue"]["train"]["epochs"] = 3.0
    groups = [part["dag"]["tasks"] for part in spec["pipeline_spec"]["components"].values() if "dag" in part]
    uncached = [task for tasks in groups for task in tasks.values() if task.get("cachingOptions") == {}]
    uncached[0]["cachingOptions"]["enableCache"] = False
    version["pipeline_spec"] = spec
    assert not publisher.upload(compiled, COMMIT).new


def test_upload_rejects_different_content_under_the_same_version(kfp: KfpServer, publisher: Publisher) -> None:
    publisher.upload(COMPILED, COMMIT)
    changed = for_cluster(PIPELINE, IMAGE.replace("ab", "cd"), PipelineSettings())
    with pytest.raises(
        PipelineServerError, match=f"Version {COMMIT} of the pipeline .* already exists with different content"
    ):
        publisher.upload(changed, COMMIT)
    assert len(kfp.state.versions) == 1
    assert publisher.upload(changed, "another").new


def test_what_was_uploaded_last_is_what_starts() -> None:
    """Also if it is an older content again, as after a forced push to an earlier commit."""
    older, newer = COMPILED, for_cluster(PIPELINE, IMAGE.replace("ab", "cd"), PipelineSettings())
    with KfpServer(now=every_second()) as server:
        publisher = publisher_to(server)

        def upload(content: bytes, version: str) -> tuple[str, bool]:
            uploaded = publisher.upload(content, version)
            newest = publisher.runs.newest(PIPELINE)
            assert (newest.display_name, newest.name) == (uploaded.version, f"{PIPELINE}-{uploaded.version}")
            assert server.state.files[newest.pipeline_version_id] == content
            return uploaded.version, uploaded.new

        assert [upload(older, "a"), upload(newer, "b"), upload(older, "a")] == [("a", True), ("b", True), ("a-2", True)]
        scheduled = publisher.schedule(PIPELINE, "0 3 * * *", {})
        assert (scheduled.pipeline_version, scheduled.is_newest) == ("a-2", True)
        assert [upload(older, "a"), upload(newer, "b")] == [("a-2", False), ("b-2", True)]
        (scheduled,) = publisher.schedules()
        assert (scheduled.pipeline_version, scheduled.is_newest) == ("a-2", False)
        assert [upload(older, "a"), upload(older, "a")] == [("a-3", True), ("a-3", False)]


def test_an_upload_within_a_second_of_another_is_the_newest(kfp: KfpServer, publisher: Publisher) -> None:
    """KFP's times are whole seconds."""
    newer = for_cluster(PIPELINE, IMAGE.replace("ab", "cd"), PipelineSettings())
    for content, version in ((COMPILED, "a"), (newer, "b"), (COMPILED, "a-2")):
        assert publisher.upload(content, version.partition("-")[0]).version == version
        assert publisher.runs.newest(PIPELINE).display_name == version


def every_second() -> Callable[[], datetime]:
    """A clock that advances by a second at each reading."""
    times = (datetime(2026, 11, 22, 8, tzinfo=UTC) + timedelta(seconds=n) for n in count())
    return lambda: next(times)


def test_concurrent_uploads_create_one_version(kfp: KfpServer) -> None:
    barrier = threading.Barrier(4)

    def upload(_: int) -> Any:
        publisher = publisher_to(kfp)
        barrier.wait()
        return publisher.upload(COMPILED, COMMIT)

    with ThreadPoolExecutor(4) as pool:
        uploaded = list(pool.map(upload, range(4)))
    assert sum(version.new for version in uploaded) == 1
    assert len({version.pipeline_version_id for version in uploaded}) == len(kfp.state.versions) == 1


def test_upload_and_schedule_use_the_namespace() -> None:
    with KfpServer(namespaces={"alice"}) as server:
        publisher = publisher_to(server, namespace="alice")
        publisher.upload(COMPILED, COMMIT)
        created = publisher.schedule(PIPELINE, "0 3 * * *", {})
        assert [pipeline["namespace"] for pipeline in server.state.pipelines.values()] == ["alice"]
        assert publisher.schedules() == [created]
        with pytest.raises(PipelineServerError, match="denied the request"):
            publisher_to(server, namespace="bob").upload(COMPILED, COMMIT)


@pytest.mark.parametrize("pipeline", NAMES)
def test_every_pipeline_uploads_and_starts_without_arguments(
    kfp: KfpServer, publisher: Publisher, pipeline: str
) -> None:
    publisher.upload(for_cluster(pipeline, IMAGE, PipelineSettings()), COMMIT)
    required = [p for p in publisher.runs.parameters(pipeline) if p.required]
    assert not required
    assert publisher.runs.start(pipeline, {}, "a").pipeline == pipeline


def test_manifests_are_reproducible_and_contain_the_pipeline() -> None:
    pipeline = min(NAMES, key=lambda name: len(for_cluster(name, IMAGE, PipelineSettings())))  # kfp is slow
    compiled = for_cluster(pipeline, IMAGE, PipelineSettings())
    content = as_manifests(compiled, COMMIT, namespace="kubeflow")
    assert as_manifests(compiled, COMMIT, namespace="kubeflow") == content
    pipeline_manifest, version = yaml.load_all(content, yaml.CSafeLoader)
    spec, platform = yaml.load_all(compiled, yaml.CSafeLoader)
    assert (pipeline_manifest["kind"], pipeline_manifest["metadata"]) == (
        "Pipeline",
        {"name": pipeline, "namespace": "kubeflow"},
    )
    assert pipeline_manifest["spec"]["displayName"] == spec["pipelineInfo"]["displayName"]
    assert pipeline_manifest["spec"]["description"] == spec["pipelineInfo"]["description"]
    assert version["apiVersion"] == "pipelines.kubeflow.org/v2beta1"
    assert version["metadata"] == {"name": f"{pipeline}-{COMMIT}", "namespace": "kubeflow"}
    assert version["spec"]["pipelineName"] == pipeline
    assert version["spec"]["displayName"] == COMMIT
    assert version["spec"]["pipelineSpec"] == spec
    assert version["spec"]["platformSpec"] == platform


def test_schedule_starts_the_version_that_was_newest(kfp: KfpServer, publisher: Publisher) -> None:
    uploaded = publisher.upload(COMPILED, COMMIT)
    created = publisher.schedule(PIPELINE, "0 3 * * *", {"target": "local"})
    assert (created.pipeline, created.cron, created.state) == (PIPELINE, "0 0 3 * * *", "enabled")
    (job,) = kfp.state.recurring_runs.values()
    assert (job["max_concurrency"], job["no_catchup"]) == ("1", True)
    fired = kfp.fire(created.id)
    assert fired.resource["pipeline_version_reference"]["pipeline_version_id"] == uploaded.pipeline_version_id
    assert fired.parameters == {"target": "local"}
    assert publisher.runs.list()[0].key == "", "scheduled runs have no key"


def test_replacing_a_schedule_never_leaves_two_enabled(
    kfp: KfpServer, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.upload(COMPILED, COMMIT)
    before = publisher.schedule(PIPELINE, "0 3 * * *", {})
    original_call = publisher._kfp.call
    enabled: list[int] = []

    def call(operation: str, **arguments: Any) -> Any:
        response = original_call(operation, **arguments)
        enabled.append(sum(job["status"] == "ENABLED" for job in kfp.state.recurring_runs.values()))
        return response

    monkeypatch.setattr(publisher._kfp, "call", call)
    after = publisher.schedule(PIPELINE, "0 4 * * *", {})
    assert max(enabled) == 1
    assert after.id != before.id
    assert publisher.schedules() == [after]
    assert kfp.policies == ["ORPHAN"], "other policies would delete the runs of the old schedule"


def test_schedule_that_kfp_would_misread_is_refused(kfp: KfpServer, publisher: Publisher) -> None:
    publisher.upload(COMPILED, COMMIT)
    misread = {"61 3 * * *": "bad minute", "0 3 31 2 *": "bad day-of-month"}
    misread |= dict.fromkeys(("nightly", "", "@daily", "15 0 3 * * *", "TZ=Europe/Berlin 0 3 * * *"), "five fields")
    for cron, reason in misread.items():
        with pytest.raises(SettingsError, match=f"{reason}.*'0 3 \\* \\* \\*' for daily at 3:00"):
            publisher.schedule(PIPELINE, cron, {})
    assert not kfp.state.recurring_runs


def test_rejected_schedule_keeps_the_old_one_enabled(kfp: KfpServer, publisher: Publisher) -> None:
    publisher.upload(COMPILED, COMMIT)
    before = publisher.schedule(PIPELINE, "0 3 * * *", {})
    kfp.fail(operation=CREATE, status=400)
    with pytest.raises(PipelineServerError):
        publisher.schedule(PIPELINE, "0 4 * * *", {})
    with pytest.raises(SettingsError, match="did you mean 'target'"):
        publisher.schedule(PIPELINE, "0 4 * * *", {"tagret": "local"})
    assert publisher.schedules() == [before]


def test_lost_response_to_a_schedule_leaves_at_most_one_enabled(kfp: KfpServer, publisher: Publisher) -> None:
    publisher.upload(COMPILED, COMMIT)
    publisher.schedule(PIPELINE, "0 3 * * *", {})
    kfp.fail(operation=CREATE, status=504, after=True)
    with pytest.raises(PipelineServerError, match="is disabled and the new one may not exist; try again"):
        publisher.schedule(PIPELINE, "0 4 * * *", {})
    assert [s.cron for s in publisher.schedules() if s.state == "enabled"] == ["0 0 4 * * *"]
    created = publisher.schedule(PIPELINE, "0 4 * * *", {})
    assert publisher.schedules() == [created]


def test_schedules_include_those_created_from_a_file(kfp: KfpServer, publisher: Publisher) -> None:
    publisher.upload(COMPILED, COMMIT)
    created = publisher.schedule(PIPELINE, "0 3 * * *", {})
    job = kfp.state.recurring_runs[created.id]
    del job["pipeline_version_reference"]
    job["pipeline_spec"] = next(yaml.load_all(COMPILED, yaml.CSafeLoader))
    assert publisher.schedules() == [created.model_copy(update={"pipeline_version_id": "", "pipeline_version": ""})]


def test_unschedule_deletes_the_schedule(kfp: KfpServer, publisher: Publisher) -> None:
    publisher.upload(COMPILED, COMMIT)
    publisher.schedule(PIPELINE, "0 0 * * *", {})
    assert publisher.unschedule(PIPELINE) == 1
    assert publisher.unschedule(PIPELINE) == 0
    assert not kfp.state.recurring_runs
