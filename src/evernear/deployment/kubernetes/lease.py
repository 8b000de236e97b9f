"""The Kubernetes Lease that limits a namespace to one deployment at a time.

The earlier requests of a deployment that was replaced do no lasting harm, because compare-and-swap
moves the champion pointer.
"""

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime

from evernear.common.lease import Held, Pace
from evernear.deployment.kubernetes.cluster import COMMON_LABELS, Cluster, Tree
from evernear.errors import BusyError, ClusterError, ConflictError
from evernear.release.promotions import whoami

LEASE_S = 30
"""leaseDurationSeconds: a killed deployment blocks the next one for this time, and a holder that
loses its network for less keeps the Lease."""


class KubernetesRecord:
    """The Lease ``name`` of a namespace."""

    def __init__(self, cluster: Cluster, name: str, duration_s: int) -> None:
        self._cluster, self._name, self._duration_s = cluster, name, duration_s
        self.identity = f"{whoami()} {uuid.uuid4().hex[:8]}"
        self.pace = Pace(renew_s=duration_s / 3, poll_s=duration_s / 10)

    def read(self) -> Held | None:
        lease = self._cluster.get("Lease", self._name)
        return None if lease is None else self._held(lease)

    def write(self, holder: str, held: Held | None) -> Held:
        lease: Tree = held.unchanged if held else self._manifest()
        spec: Tree = (lease.get("spec") or {}) | {"holderIdentity": holder}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # a Kubernetes MicroTime
        if holder:
            spec |= {"renewTime": now, "leaseDurationSeconds": self._duration_s}
        if holder and (held is None or holder != held.holder):
            spec |= {"acquireTime": now, "leaseTransitions": spec.get("leaseTransitions", -1) + 1}
        with _conflicts():
            return self._held((self._cluster.replace if held else self._cluster.create)(lease | {"spec": spec}))

    def busy(self, held: Held) -> BusyError:
        since = str(held.unchanged["spec"].get("acquireTime"))[:19].replace("T", " ")
        return BusyError(
            f"Another deployment to namespace {self._cluster.namespace} is in progress, by {held.holder} since "
            f"{since} UTC; wait for it and try again."
        )

    def lost(self, holder: str) -> BusyError:
        return BusyError(
            f"This deployment lost the Lease {self._name} ({holder or 'no one'} holds it now), so it changes nothing "
            "more."
        )

    def _manifest(self) -> Tree:
        metadata = {"name": self._name, "namespace": self._cluster.namespace, "labels": COMMON_LABELS}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}

    def _held(self, lease: Tree) -> Held:
        spec: Tree = lease.get("spec") or {}
        duration_s = spec.get("leaseDurationSeconds", self._duration_s)
        return Held(spec.get("holderIdentity") or "", spec, duration_s, lease)


@contextmanager
def _conflicts() -> Generator[None]:
    try:
        yield
    except ClusterError as error:
        if error.status == 409:
            raise ConflictError(str(error)) from None
        raise
