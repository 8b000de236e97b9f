"""A Kubernetes API server on loopback, for tests with the real ``kubernetes`` client.

The server stores objects, validates them against the published schemas (like
``fieldValidation=Strict``), tracks who owns their fields, reports apply conflicts, streams watches,
rolls out Deployments and enforces RBAC. It implements a subset of a real API server and adds
nothing to it.

Pod behaviors: Ready, NotReady, CrashLoop (also of an init container), ImageMissing,
Unschedulable, Stuck. As on a real node, a pod also waits for the ConfigMaps, Secrets
and claims that it mounts.

Faults: ``cluster.fail(error, when, times=, after=)``, ``drop``, ``drop_watches``,
``expire``. ``cluster.calls`` records every request. ``when`` receives a `Call`: verb,
kind, namespace, name, subresource, query, user.

Less obvious behavior of real servers that it reproduces:

- The service proxy consumes the ``Authorization`` header, so an inference token never reaches the
  pod. A ``resourceNames`` entry of ``services/proxy`` must be ``NAME:PORT``, as in the path.
- Applying a nonexistent object requires ``create`` in addition to ``patch``. A list or watch takes
  its name from the field selector ``metadata.name=NAME``.
- A misspelled field yields 400 on POST and PUT but 500 without a reason on apply.
- A Deployment's ``metadata.generation`` also changes with its annotations.
- Writes that change nothing leave resourceVersion unchanged. Replacing a ``Lease`` requires one.
- A watch from an expired resourceVersion returns 200 and then one ``ERROR`` event with a 410.
"""

from tests.loopback.kubernetes.calls import Call
from tests.loopback.kubernetes.cluster import (
    LoopbackCluster,
    internal_error,
    labeled,
    too_many_requests,
)
from tests.loopback.kubernetes.pod_lifecycle import (
    CrashLoop,
    ImageMissing,
    NotReady,
    PodBehavior,
    Ready,
    Stuck,
    Unschedulable,
)
from tests.loopback.kubernetes.status import ApiError

__all__ = [
    "ApiError",
    "Call",
    "CrashLoop",
    "ImageMissing",
    "LoopbackCluster",
    "NotReady",
    "PodBehavior",
    "Ready",
    "Stuck",
    "Unschedulable",
    "internal_error",
    "labeled",
    "too_many_requests",
]
