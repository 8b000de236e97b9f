"""Run the parts of a step on several nodes with a Kubernetes Indexed Job, whose index is the number
of the worker.

The pods come from a PodTemplate (``deploy/components/many-machines``), which a cluster's owner
patches. This module adds the image and command. Parts and results pass through the store, so this
process needs no access to pods.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from evernear.common.disk import sha256_bytes
from evernear.common.parts import FINAL_EXIT_CODE, OnParts, Parts, PartsRecord
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
"""``backoffLimitPerIndex``: retries of a worker that failed, lost nodes apart. An error that would
only occur again is not retried at all."""
CONTAINER = "part"
"""The container of the PodTemplate that runs the parts."""
KEEP_FINISHED_S = 3600
"""Seconds after which Kubernetes deletes a finished Job whose step was killed."""


def run_on_nodes(parts: Parts, nodes: int, report: Callable[[str], None], on_parts: OnParts) -> PartsRecord | None:
    """Run every part without a result in at most ``nodes`` pods. A Job that an earlier attempt left
    behind is adopted if it is still running. Returns how the parts ran, or None if all had
    results."""
    missing, total = len(parts.missing()), parts.plan.parts
    on_parts(total - missing, total)
    if not missing:
        return None
    require_shared(parts.store.uri, "the parts")
    parts.save_failure("")
    cluster = Cluster.of()
    template = cluster.get("PodTemplate", TEMPLATE)
    if template is None:
        raise SettingsError(
            f"The PodTemplate {TEMPLATE} does not exist in the namespace {cluster.namespace}; apply "
            "deploy/components/many-machines."
        )
    manifest = indexed_job(parts, nodes, template)
    with job.owned(cluster, manifest, _has_ended, POLL_S) as name:
        report(f"Job {name}: {missing} of {total} parts on up to {nodes} nodes")
        status = _follow(cluster, name, parts, report, on_parts)
    return _record(manifest, status, parts)


def _follow(cluster: Cluster, name: str, parts: Parts, report: Callable[[str], None], on_parts: OnParts) -> Tree:
    """Wait until the Job is complete, and return its status."""
    missing, state, ready_s = len(parts.missing()), "", time.monotonic()
    for resource in job.follow(
        cluster,
        "Job",
        name,
        report,
        has_started=_has_pods,
        poll_s=POLL_S,
        timeout_s=TIMEOUT_S,
        fails=ClusterError,
        remedy=f"Correct the PodTemplate {TEMPLATE} or its quota, and run again.",
    ):
        status = resource.get("status", {})
        if (current := len(parts.missing())) < missing:
            missing = current
            on_parts(parts.plan.parts - missing, parts.plan.parts)
        if job.condition(resource, "Complete"):
            return status
        if failed := job.condition(resource, "FailureTarget") or job.condition(resource, "Failed"):
            raise ClusterError(_cause(cluster, resource, failed, parts))
        words = _state(status)
        if status.get("ready") or not status.get("active"):
            ready_s = time.monotonic()
        elif time.monotonic() - ready_s > job.CREATION_TIMEOUT_S:
            words = "; ".join([words, *job.newest_warnings(cluster, resource)])
        if words != state:
            report(words)
            state = words
    raise AssertionError("job.follow ends with an error")


def require_shared(uri: str, what: str) -> None:
    """Check that other nodes can read ``what`` at ``uri``."""
    if not uri.startswith("s3://"):
        raise SettingsError(f"Other nodes cannot reach {what}, {uri}; use s3://bucket/prefix, or one node.")


def indexed_job(parts: Parts, nodes: int, template: Tree) -> Tree:
    """The manifest of the Job that runs ``parts``, with pods from the PodTemplate ``template``. The
    Job's name contains the kind of the parts and a hash of their list, so that concurrent steps do
    not adopt each other's Jobs."""
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
    workers = min(nodes, parts.plan.parts)
    container["args"] = [parts.store.uri, parts.folder, str(workers)]
    pod["spec"]["restartPolicy"] = "Never"
    digest = sha256_bytes(f"{parts.store.uri} {parts.folder} {parts.plan.sha256}".encode())
    labels = {"app.kubernetes.io/name": "evernear", "app.kubernetes.io/component": parts.plan.kind}
    if queue := (template["metadata"].get("labels") or {}).get(QUEUE_LABEL):
        labels[QUEUE_LABEL] = queue
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"evernear-{parts.plan.kind}-{digest[:16]}", "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": workers,
            "parallelism": workers,
            "backoffLimitPerIndex": RETRIES,
            "maxFailedIndexes": 0,  # the first worker that failed permanently ends the step
            "podFailurePolicy": {
                "rules": [
                    # A drained or lost node does not count as a failure of its worker.
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


def _record(manifest: Tree, status: Tree, parts: Parts) -> PartsRecord:
    """How a completed Job ran ``parts``, with the limits of each pod."""
    containers = manifest["spec"]["template"]["spec"]["containers"]
    limits: list[Tree] = [container.get("resources", {}).get("limits", {}) for container in containers]

    def total(resource: str) -> float | None:
        quantities = [limit.get(resource) for limit in limits]
        return float(sum(map(parse_quantity, quantities))) if all(quantities) else None

    return PartsRecord(
        nodes=manifest["spec"]["parallelism"],
        parts=parts.plan.parts,
        retries=status.get("failed") or 0,
        cpus=total("cpu"),
        memory_bytes=total("memory"),
        parts_s=sum(result.time_s for result in parts.results()),
        elapsed_s=(datetime.now(UTC) - parts.plan.planned).total_seconds(),
    )


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
        return failure
    name = resource["metadata"]["name"]
    reason = f"The Job {name} failed: {failed['reason']}: {failed.get('message', '').rstrip('.')}."
    if failed["reason"] in ("MaxFailedIndexesExceeded", "FailedIndexes"):
        return (
            f"{reason} If a pod ran out of memory, raise its limit in the PodTemplate {TEMPLATE}. If it cannot read "
            "the store, correct the Secrets that the PodTemplate names."
        )
    if failed["reason"] == "DeadlineExceeded":
        warnings = "".join(f" {warning}." for warning in job.newest_warnings(cluster, resource))
        return f"{reason}{warnings} Correct the PodTemplate {TEMPLATE} if needed, and run again; finished parts stay."
    return reason
