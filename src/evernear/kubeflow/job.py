"""Create or adopt a TrainJob or Job, follow it, and delete it at the end and on SIGTERM."""

import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.rollout import event_time
from evernear.errors import ClusterError, EvernearError, SettingsError
from evernear.kubeflow import PLACEHOLDER_IMAGE
from evernear.settings.sources import IMAGE_VARIABLE

Tree = dict[str, Any]

START_GRACE_S = 600
"""Seconds after a job's deadline for the controller to report its end."""
CREATION_TIMEOUT_S = 60
"""Seconds for the controllers to create a job's pods."""
MAX_EVENTS = 3


@contextmanager
def owned(cluster: Cluster, manifest: Tree, is_stale: Callable[[Tree], bool], poll_s: float) -> Generator[str]:
    """Create the object ``manifest``, yield its name, and delete it when the context exits. One
    from an earlier attempt is replaced if ``is_stale``, and adopted otherwise. SIGTERM, which
    Kubeflow Pipelines sends when someone stops the run, raises `SystemExit`."""
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _create(cluster, manifest, is_stale, poll_s)
        yield name
    finally:
        signal.signal(signal.SIGTERM, handler)
        with suppress(ClusterError):  # must not hide an earlier error, and the object has a deadline
            cluster.delete(kind, name)


def _create(cluster: Cluster, manifest: Tree, is_stale: Callable[[Tree], bool], poll_s: float) -> None:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    try:
        cluster.create(manifest)
    except ClusterError as error:
        if error.status != 409:
            raise
        earlier = cluster.get(kind, name)
        if earlier is not None and not is_stale(earlier):
            return
        cluster.delete(kind, name)
        while cluster.get(kind, name) is not None:
            time.sleep(poll_s)
        cluster.create(manifest)


def follow(
    cluster: Cluster,
    kind: str,
    name: str,
    report: Callable[[str], None],
    *,
    has_started: Callable[[Tree], bool],
    poll_s: float,
    timeout_s: float,
    fails: type[EvernearError],
    remedy: str,
) -> Generator[Tree]:
    """Yield the job every ``poll_s`` seconds. The caller leaves the loop when it has ended. Raises
    the error ``fails`` if the job was deleted, ran for ``timeout_s``, or has no pods, which
    ``remedy`` may mend."""
    deadline_s = time.monotonic() + timeout_s + START_GRACE_S
    is_started, waiting_since_s = False, time.monotonic()
    while True:
        try:
            resource = cluster.get(kind, name)
        except ClusterError as error:
            if error.status != 503:
                raise
            report(str(error))
            waiting_since_s = time.monotonic()  # the controllers may not reach the API server either
        else:
            if resource is None:
                raise fails(f"The {kind} {name} was deleted by someone else; run again to continue.")
            yield resource
            is_started = is_started or has_started(resource)
            if not is_started and time.monotonic() - waiting_since_s > CREATION_TIMEOUT_S:
                raise fails(
                    f"The pods of the {kind} {name} were not created within {CREATION_TIMEOUT_S} s: "
                    f"{_reasons_for_no_pods(cluster, resource)}. {remedy}"
                )
        if time.monotonic() > deadline_s:
            raise fails(f"The {kind} {name} has not ended after its deadline; see its events.")
        time.sleep(poll_s)


def condition(resource: Tree, kind: str) -> Tree | None:
    """The condition of type ``kind``, or None if it is not true."""
    conditions: list[Tree] = resource.get("status", {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == kind and item["status"] == "True"), None)


def _reasons_for_no_pods(cluster: Cluster, resource: Tree) -> str:
    """Why a job has no pods, in one line, from its conditions and the newest warnings."""
    conditions: list[Tree] = resource.get("status", {}).get("conditions") or []
    reasons = [f"condition {item['type']}: {_text(item)}" for item in conditions if item["status"] == "True"]
    reasons += newest_warnings(cluster, resource)
    return "; ".join(reasons) or "it has neither a condition nor an event"


def newest_warnings(cluster: Cluster, resource: Tree) -> list[str]:
    """The newest warnings about a job, its Jobs and its pods, one line each."""
    name, created = resource["metadata"]["name"], resource["metadata"]["creationTimestamp"]
    try:
        events = cluster.list("Event", fieldSelector="type=Warning")
    except ClusterError as error:
        return [f"its events cannot be read: {str(error).rstrip('.')}"]
    events = [item for item in events if _is_about(item["involvedObject"].get("name", ""), name)]
    events = [item for item in events if item["metadata"]["creationTimestamp"] >= created]  # no earlier attempt
    texts = dict.fromkeys(map(_text, sorted(events, key=event_time)))  # a warning may repeat
    return [f"event {text}" for text in [*texts][-MAX_EVENTS:]]


def _is_about(subject: str, name: str) -> bool:
    """Whether ``subject`` is the job, its JobSet, or one of its Jobs or pods."""
    return subject == name or subject.startswith(f"{name}-")


def _text(item: Tree) -> str:
    """A condition's or event's reason and message, on one line."""
    return " ".join(f"{item.get('reason')}: {item.get('message', '')}".split()).rstrip(".: ")


def image_of_nodes() -> str:
    """The image of the pipeline that this process is a step of."""
    image = os.environ.get(IMAGE_VARIABLE, PLACEHOLDER_IMAGE)
    if image == PLACEHOLDER_IMAGE:
        raise SettingsError(
            "The image of the nodes is unknown outside of a cluster's pipeline; set the environment variable "
            f"{IMAGE_VARIABLE}=REF@sha256:..."
        )
    return image
