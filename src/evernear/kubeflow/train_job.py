"""Train on several nodes: create a TrainJob of Kubeflow Trainer, follow it, and delete it.

The TrainJob refers to a TrainingRuntime (``deploy/components/multi-node-training``), which defines everything about the
pods except image and command. Input, progress and result pass through the object store (`evernear.embedding.node`), so
that this process needs no access to pods: it may only create, read and delete TrainJobs, and list events.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evernear.common.disk import sha256_bytes
from evernear.common.output import print_line
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.data.shards import Dataset
from evernear.deployment.kubernetes.cluster import ApiUnavailableError, Cluster, ObjectConflictError
from evernear.deployment.kubernetes.rollout_diagnosis import event_time
from evernear.embedding.artifact import Epoch
from evernear.embedding.node import TASK, NodeLog, NodeTask
from evernear.errors import ClusterError, SettingsError, TrainingError
from evernear.kubeflow import IMAGE_VARIABLE, PLACEHOLDER_IMAGE
from evernear.settings import RunSettings, TrainJobSettings, TrainSettings

Tree = dict[str, Any]

POLL_S = 10.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
START_GRACE_S = 600
"""Time beyond the deadline of the TrainJob in which its controller must report the end."""
CREATION_TIMEOUT_S = 60
"""Time in which the controllers must create the Jobs and pods of the TrainJob."""
CONTROLLERS = "the Deployments kubeflow-trainer-controller-manager and jobset-controller-manager (kubeflow-system)"
MAX_EVENTS = 3


def run_train_job(
    run: str,
    dataset: Dataset,
    settings: TrainSettings,
    chosen: RunSettings,
    on_epoch: Callable[[Epoch], None],
    report: Callable[[str], None],
) -> None:
    """Train with ``settings`` on ``settings.nodes`` nodes; the result is the last checkpoint in the store.

    A TrainJob that an earlier attempt of the same ``run`` left behind is adopted while it runs, and replaced if it
    failed. ``report`` receives the state of the nodes, ``on_epoch`` each finished epoch.

    Raises:
        TrainingError: the TrainJob failed, disappeared, exceeded its deadline, or its resources cannot be created.
        ClusterError: the cluster is unreachable or rejects the TrainJob.
        SettingsError: no namespace or no image is known.
    """
    record = RunRecord(open_store(chosen.store_uri), run)
    task = NodeTask(dataset=dataset.manifest.name, digest=dataset.digest, settings=settings)
    record.save(**{TASK: task.model_dump(mode="json")})
    cluster = Cluster.of(chosen.kubernetes.model_copy(update={"namespace": _namespace(chosen.train_job)}))
    manifest = train_job(run, settings, chosen)
    name = manifest["metadata"]["name"]
    # Kubeflow Pipelines sends SIGTERM when someone stops the run; nothing else would stop the TrainJob.
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _create(cluster, manifest)
        _follow(cluster, name, record, settings, chosen.train_job, on_epoch, report)
    finally:
        signal.signal(signal.SIGTERM, handler)
        with suppress(ClusterError):  # it must not hide an earlier error, and the TrainJob has a deadline
            cluster.delete("TrainJob", name)
        for rank in range(settings.nodes):
            for line in NodeLog.of(record, rank).lines:
                print_line(f"[node {rank}] {line}")


def train_job(run: str, settings: TrainSettings, chosen: RunSettings) -> Tree:
    """The manifest of the TrainJob of ``run``.

    The name is an RFC 1035 label of at most 63 characters, as the CustomResourceDefinition requires, and the names of
    the pods need some of them.

    Raises:
        SettingsError: no image is known.
    """
    image = chosen.train_job.image or os.environ.get(IMAGE_VARIABLE, PLACEHOLDER_IMAGE)
    if image == PLACEHOLDER_IMAGE:
        raise SettingsError("The image of the nodes is unknown outside of a cluster's pipeline; set train_job.image.")
    trainer: Tree = {
        "image": image,
        "numNodes": settings.nodes,
        "numProcPerNode": settings.processes,
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
                "name": chosen.train_job.runtime,
            },
            "activeDeadlineSeconds": chosen.train_job.timeout_s,
            "trainer": trainer,
        },
    }


def _create(cluster: Cluster, manifest: Tree) -> None:
    name = manifest["metadata"]["name"]
    try:
        cluster.create(manifest)
    except ObjectConflictError:
        earlier = cluster.get("TrainJob", name)
        if earlier is not None and _condition(earlier, "Failed") is None:
            return
        cluster.delete("TrainJob", name)
        while cluster.get("TrainJob", name) is not None:
            time.sleep(POLL_S)
        cluster.create(manifest)


def _follow(
    cluster: Cluster,
    name: str,
    record: RunRecord,
    settings: TrainSettings,
    job: TrainJobSettings,
    on_epoch: Callable[[Epoch], None],
    report: Callable[[str], None],
) -> None:
    started, deadline_s = datetime.now(UTC), time.monotonic() + job.timeout_s + START_GRACE_S
    report(f"TrainJob {name} on {settings.nodes} nodes")
    last_epoch, last_state = 0, ""
    has_started, waiting_since_s = False, time.monotonic()
    while True:
        try:
            resource = cluster.get("TrainJob", name)
        except ApiUnavailableError as error:
            report(str(error))
            waiting_since_s = time.monotonic()  # the controllers may not reach it either
        else:
            if resource is None:
                raise TrainingError(f"The TrainJob {name} was deleted by someone else; run again to resume.")
            state = _nodes_ready(resource, settings.nodes)
            if state != last_state:
                report(state)
            last_state = state
            for epoch in NodeLog.of(record, 0).epochs:
                if epoch.epoch > last_epoch:
                    on_epoch(epoch)
                    last_epoch = epoch.epoch
            if _condition(resource, "Complete"):
                return
            if failed := _condition(resource, "Failed"):
                raise TrainingError(_cause(name, failed, record, settings.nodes))
            has_started = has_started or _has_jobs(resource) or bool(NodeLog.of(record, 0).lines)
            if not has_started and time.monotonic() - waiting_since_s > CREATION_TIMEOUT_S:
                raise TrainingError(_nothing_created(cluster, resource))
        if time.monotonic() > deadline_s:
            raise TrainingError(
                f"The TrainJob {name} has not ended since {started:%Y-%m-%d %H:%M} UTC; see its events."
            )
        time.sleep(POLL_S)


def _condition(resource: Tree, kind: str) -> Tree | None:
    """A condition that is true."""
    conditions: list[Tree] = resource.get("status", {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == kind and item["status"] == "True"), None)


def _has_jobs(resource: Tree) -> bool:
    """Whether a Job exists that has pods, has ended, or is suspended, as a queue does."""
    counts = ("ready", "succeeded", "failed", "active", "suspended")
    suspended = _condition(resource, "Suspended") is not None
    return suspended or any(job.get(count) for job in _jobs(resource) for count in counts)


def _nodes_ready(resource: Tree, nodes: int) -> str:
    """The state in words. ``jobsStatus`` counts Jobs: a Job is ready when all of its nodes are."""
    jobs = _jobs(resource)
    is_ready = bool(jobs) and all(job["ready"] or job["succeeded"] for job in jobs)
    return f"{nodes} of {nodes} nodes ready" if is_ready else f"waiting until all {nodes} nodes are ready"


def _jobs(resource: Tree) -> list[Tree]:
    return resource.get("status", {}).get("jobsStatus") or []


def _nothing_created(cluster: Cluster, resource: Tree) -> str:
    """The conditions of a TrainJob without pods, the newest warnings about its objects, and where to look further."""
    name, runtime = resource["metadata"]["name"], resource["spec"]["runtimeRef"]["name"]
    created = resource["metadata"]["creationTimestamp"]
    conditions: list[Tree] = resource.get("status", {}).get("conditions") or []
    reasons = [f"condition {item['type']}: {_text(item)}" for item in conditions if item["status"] == "True"]
    try:
        events = cluster.list("Event", fieldSelector="type=Warning")
    except ClusterError as error:
        reasons.append(f"its events cannot be read: {str(error).rstrip('.')}")
    else:
        events = [item for item in events if _is_about(item["involvedObject"].get("name", ""), name)]
        events = [item for item in events if item["metadata"]["creationTimestamp"] >= created]  # no earlier attempt
        texts = dict.fromkeys(map(_text, sorted(events, key=event_time)))  # a warning may repeat
        reasons += [f"event {text}" for text in [*texts][-MAX_EVENTS:]]
    return (
        f"The pods of the TrainJob {name} were not created within {CREATION_TIMEOUT_S} s: "
        f"{'; '.join(reasons) or 'it has neither a condition nor an event'}. Correct the TrainingRuntime {runtime} or "
        f"its quota, and run again; the logs of {CONTROLLERS} say more."
    )


def _is_about(subject: str, name: str) -> bool:
    """Whether ``subject`` is the TrainJob or its JobSet, Jobs or pods."""
    return subject == name or subject.startswith(f"{name}-")


def _text(item: Tree) -> str:
    """Reason and message of a condition or an event, in one line."""
    return " ".join(f"{item.get('reason')}: {item.get('message', '')}".split()).rstrip(".: ")


def _cause(name: str, failed: Tree, record: RunRecord, nodes: int) -> str:
    """One sentence: Kubernetes' reason, and the last line that a node logged."""
    lines = [NodeLog.of(record, rank).lines for rank in range(nodes)]
    last = max((log[-1] for log in lines if log), default="")  # they begin with the time
    message = f"The TrainJob {name} failed: {failed['reason']}: {failed['message'].rstrip('.')}."
    return f"{message} The last line of its nodes: {last}" if last else message


def _namespace(settings: TrainJobSettings) -> str:
    if settings.namespace:
        return settings.namespace
    if not NAMESPACE_FILE.is_file():
        raise SettingsError(
            "This process does not run in a pod; set train_job.namespace to the namespace of the TrainJob."
        )
    return NAMESPACE_FILE.read_text().strip()
