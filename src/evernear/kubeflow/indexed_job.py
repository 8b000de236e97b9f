"""Run the parts of a step on several nodes with a Kubernetes Indexed Job, whose index is the part
number.

The pods come from a PodTemplate (``deploy/components/many-machines``), which a cluster's owner
patches. This module adds the image and command. Parts and results pass through the store, so this
process needs no access to pods.
"""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from evernear.common.disk import sha256_bytes
from evernear.common.parts import FINAL_EXIT_CODE, Parts, PodUsage
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.errors import ClusterError, SettingsError
from evernear.kubeflow import job

Tree = dict[str, Any]

POLL_S = 10.0
TEMPLATE = "evernear-parts"
"""The PodTemplate in ``deploy/components/many-machines``."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""The label with which the PodTemplate's owner chooses a LocalQueue of Kueue."""
TIMEOUT_S = 23 * 3600
"""``activeDeadlineSeconds`` of the Job. The step has an hour more, to combine the results."""
RETRIES = 3
"""``backoffLimitPerIndex``: retries of a part that failed, lost nodes apart. An error that would
only occur again is not retried at all."""
CONTAINER = "part"
"""The container of the PodTemplate that runs the part."""
KEEP_FINISHED_S = 3600
"""Seconds after which Kubernetes deletes a finished Job whose step was killed."""
MAX_PARTS = 100_000
"""Kubernetes' limit of ``completions`` with a parallelism above 10,000. No reasonable number of
parts comes near it."""


@dataclass(frozen=True)
class IndexedJob:
    """An `Executor` that runs parts in the pods of an Indexed Job, at most ``nodes`` at a time."""

    nodes: int
    report: Callable[[str], None]

    def run(self, parts: Parts, numbers: Sequence[int], on_done: Callable[[int], None]) -> PodUsage | None:
        """Run the parts ``numbers``, like `Executor.run`. A Job that an earlier attempt left behind
        is adopted if it is still running. A pod whose part already has a result ends at once."""
        if not numbers:
            return None
        require_shared(parts.store.uri, "the parts")
        cluster = Cluster.of()
        template = cluster.get("PodTemplate", TEMPLATE)
        if template is None:
            raise SettingsError(
                f"The PodTemplate {TEMPLATE} does not exist in the namespace {cluster.namespace}; apply "
                "deploy/components/many-machines."
            )
        manifest = indexed_job(parts, self.nodes, template)
        with job.owned(cluster, manifest, _has_ended, POLL_S) as name:
            self.report(f"Job {name}: {len(numbers)} of {parts.plan.parts} parts on up to {self.nodes} nodes")
            status = self._follow(cluster, name, parts, frozenset(numbers), on_done)
        return _usage(manifest, status)

    def _follow(
        self, cluster: Cluster, name: str, parts: Parts, numbers: frozenset[int], on_done: Callable[[int], None]
    ) -> Tree:
        """Wait until the Job is complete, and return its status."""
        done, state, ready_s = 0, "", time.monotonic()
        for resource in job.follow(
            cluster,
            "Job",
            name,
            self.report,
            has_started=_has_pods,
            poll_s=POLL_S,
            timeout_s=TIMEOUT_S,
            fails=ClusterError,
            remedy=f"Correct the PodTemplate {TEMPLATE} or its quota, and run again.",
        ):
            status = resource.get("status", {})
            completed = len(numbers & indexes(status.get("completedIndexes", "")))
            if completed > done:
                on_done(completed - done)
                done = completed
            if job.condition(resource, "Complete"):
                return status
            if failed := job.condition(resource, "FailureTarget") or job.condition(resource, "Failed"):
                raise ClusterError(_cause(cluster, resource, failed, parts))
            current = _state(status)
            if status.get("ready") or not status.get("active"):
                ready_s = time.monotonic()
            elif time.monotonic() - ready_s > job.CREATION_TIMEOUT_S:
                current = "; ".join([current, *job.newest_warnings(cluster, resource)])
            if current != state:
                self.report(current)
                state = current
        raise AssertionError("job.follow ends with an error")


def require_shared(uri: str, what: str) -> None:
    """Check that other nodes can read ``what`` at ``uri``."""
    if not uri.startswith("s3://"):
        raise SettingsError(f"Other nodes cannot reach {what}, {uri}; use s3://bucket/prefix, or one node.")


