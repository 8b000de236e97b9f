"""A Lease that limits a namespace to one deployment at a time.

The holder renews it. A process that observes the Lease for its whole duration without a renewal may
take it over. As in client-go's leader election, the clocks of two machines are never compared. A
holder that was disconnected detects at its next renewal that it was replaced, and changes nothing
more. Its earlier requests do no lasting harm, because compare-and-swap moves the champion pointer.
"""

import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from typing import Self

from evernear.deployment.kubernetes.cluster import COMMON_LABELS, Cluster, Tree
from evernear.errors import BusyError, ClusterError
from evernear.release.promotions import whoami

LEASE_S = 30
"""leaseDurationSeconds: a killed deployment blocks the next one for this time, and a holder that
loses its network for less keeps the Lease."""
OBSERVATIONS = 10  # number of reads of another holder's Lease during its duration


class LeaseLock:
    """A Lease that is held and renewed from `acquire` to `release`. It is a context manager."""

    def __init__(self, cluster: Cluster, name: str, duration_s: int) -> None:
        self._cluster = cluster
        self._name = name
        self._duration_s = duration_s
        self._identity = f"{whoami()} {uuid.uuid4().hex[:8]}"
        self._lost: str | None = None
        self._released = threading.Event()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the Lease and renew it in the background, or raise a `BusyError` with its holder."""
        self._manifest = self._take_when_free()
        self._renewed_s = time.monotonic()
        self._thread = threading.Thread(target=self._renew_periodically, name="lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Check that the Lease is still held.

        Raises:
            BusyError: it was lost to a different deployment, or its renewal failed.
        """
        if self._lost is None and time.monotonic() - self._renewed_s > self._duration_s:
            self._lost = "it could not be renewed in time"
        if self._lost is not None:
            raise BusyError(f"This deployment lost the Lease {self._name} ({self._lost}), so it changes nothing more.")

    def release(self) -> None:
        """The next deployment then does not have to wait until the Lease expires."""
        self._released.set()
        self._thread.join()
        if self._lost is None:
            with suppress(ClusterError):  # the Lease expires without a release
                self._cluster.replace(self._manifest | {"spec": {**self._manifest["spec"], "holderIdentity": ""}})

    def _take_when_free(self) -> Tree:
        observed: Tree | None = None
        observed_s = time.monotonic()
        while True:
            lease = self._cluster.get("Lease", self._name)
            spec: Tree = (lease or {}).get("spec") or {}
            holder = spec.get("holderIdentity")
            duration_s = spec.get("leaseDurationSeconds", self._duration_s)
            expired = observed == spec and time.monotonic() - observed_s > duration_s
            if lease is None or not holder or expired:
                try:
                    return self._take(lease)
                except ClusterError as error:
                    if error.status != 409:
                        raise
                continue  # a different process took it first
            if holder == self._identity:  # an earlier attempt succeeded, but its response was lost
                return lease
            if observed is None:
                observed, observed_s = spec, time.monotonic()
            elif spec != observed:
                since = str(spec.get("acquireTime"))[:19].replace("T", " ")
                raise BusyError(
                    f"Another deployment to namespace {self._cluster.namespace} is in progress, by {holder} since "
                    f"{since} UTC; wait for it and try again."
                )
            time.sleep(self._duration_s / OBSERVATIONS)

    def _take(self, lease: Tree | None) -> Tree:
        now = _micro_time()
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration_s,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": (lease.get("spec") or {}).get("leaseTransitions", 0) + 1 if lease else 0,
        }
        if lease is not None:
            return self._cluster.replace(lease | {"spec": spec})
        metadata = {"name": self._name, "namespace": self._cluster.namespace, "labels": COMMON_LABELS}
        manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        return self._cluster.create(manifest)

    def _renew_periodically(self) -> None:
        while self._lost is None and not self._released.wait(self._duration_s / 3):
            with suppress(ClusterError):  # the next renewal follows, and `require` enforces the time limit
                self._renew()

    def _renew(self) -> None:
        started_s = time.monotonic()
        spec = {**self._manifest["spec"], "renewTime": _micro_time()}
        try:
            self._manifest = self._cluster.replace(self._manifest | {"spec": spec})
        except ClusterError as error:
            if error.status != 409:
                raise
            # Taken over, or an earlier renewal succeeded but its response was lost.
            lease = self._cluster.get("Lease", self._name)
            holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
            if lease is None or holder != self._identity:
                self._lost = f"{holder or 'no one'} holds it now"
                return
            self._manifest = lease
        self._renewed_s = started_s


def _micro_time() -> str:
    """The current time as a Kubernetes MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
