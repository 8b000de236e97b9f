"""Of deployments at once, one goes on; a dead one stands in nobody's way for long."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from conftest import MakeSettings
from loopback.kubernetes import LoopbackCluster, internal_error

from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.lease import LeaseLock
from evernear.errors import BusyError
from evernear.release.registry import whoami

NAME = "evernear-serving"


@pytest.fixture
def cluster(loopback: LoopbackCluster, make_settings: MakeSettings) -> Cluster:
    return Cluster.of(make_settings().kubernetes)


def holder(cluster: Cluster) -> str:
    found = cluster.get("Lease", NAME)
    assert found is not None
    return found["spec"]["holderIdentity"]


def die(lease: LeaseLock) -> None:
    """As after SIGKILL: nobody renews it any longer, and nobody releases it."""
    lease._released.set()
    lease._thread.join()


def test_the_second_is_told_who_holds_it_and_since_when(cluster: Cluster) -> None:
    with LeaseLock(cluster, NAME, 1) as first:
        sentence = (
            rf"into namespace evernear is under way, by {whoami()} \w{{8}} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        )
        with pytest.raises(BusyError, match=sentence), LeaseLock(cluster, NAME, 1):
            pass
        time.sleep(2)  # longer than it lasts unrenewed
        first.require()
        with pytest.raises(BusyError), LeaseLock(cluster, NAME, 1):
            pass
    started_s = time.monotonic()
    with LeaseLock(cluster, NAME, 60):
        assert time.monotonic() - started_s < 5, "it was released"


def test_of_many_at_once_one_gets_it(cluster: Cluster) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(6) as pool:

        def take(_: int) -> bool:
            try:
                stack.enter_context(LeaseLock(cluster, NAME, 1))
            except BusyError:
                return False
            return True

        assert sorted(pool.map(take, range(6))) == [False] * 5 + [True]


def test_the_lease_of_a_dead_one_is_taken_when_it_ran_out(cluster: Cluster) -> None:
    dead = LeaseLock(cluster, NAME, 1)
    dead.acquire()
    die(dead)
    started_s = time.monotonic()
    with LeaseLock(cluster, NAME, 1) as lease:
        assert time.monotonic() - started_s > 1
        lease.require()
        with pytest.raises(BusyError, match="could not be renewed in time"):
            dead.require()
        dead.release()  # which changes nothing
        assert holder(cluster) == lease._identity


def test_a_holder_that_was_replaced_changes_nothing_more(cluster: Cluster) -> None:
    with LeaseLock(cluster, NAME, 1) as lease:
        found = cluster.get("Lease", NAME)
        assert found is not None
        cluster.replace(found | {"spec": {**found["spec"], "holderIdentity": "somebody else"}})
        lease._thread.join(timeout=10)
        with pytest.raises(BusyError, match="somebody else holds it now"):
            lease.require()
    assert holder(cluster) == "somebody else"


def test_lost_answers_and_short_outages_are_lived_with(
    loopback: LoopbackCluster, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evernear.deployment.kubernetes.cluster.BACKOFF_S", 0.05)
    cluster = Cluster.of(make_settings().kubernetes)
    loopback.drop(lambda call: call.verb == "create", after=True)
    with LeaseLock(cluster, NAME, 2) as lease:
        loopback.drop(lambda call: call.verb == "update", after=True)
        time.sleep(1)
        lease.require()
        loopback.fail(internal_error(), lambda call: call.verb == "update", times=6)
        time.sleep(2.5)
        lease.require()
        assert holder(cluster) == lease._identity
    assert holder(cluster) == ""
