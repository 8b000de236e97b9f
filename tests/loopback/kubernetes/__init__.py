"""A Kubernetes API server on loopback, for tests with the real ``kubernetes`` client.

It holds objects, checks them against the published schemas (as ``fieldValidation=Strict``), keeps ``managedFields``
with real conflicts, streams watches, rolls Deployments out and asks Roles who may do what. It is a subset of a real
server: what works here works there; nothing is provided that a real one does not have.

::

    from loopback.kubernetes import CrashLoop, Ready, LoopbackCluster, carries, too_many_requests
    from loopback.kubernetes.fixtures import cluster as cluster          # in a conftest.py

    def test_a_rollout_that_crashes(cluster: LoopbackCluster) -> None:
        client = kubernetes.config.new_client_from_config(str(cluster.kubeconfig()))
        # or, with just the Roles that are bound to it: cluster.kubeconfig("evernear/deployer", namespace="evernear")
        cluster.pods_do(Ready(serves={8080: ("127.0.0.1", port)}), carries("app.kubernetes.io/version", "1"))
        cluster.pods_do(CrashLoop(log="no such file"), carries("app.kubernetes.io/version", "2"))
        cluster.fail(too_many_requests(retry_after_s=0), lambda call: call.verb == "patch", times=2)

Behaviours of pods: Ready, NotReady, CrashLoop (also of an init container), ImageMissing, Unschedulable, Stuck. A pod
also waits, as on a real node, for the ConfigMaps, Secrets and claims that it mounts.

Faults: ``cluster.fail(error, when, times=, after=)``, ``drop``, ``drop_watches``, ``expire``; ``cluster.calls`` has
every request. ``when`` sees a `Call`: verb, kind, namespace, name, subresource, query, user.

Facts of real servers that it holds to, and that surprise:

- The service proxy, ``/api/v1/namespaces/NS/services/NAME:PORT/proxy/PATH``, takes the ``Authorization`` header for
  itself: an inference token never reaches the pod this way. RBAC wants ``services/proxy`` with the HTTP method's verb
  (GET: get, POST: create), and a ``resourceNames`` entry must read ``NAME:PORT``, just as in the path.
- Applying an object that is not there needs ``create`` beside ``patch``; by apply, ``resourceNames`` bounds both.
  A POST has no name yet, so there ``create`` cannot be bound. A list or watch has the name of its field selector
  ``metadata.name=NAME``.
- A misspelt field is 400 on POST and PUT but 500 without a reason on apply.
- A Deployment's ``metadata.generation`` moves with its annotations too, so with every revision.
- Writes that change nothing leave resourceVersion as it is. ``Lease`` and ``PodDisruptionBudget`` are not replaced
  without a resourceVersion.
- A watch from a forgotten resourceVersion is answered 200 and then one ``ERROR`` event with a ``Status`` of 410.
- Pods that a namespace with ``pod-security.kubernetes.io/enforce: restricted`` refuses never appear: the ReplicaSet
  says so in an event and in the Deployment's condition ``ReplicaFailure``.
"""

from loopback.kubernetes.calls import Call
from loopback.kubernetes.cluster import (
    NEWEST,
    OLDEST,
    LoopbackCluster,
    carries,
    internal_error,
    modified,
    too_many_requests,
)
from loopback.kubernetes.status import ApiError
from loopback.kubernetes.stories import Behaviour, CrashLoop, ImageMissing, NotReady, Ready, Stuck, Unschedulable

__all__ = [
    "NEWEST",
    "OLDEST",
    "ApiError",
    "Behaviour",
    "Call",
    "CrashLoop",
    "ImageMissing",
    "LoopbackCluster",
    "NotReady",
    "Ready",
    "Stuck",
    "Unschedulable",
    "carries",
    "internal_error",
    "modified",
    "too_many_requests",
]
