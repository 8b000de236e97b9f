"""A lease, in a store and in a cluster, has one holder, and expires if its holder is killed at any
moment."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Literal

import pytest

from evernear.common.lease import Held, Lease, LeaseRecord, StoreRecord
from evernear.common.store import Store
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.lease import KubernetesRecord
from evernear.errors import BusyError, ClusterError, ConflictError, EvernearError
from evernear.release.promotions import whoami
from tests.loopback.kubernetes import LoopbackCluster, internal_error
from tests.real.deployment.kubernetes.deployer import MakeSettings

NAME = "evernear-serving"
RENEWED_S = 3
"""A lease that is renewed in time on a loaded machine, too."""
MakeRecord = Callable[[int], LeaseRecord]


@pytest.fixture
def cluster(loopback: LoopbackCluster, make_settings: MakeSettings) -> Cluster:
    return Cluster.of(make_settings().kubernetes.namespace)


@pytest.fixture(params=["store", "cluster"])
def make_record(request: pytest.FixtureRequest) -> MakeRecord:
    if request.param == "store":
        store: Store = request.getfixturevalue("store")
        return lambda duration_s: StoreRecord(store, "`evernear store prune`", duration_s)
    cluster: Cluster = request.getfixturevalue("cluster")
    return lambda duration_s: KubernetesRecord(cluster, NAME, duration_s)


def holder(record: LeaseRecord) -> str:
    held = record.read()
    assert held is not None
    return held.holder


class Killed(SystemExit):
    pass


class Mortal:
    """The record of a process that is killed before or after one of its writes: the first acquires
    the lease, later ones renew it, and the last one, which has no holder, releases it."""

    def __init__(self, record: LeaseRecord, when: Literal["before", "after"], write: int | Literal["release"]) -> None:
        self._record, self._when, self._write = record, when, write
        self.identity, self.pace, self.busy, self.lost = record.identity, record.pace, record.busy, record.lost
        self._writes = 0
        self.last_write_s = 0.0
        self.killed = threading.Event()

    def read(self) -> Held | None:
        self._live()
        return self._record.read()

    def write(self, holder: str, held: Held | None) -> Held:
        self._live()
        self._writes += 1
        is_last = self._write == (self._writes if holder else "release")
        if is_last and self._when == "before":
            self._die()
        written = self._record.write(holder, held)
        self.last_write_s = time.monotonic()
        if is_last:
            self._die()
        return written

    def _live(self) -> None:
        if self.killed.is_set():
            raise Killed

    def _die(self) -> None:
        self.killed.set()
        raise Killed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread is killed, too
@pytest.mark.parametrize(
    ("when", "write", "is_held"),
    [
        ("before", 1, False),
        ("after", 1, True),
        ("before", 2, True),
        ("after", 2, True),
        ("before", "release", True),
        ("after", "release", False),
    ],
)
def test_killed_process_blocks_others_no_longer_than_the_lease_lasts(
    make_record: MakeRecord, when: Literal["before", "after"], write: int | Literal["release"], is_held: bool
) -> None:
    killed = Mortal(make_record(1), when, write)
    with suppress(Killed), Lease(killed):
        assert write == "release" or killed.killed.wait(60)
    assert killed.killed.is_set()
    with Lease(make_record(1)) as lease:
        assert (time.monotonic() - killed.last_write_s > 1) or not is_held
        lease.require()
        assert holder(make_record(1)) not in ("", killed.identity)
    assert holder(make_record(1)) == ""


def test_process_that_was_suspended_detects_that_it_was_replaced(make_record: MakeRecord) -> None:
    suspended = Lease(make_record(1))
    suspended.__enter__()
    suspended._released.set()  # no longer renewed
    suspended._thread.join()
    record = make_record(1)
    with Lease(record) as lease:
        lease.require()
        with pytest.raises((BusyError, ConflictError), match=r"stopped; run again|holds it now"):
            suspended.require()
        suspended.__exit__()  # has no effect
        assert holder(record) == record.identity


def test_process_that_nobody_replaced_renews_before_it_goes_on(make_record: MakeRecord) -> None:
    with Lease(make_record(RENEWED_S)) as lease:
        lease._renewed_s -= 100
        lease.require()
        assert time.monotonic() - lease._renewed_s < 60


def test_one_of_many_concurrent_processes_acquires_the_lease(make_record: MakeRecord) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(6) as pool:

        def take(_: int) -> bool:
            try:
                stack.enter_context(Lease(make_record(RENEWED_S)))
            except BusyError:
                return False
            return True

        assert sorted(pool.map(take, range(6))) == [False] * 5 + [True]


def test_second_process_fails_while_the_lease_is_renewed(make_record: MakeRecord) -> None:
    with Lease(make_record(RENEWED_S)) as first:
        with pytest.raises(BusyError, match="wait"), Lease(make_record(RENEWED_S)):
            pass
        time.sleep(1.5 * RENEWED_S)  # longer than the lease lasts without renewal
        first.require()
        with pytest.raises(BusyError, match="wait"), Lease(make_record(RENEWED_S)):
            pass
    started_s = time.monotonic()
    with Lease(make_record(60)):
        assert time.monotonic() - started_s < 60, "the lease was not released"
    with first:  # again
        first.require()


def test_replaced_holder_changes_nothing_more(make_record: MakeRecord) -> None:
    other = make_record(1)
    with Lease(make_record(1)) as lease:
        while True:
            with suppress(ConflictError):  # a renewal was first
                other.write(other.identity, other.read())
                break
        lease._thread.join(timeout=10)
        with pytest.raises(EvernearError, match=r"stopped; run again|holds it now"):
            lease.require()
    assert holder(other) == other.identity


class Lossy:
    """A record whose writes arrive, but whose first responses are lost."""

    def __init__(self, record: LeaseRecord, lost: int) -> None:
        self._record, self._lost = record, lost
        self.identity, self.pace, self.busy, self.lost = record.identity, record.pace, record.busy, record.lost
        self.read = record.read

    def write(self, holder: str, held: Held | None) -> Held:
        written = self._record.write(holder, held)
        self._lost -= 1
        if self._lost >= 0:
            raise ConflictError("changed by the first attempt of this very request")
        return written


def test_lost_response_does_not_lose_the_lease(make_record: MakeRecord) -> None:
    lossy = Lossy(make_record(RENEWED_S), lost=2)
    with Lease(lossy) as lease:
        lease._renewed_s -= 100  # `require` renews at once
        lease.require()
        assert holder(lossy) == lossy.identity
    assert holder(lossy) == ""


def test_second_deployment_is_told_the_holder_and_the_start(cluster: Cluster) -> None:
    sentence = (
        rf"to namespace evernear is in progress, by {whoami()} \w{{8}} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    )
    with (
        Lease(KubernetesRecord(cluster, NAME, RENEWED_S)),
        pytest.raises(BusyError, match=sentence),
        Lease(KubernetesRecord(cluster, NAME, RENEWED_S)),
    ):
        pass
    lease = cluster.get("Lease", NAME)
    assert lease is not None
    assert lease["spec"].keys() == {
        "holderIdentity", "leaseDurationSeconds", "acquireTime", "renewTime", "leaseTransitions"
    }  # fmt: skip


@pytest.mark.slow
def test_lease_survives_lost_responses_and_short_outages(
    loopback: LoopbackCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evernear.deployment.kubernetes.cluster.BACKOFF_S", 0.05)
    record = KubernetesRecord(cluster, NAME, 2)
    loopback.drop(lambda call: call.verb == "create", after=True)
    with Lease(record) as lease:
        loopback.drop(lambda call: call.verb == "update", after=True)
        time.sleep(1)
        lease.require()
        loopback.fail(internal_error(), lambda call: call.verb == "update", times=6)
        time.sleep(2.5)
        lease.require()
        assert holder(record) == record.identity
    assert holder(record) == ""


@pytest.mark.slow
def test_overdue_renewal_that_fails_stops_the_deployment(
    loopback: LoopbackCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evernear.deployment.kubernetes.cluster.BACKOFF_S", 0.01)
    with Lease(KubernetesRecord(cluster, NAME, RENEWED_S)) as lease:
        loopback.fail(internal_error(), lambda call: call.verb == "update", times=100)
        lease._renewed_s -= 100
        with pytest.raises(ClusterError):
            lease.require()
