"""Train on several nodes by creating, following and deleting a Kubeflow Trainer TrainJob.

It refers to a TrainingRuntime (``deploy/components/multi-node-training``), which defines the pods
except for image and command. Input, progress and result pass through the object store
(`evernear.embedding.node`), so this process only needs TrainJobs and a list of events.
"""

from collections.abc import Callable
from typing import Any

from evernear.common.disk import sha256_bytes
from evernear.common.output import print_line
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.data.shards import Dataset
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.embedding.artifact import Epoch
from evernear.embedding.node import TASK, NodeLog, NodeTask
from evernear.embedding.recipe import Recipe
from evernear.errors import TrainingError
from evernear.kubeflow.job import condition, follow, image_of_nodes, owned
from evernear.settings import RunSettings
from evernear.settings.train import TrainingChoices

Tree = dict[str, Any]

POLL_S = 10.0
RUNTIME = "evernear"
TIMEOUT_S = 24 * 3600
"""``activeDeadlineSeconds`` of the TrainJob: the time limit of the train step."""
CONTROLLERS = "the Deployments kubeflow-trainer-controller-manager and jobset-controller-manager (kubeflow-system)"


def run_train_job(
    run: str,
    dataset: Dataset,
    recipe: Recipe,
    chosen: RunSettings,
    on_epoch: Callable[[Epoch], None],
    report: Callable[[str], None],
) -> None:
    """Train on ``recipe.nodes`` nodes. The result is the last checkpoint in the store. A TrainJob
    from an earlier attempt of ``run`` is replaced if it failed, and adopted otherwise. ``report``
    receives the nodes' state, and ``on_epoch`` each finished epoch."""
    record = RunRecord(open_store(chosen.store_uri), run)
    task = NodeTask(dataset=dataset.manifest.name, digest=dataset.digest, recipe=recipe)
    record.save(**{TASK: task.model_dump(mode="json")})
    cluster = Cluster.of()
    manifest = train_job(run, recipe, chosen)
    try:
        with owned(cluster, manifest, lambda job: condition(job, "Failed") is not None, POLL_S) as name:
            _follow(cluster, name, record, recipe, on_epoch, report)
    finally:
        for rank in range(recipe.nodes):
            for line in NodeLog.of(record, rank).lines:
                print_line(f"[node {rank}] {line}")


def train_job(run: str, recipe: TrainingChoices, chosen: RunSettings) -> Tree:
    """The TrainJob. Its name is an RFC 1035 label, short enough for the pod names' suffixes."""
    trainer: Tree = {
        "image": image_of_nodes(),
        "numNodes": recipe.nodes,
        "numProcPerNode": recipe.processes,
        "command": ["python", "-m", "evernear.embedding.node"],
        "args": [chosen.store_uri, run],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": f"evernear-{sha256_bytes(run.encode())[:16]}",
            "labels": {"app.kubernetes.io/name": "evernear", "app.kubernetes.io/component": "training"},
            "annotations": {"evernear.dev/run": run},
        },
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": RUNTIME,
            },
            "activeDeadlineSeconds": TIMEOUT_S,
            "trainer": trainer,
        },
    }


def _follow(
    cluster: Cluster,
    name: str,
    record: RunRecord,
    recipe: Recipe,
    on_epoch: Callable[[Epoch], None],
    report: Callable[[str], None],
) -> None:
    report(f"TrainJob {name} on {recipe.nodes} nodes")
    last_epoch, last_state = 0, ""
    for resource in follow(
        cluster,
        "TrainJob",
        name,
        report,
        has_started=lambda resource: _has_jobs(resource) or bool(NodeLog.of(record, 0).lines),
        poll_s=POLL_S,
        timeout_s=TIMEOUT_S,
        fails=TrainingError,
        remedy=f"Correct the TrainingRuntime {RUNTIME} or its quota, and run again; see the logs of {CONTROLLERS}.",
    ):
        state = _nodes_ready(resource, recipe.nodes)
        if state != last_state:
            report(state)
        last_state = state
        for epoch in NodeLog.of(record, 0).epochs:
            if epoch.epoch > last_epoch:
                on_epoch(epoch)
                last_epoch = epoch.epoch
        if condition(resource, "Complete"):
            return
        if failed := condition(resource, "Failed"):
            raise TrainingError(_cause(name, failed, record, recipe.nodes))


def _has_jobs(resource: Tree) -> bool:
    """Whether a Job has pods, has ended, or is suspended, for example by a queue."""
    counts = ("ready", "succeeded", "failed", "active", "suspended")
    suspended = condition(resource, "Suspended") is not None
    return suspended or any(job.get(count) for job in _jobs(resource) for count in counts)


def _nodes_ready(resource: Tree, nodes: int) -> str:
    """``jobsStatus`` counts Jobs, which are ready when all their nodes are."""
    jobs = _jobs(resource)
    is_ready = bool(jobs) and all(job["ready"] or job["succeeded"] for job in jobs)
    return f"{nodes} of {nodes} nodes ready" if is_ready else f"waiting until all {nodes} nodes are ready"


def _jobs(resource: Tree) -> list[Tree]:
    return resource.get("status", {}).get("jobsStatus") or []


def _cause(name: str, failed: Tree, record: RunRecord, nodes: int) -> str:
    """Kubernetes' reason for the failure, and the last line that a node logged."""
    lines = [NodeLog.of(record, rank).lines for rank in range(nodes)]
    last = max((log[-1] for log in lines if log), default="")  # the lines begin with their time
    message = f"The TrainJob {name} failed: {failed['reason']}: {failed['message'].rstrip('.')}."
    return f"{message} The last line of its nodes: {last}" if last else message
