"""Parts in an Indexed Job on the loopback cluster, whose pods are processes; the account has the
Role of `deploy/`."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evernear.common.parts import FINAL_EXIT_CODE, Part, Parts
from evernear.common.store import Store, open_store
from evernear.errors import ClusterError, SettingsError
from evernear.kubeflow import indexed_job
from evernear.kubeflow import job as job_module
from evernear.kubeflow.indexed_job import run_on_nodes
from tests.forks import Fork
from tests.loopback.kubernetes import LoopbackCluster
from tests.loopback.kubernetes import jobs as jobs_controller
from tests.loopback.kubernetes.kinds import JOB, POD_TEMPLATE
from tests.real.kubeflow.conftest import IMAGE, Objects

COMPONENT = "many-machines"
pytestmark = pytest.mark.usefixtures("step_image")
# The command of a pod: it writes the results of its parts as `evernear.kubeflow.part` does, without
# loading a release.
FINISH = """
import os, sys
from evernear.common.parts import Parts
from evernear.common.store import open_store
parts = Parts.open(open_store(sys.argv[1]), sys.argv[2])
number = int(os.environ["JOB_COMPLETION_INDEX"])
def finish():
    for part in range(number, parts.plan.parts, int(sys.argv[3])):
        parts.save_result(part, b"done")
"""


@pytest.fixture
def shared_store(bucket: str) -> Store:
    return open_store(f"s3://{bucket}/store")


def plan(store: Store, folder: str = "runs/run-1/embed", parts: int = 4) -> Parts:
    return Parts.make(store, folder, "predict", {}, (Part(units=1) for _ in range(parts)))


def run_command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace the command of the pods by a Python program."""

    def start(container: dict[str, Any], index: int) -> Fork:
        return Fork(FINISH + code, container["args"], {**os.environ, "JOB_COMPLETION_INDEX": str(index)})

    monkeypatch.setattr(jobs_controller, "_start", start)


def run(parts: Parts, report: Any = lambda _: None, nodes: int = 2) -> list[int]:
    seen: list[int] = []
    run_on_nodes(parts, nodes, report, lambda done, total: seen.append(done))
    return seen


def left_behind(cluster: LoopbackCluster, parts: Parts, manifests: Objects) -> str:
    """Create the Job of an earlier attempt that was killed, and return its UID."""
    manifest = indexed_job.indexed_job(parts, 2, manifests["PodTemplate"])
    return cluster.api.create(JOB, manifest, "kubeflow")["metadata"]["uid"]


def jobs(cluster: LoopbackCluster) -> list[dict[str, Any]]:
    return cluster.api.store.all(JOB)


