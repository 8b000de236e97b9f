"""One deployment into a namespace at a time: who holds the Lease deploys, the others are told who does.

A holder renews. One that was killed does not, and its Lease may be taken as soon as somebody has watched it, unrenewed,
for as long as it says that it lasts: nobody's clock is compared with another's, as in client-go's leader election. A
holder that was cut off finds on its next renewal that it was replaced, and changes nothing more. What it may have sent
meanwhile does no harm in the end: the champion's pointer moves by compare-and-swap.
"""

import threading
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from evernear.deployment.kubernetes.cluster import Cluster, ObjectConflict, Tree
from evernear.errors import BusyError, ClusterError
from evernear.release.registry import whoami

LOOKS = 10  # at a Lease that somebody else holds, until it is taken for dead


class Held:
    """A Lease that this process holds, while it is renewed."""

    def __init__(self, cluster: Cluster, name: str, duration_s: int) -> None:
        self._cluster = cluster
        self._name = name
        self._duration_s = duration_s
        self._identity = f"{whoami()} {uuid.uuid4().hex[:8]}"
        self._lost: str | None = None
        self._done = threading.Event()
        self._manifest = self._acquire()
        self._renewed_s = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Make sure that it is still held.

        Raises:
            BusyError: it was lost to another deployment, or could not be renewed.
        """
        if self._lost is None and time.monotonic() - self._renewed_s > self._duration_s:
            self._lost = "it could not be renewed in time"
        if self._lost is not None:
            raise BusyError(f"This deployment lost the Lease {self._name} ({self._lost}), so it changes nothing more.")

    def release(self) -> None:
        """Let go of it, so that the next deployment need not wait."""
        self._done.set()
        self._thread.join()
        if self._lost is None:
            with suppress(ClusterError):  # it ends by itself
                self._cluster.replace(self._manifest | {"spec": {**self._manifest["spec"], "holderIdentity": ""}})

    def _acquire(self) -> Tree:
        seen: Tree | None = None
        since_s = time.monotonic()
        while True:
            found = self._cluster.get("Lease", self._name)
            spec: Tree = (found or {}).get("spec") or {}
            holder = spec.get("holderIdentity")
            dead = seen == spec and time.monotonic() - since_s > spec.get("leaseDurationSeconds", self._duration_s)
            if found is None or not holder or dead:
                with suppress(ObjectConflict):
                    return self._take(found)
                continue  # somebody else was quicker
            if holder == self._identity:  # taken a moment ago, and the answer was lost
                return found
            if seen is None:
                seen, since_s = spec, time.monotonic()
            elif spec != seen:
                since = str(spec.get("acquireTime"))[:19].replace("T", " ")
                raise BusyError(
                    f"Another deployment into namespace {self._cluster.namespace} is under way, by {holder} since "
                    f"{since} UTC; wait for it and try again."
                )
            time.sleep(self._duration_s / LOOKS)

    def _take(self, found: Tree | None) -> Tree:
        before: Tree = (found or {}).get("spec") or {}
        now = _now()
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration_s,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (1 if found else 0),
        }
        if found is not None:
            return self._cluster.replace(found | {"spec": spec})
        metadata = {
            "name": self._name,
            "namespace": self._cluster.namespace,
            "labels": {"app.kubernetes.io/part-of": "evernear", "app.kubernetes.io/managed-by": "evernear"},
        }
        manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        return self._cluster.create(manifest)

    def _keep(self) -> None:
        while self._lost is None and not self._done.wait(self._duration_s / 3):
            with suppress(ClusterError):  # tried again; `require` knows for how long
                self._renew()

    def _renew(self) -> None:
        started_s = time.monotonic()
        spec = {**self._manifest["spec"], "renewTime": _now()}
        try:
            self._manifest = self._cluster.replace(self._manifest | {"spec": spec})
        except ObjectConflict:  # replaced; or it was we, and the answer was lost
            found = self._cluster.get("Lease", self._name)
            holder = ((found or {}).get("spec") or {}).get("holderIdentity")
            if found is None or holder != self._identity:
                self._lost = f"{holder or 'nobody'} holds it now"
                return
            self._manifest = found
        self._renewed_s = started_s


@contextmanager
def held(cluster: Cluster, name: str, duration_s: int) -> Generator[Held]:
    """Hold the Lease ``name`` for the body, as the only one.

    Raises:
        BusyError: another deployment holds it; the sentence says who and since when.
        ClusterError: it cannot be read or written.
    """
    lease = Held(cluster, name, duration_s)
    try:
        yield lease
    finally:
        lease.release()


def _now() -> str:
    """A Kubernetes MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