def indexed_job(parts: Parts, nodes: int, template: Tree) -> Tree:
    """The manifest of the Job that runs ``parts``, with pods from the PodTemplate ``template``. The
    Job's name contains the kind of the parts and a hash of their plan, so that concurrent steps do
    not adopt each other's Jobs."""
    if parts.plan.parts > MAX_PARTS:
        raise SettingsError(f"{parts.plan.parts:,} parts are more than {MAX_PARTS:,}; choose larger parts.")
    pod = deepcopy(template["template"])
    container = next((item for item in pod["spec"]["containers"] if item["name"] == CONTAINER), None)
    if container is None:
        raise SettingsError(f"The PodTemplate {TEMPLATE} has no container {CONTAINER!r}; add one.")
    container["image"] = job.image_of_nodes()
    # The API server stores Always with the PodTemplate if its placeholder image has no tag. Without
    # the field, it chooses the policy that suits the actual image.
    if container.get("imagePullPolicy") == "Always":
        del container["imagePullPolicy"]
    container["command"] = ["python", "-m", "evernear.kubeflow.part"]
    container["args"] = [parts.store.uri, parts.folder]
    pod["spec"]["restartPolicy"] = "Never"
    digest = sha256_bytes(f"{parts.store.uri} {parts.folder} {parts.plan.id}".encode())
    labels = {"app.kubernetes.io/name": "evernear", "app.kubernetes.io/component": parts.plan.kind}
    if queue := (template["metadata"].get("labels") or {}).get(QUEUE_LABEL):
        labels[QUEUE_LABEL] = queue
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"evernear-{parts.plan.kind}-{digest[:16]}", "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": parts.plan.parts,
            "parallelism": min(nodes, parts.plan.parts),
            "backoffLimitPerIndex": RETRIES,
            "maxFailedIndexes": 0,  # the first part that failed permanently ends the step
            "podFailurePolicy": {
                "rules": [
                    # A drained or lost node does not count as a failure of its part.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailIndex",
                        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [FINAL_EXIT_CODE]},
                    },
                ]
            },
            "activeDeadlineSeconds": TIMEOUT_S,
            "ttlSecondsAfterFinished": KEEP_FINISHED_S,
            "template": pod,
        },
    }


def indexes(text: str) -> frozenset[int]:
    """Parse the numbers in the ``completedIndexes`` of a Job, such as ``0-3,7``."""
    numbers: set[int] = set()
    for interval in filter(None, text.split(",")):
        first, _, last = interval.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _usage(manifest: Tree, status: Tree) -> PodUsage:
    """The pods of a completed Job, and the limits of each pod."""
    containers = manifest["spec"]["template"]["spec"]["containers"]
    limits: list[Tree] = [container.get("resources", {}).get("limits", {}) for container in containers]

    def total(resource: str) -> float | None:
        quantities = [limit.get(resource) for limit in limits]
        return float(sum(map(parse_quantity, quantities))) if all(quantities) else None

    nodes, retries = manifest["spec"]["parallelism"], status.get("failed") or 0
    return PodUsage(nodes=nodes, retries=retries, cpus=total("cpu"), memory_bytes=total("memory"))


def _has_ended(resource: Tree) -> bool:
    """Whether the Job starts no more pods. A failed or deleted Job still exists until its pods have
    terminated."""
    ended = any(job.condition(resource, kind) for kind in ("Complete", "FailureTarget", "Failed"))
    return ended or "deletionTimestamp" in resource["metadata"]


def _has_pods(resource: Tree) -> bool:
    """Whether the Job has or had pods, or is suspended, for example by a queue."""
    status = resource.get("status", {})
    suspended = job.condition(resource, "Suspended") is not None
    return suspended or any(status.get(count) for count in ("active", "succeeded", "failed"))


def _state(status: Tree) -> str:
    """The number of pods per state, in words. ``failed`` counts pods that were or will be
    retried."""
    state = f"{status.get('ready') or 0} nodes run"
    return f"{state}, {status['failed']} pods failed" if status.get("failed") else state


def _cause(cluster: Cluster, resource: Tree, failed: Tree, parts: Parts) -> str:
    """A sentence about the part that failed permanently, or Kubernetes' reason."""
    if failure := parts.failure():
        return failure.message
    name = resource["metadata"]["name"]
    reason = f"The Job {name} failed: {failed['reason']}: {failed.get('message', '').rstrip('.')}."
    if failed["reason"] in ("MaxFailedIndexesExceeded", "FailedIndexes"):
        return f"{reason} If a pod ran out of memory, raise its limit in the PodTemplate {TEMPLATE}."
    if failed["reason"] == "DeadlineExceeded":
        warnings = "".join(f" {warning}." for warning in job.newest_warnings(cluster, resource))
        return f"{reason}{warnings} Correct the PodTemplate {TEMPLATE} if needed, and run again; finished parts stay."
    return reason