def test_job_runs_every_part_with_the_rights_of_the_role(
    pipeline_cluster: LoopbackCluster, shared_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command(monkeypatch, "finish()")
    parts, states = plan(shared_store), list[str]()
    parts.save_result(1, b"earlier")
    seen = run(parts, report=states.append)
    assert (seen[0], seen[-1]) == (1, 4)
    assert parts.missing() == []
    assert parts.result(1).value == b"earlier"
    assert {(call.verb, call.kind.name) for call in pipeline_cluster.calls} == {
        ("get", "PodTemplate"), ("create", "Job"), ("get", "Job"), ("delete", "Job")
    }  # fmt: skip
    assert jobs(pipeline_cluster) == []
    assert "3 of 4 parts on up to 2 nodes" in states[0]


def test_part_that_failed_for_good_ends_the_step_with_its_sentence(
    pipeline_cluster: LoopbackCluster, shared_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
open({str(tmp_path)!r} + f"/started-{{number}}", "a").write("x")
if number == 2:
    parts.save_failure("The shard 7 is damaged.")
    sys.exit({FINAL_EXIT_CODE})
finish()
"""
    run_command(monkeypatch, code)
    with pytest.raises(ClusterError, match=r"^The shard 7 is damaged\.$"):
        run(plan(shared_store), nodes=4)
    assert (tmp_path / "started-2").read_text() == "x", "it is not retried"
    assert jobs(pipeline_cluster) == []


def test_part_that_fails_is_retried_and_a_drained_node_costs_its_part(
    pipeline_cluster: LoopbackCluster, shared_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import time
mark = {str(tmp_path)!r} + f"/started-{{number}}"
first = not os.path.exists(mark)
open(mark, "a").write("x")
if first and number == 0:
    sys.exit(4)
if first and number == 1:
    time.sleep(600)
finish()
"""
    run_command(monkeypatch, code)
    parts = plan(shared_store)

    def drain() -> None:
        while not (tmp_path / "started-1").exists():
            time.sleep(0.05)
        pipeline_cluster.drain(jobs(pipeline_cluster)[0]["metadata"]["name"], 1)

    draining = threading.Thread(target=drain)
    draining.start()
    run(parts)
    draining.join()
    assert parts.missing() == []
    assert (tmp_path / "started-0").read_text() == (tmp_path / "started-1").read_text() == "xx"


def test_pods_that_keep_failing_name_the_reason_and_the_template(
    pipeline_cluster: LoopbackCluster, shared_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command(monkeypatch, "os._exit(137)")
    monkeypatch.setattr(indexed_job, "RETRIES", 1)
    with pytest.raises(
        ClusterError, match=r"MaxFailedIndexesExceeded: .* raise its limit in the PodTemplate .* correct the Secrets"
    ):
        run(plan(shared_store))


def test_running_job_is_adopted_and_an_ended_one_is_replaced(
    pipeline_cluster: LoopbackCluster,
    component: Objects,
    shared_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = plan(shared_store, parts=2)
    run_command(monkeypatch, f"if os.path.exists({str(tmp_path / 'works')!r}): finish()")

    ended, seen = left_behind(pipeline_cluster, parts, component), set[str]()
    while not jobs(pipeline_cluster)[0].get("status", {}).get("conditions"):
        time.sleep(0.05)
    (tmp_path / "works").touch()
    run(parts, report=lambda _: seen.update(job["metadata"]["uid"] for job in jobs(pipeline_cluster)))
    assert parts.missing() == []
    assert seen
    assert ended not in seen

    parts, seen = plan(shared_store, "runs/run-2/embed", parts=2), set[str]()
    running = left_behind(pipeline_cluster, parts, component)
    run(parts, report=lambda _: seen.update(job["metadata"]["uid"] for job in jobs(pipeline_cluster)))
    assert seen == {running}


def test_failed_job_whose_pods_still_terminate_is_replaced(
    pipeline_cluster: LoopbackCluster,
    component: Objects,
    shared_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = f"""
import signal, time
waits, works = {str(tmp_path / "waits")!r}, {str(tmp_path / "works")!r}
if number == 1 and not os.path.exists(works):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(waits, "w").close()
    time.sleep(600)
while number == 0 and not os.path.exists(waits):
    time.sleep(0.01)
if not os.path.exists(works):
    sys.exit({FINAL_EXIT_CODE})
finish()
"""
    run_command(monkeypatch, code)
    parts, seen = plan(shared_store, parts=2), set[str]()
    failed = left_behind(pipeline_cluster, parts, component)
    while not jobs(pipeline_cluster)[0].get("status", {}).get("conditions"):
        time.sleep(0.05)
    assert [item["type"] for item in jobs(pipeline_cluster)[0]["status"]["conditions"]] == ["FailureTarget"]
    (tmp_path / "works").touch()
    run(parts, report=lambda _: seen.update(job["metadata"]["uid"] for job in jobs(pipeline_cluster)))
    assert parts.missing() == []
    assert seen
    assert failed not in seen


def test_pods_that_cannot_start_name_the_reason_and_the_deadline_the_setting(
    pipeline_cluster: LoopbackCluster, component: Objects, shared_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = {"template": {"spec": {"nodeSelector": {"example.org/gpu": "yes"}}}}
    pipeline_cluster.api.patch(POD_TEMPLATE, patch, "kubeflow", "evernear-parts")
    monkeypatch.setattr(job_module, "CREATION_TIMEOUT_S", 0.3)
    monkeypatch.setattr(indexed_job, "TIMEOUT_S", 2)
    states: list[str] = []
    with pytest.raises(
        ClusterError,
        match=r"DeadlineExceeded: .*event FailedScheduling: .*affinity/selector.* Correct the PodTemplate "
        r"evernear-parts if needed, and run again",
    ):
        run(plan(shared_store), report=states.append)
    assert any(state.startswith("0 nodes run; event FailedScheduling: 0/1 nodes are available") for state in states)
    assert jobs(pipeline_cluster) == []


def test_steps_of_one_run_have_different_jobs(component: Objects, shared_store: Store) -> None:
    names = {
        indexed_job.indexed_job(plan(shared_store, folder), 2, component["PodTemplate"])["metadata"]["name"]
        for folder in ("runs/run-1/embed", "runs/run-1/evaluate", "runs/run-2/embed")
    }
    assert len(names) == 3


def test_stopped_step_and_deleted_job(
    pipeline_cluster: LoopbackCluster, shared_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_command(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(SystemExit) as stopped:
        run(plan(shared_store), report=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert jobs(pipeline_cluster) == []
    assert signal.getsignal(signal.SIGTERM) == before

    def delete(_: str) -> None:
        for job in jobs(pipeline_cluster):
            pipeline_cluster.api.delete(JOB, "kubeflow", job["metadata"]["name"])

    with pytest.raises(ClusterError, match="was deleted by someone else; run again to continue"):
        run(plan(shared_store, "other"), report=delete)


def test_queue_of_kueue_and_image_are_in_the_job(component: Objects, shared_store: Store) -> None:
    template = component["PodTemplate"]
    labels = indexed_job.indexed_job(plan(shared_store), 8, template)["metadata"]["labels"]
    assert "kueue.x-k8s.io/queue-name" not in labels
    template["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team-a"
    manifest = indexed_job.indexed_job(plan(shared_store), 8, template)
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert manifest["spec"]["parallelism"] == manifest["spec"]["completions"] == 4, "no more workers than parts"
    assert manifest["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE


@pytest.mark.parametrize("owners", [None, "Always", "IfNotPresent", "Never"])
def test_images_on_the_node_need_no_registry(
    pipeline_cluster: LoopbackCluster, component: Objects, shared_store: Store, owners: str | None
) -> None:
    """Templates of earlier deployments have no policy of their own."""
    template = component["PodTemplate"]
    (container,) = template["template"]["spec"]["containers"]
    container.pop("imagePullPolicy", None)
    if owners:
        container["imagePullPolicy"] = owners
    pipeline_cluster.api.delete(POD_TEMPLATE, "kubeflow", "evernear-parts")
    stored = pipeline_cluster.api.create(POD_TEMPLATE, template, "kubeflow")
    assert stored["template"]["spec"]["containers"][0]["imagePullPolicy"] == (owners or "Always")
    job = pipeline_cluster.api.create(JOB, indexed_job.indexed_job(plan(shared_store), 2, stored), "kubeflow")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["imagePullPolicy"] == (owners if owners == "Never" else "IfNotPresent")


def test_missing_template_directory_and_image_have_a_remedy(
    pipeline_cluster: LoopbackCluster, shared_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_job, "TEMPLATE", "mine")
    with pytest.raises(
        SettingsError, match=r"PodTemplate mine does not exist in the namespace kubeflow; apply deploy/"
    ):
        run(plan(shared_store))
    with pytest.raises(SettingsError, match=r"Other nodes cannot reach the parts, file:///.*; use s3://bucket/prefix"):
        run(plan(open_store(tmp_path.as_uri())))
    monkeypatch.delenv("EVERNEAR_IMAGE")
    monkeypatch.setattr(indexed_job, "TEMPLATE", "evernear-parts")
    with pytest.raises(SettingsError, match=r"image of the nodes is unknown .* set the environment variable EVERNEAR_"):
        run(plan(shared_store, "other"))
