"""The Lease admits one deployment at a time, and expires if its holder dies."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.lease import LeaseLock
from evernear.errors import BusyError
from evernear.release.promotions import whoami
from tests.loopback.kubernetes import LoopbackCluster, internal_error
from tests.real.deployment.kubernetes.deployer import MakeSettings

NAME = "evernear-serving"


@pytest.fixture
def cluster(loopback: LoopbackCluster, make_settings: MakeSettings) -> Cluster:
    return Cluster.of(make_settings().kubernetes.namespace)


def holder(cluster: Cluster) -> str:
    lease_object = cluster.get("Lease", NAME)
    assert lease_object is not None
    return lease_object["spec"]["holderIdentity"]


RENEWED_S = 3
"""A Lease that is renewed in time on a loaded machine, too."""


def die(lease: LeaseLock) -> None:
    """Stop renewing the Lease without releasing it, as after SIGKILL."""
    lease._released.set()
    lease._thread.join()


def test_second_deployment_fails_naming_the_holder_and_the_start(cluster: Cluster) -> None:
    with LeaseLock(cluster, NAME, RENEWED_S) as first:
        sentence = (
            rf"to namespace evernear is in progress, by {whoami()} \w{{8}} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        )
        with pytest.raises(BusyError, match=sentence), LeaseLock(cluster, NAME, RENEWED_S):
            pass
        time.sleep(1.5 * RENEWED_S)  # longer than the Lease lasts without renewal
        first.require()
        with pytest.raises(BusyError), LeaseLock(cluster, NAME, RENEWED_S):
            pass
    started_s = time.monotonic()
    with LeaseLock(cluster, NAME, 60):
        assert time.monotonic() - started_s < 60, "the Lease was not released"


def test_one_of_many_concurrent_deployments_acquires_the_lease(cluster: Cluster) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(6) as pool:

        def take(_: int) -> bool:
            try:
                stack.enter_context(LeaseLock(cluster, NAME, RENEWED_S))
            except BusyError:
                return False
            return True

        assert sorted(pool.map(take, range(6))) == [False] * 5 + [True]


def test_expired_lease_of_a_dead_holder_is_taken_over(cluster: Cluster) -> None:
    dead = LeaseLock(cluster, NAME, 1)
    dead.acquire()
    die(dead)
    started_s = time.monotonic()
    with LeaseLock(cluster, NAME, 1) as lease:
        assert time.monotonic() - started_s > 1
        lease.require()
        with pytest.raises(BusyError, match="could not be renewed in time"):
            dead.require()
        dead.release()  # has no effect
        assert holder(cluster) == lease._identity


def test_replaced_holder_does_not_change_the_lease(cluster: Cluster) -> None:
    with LeaseLock(cluster, NAME, 1) as lease:
        lease_object = cluster.get("Lease", NAME)
        assert lease_object is not None
        cluster.replace(lease_object | {"spec": {**lease_object["spec"], "holderIdentity": "somebody else"}})
        lease._thread.join(timeout=10)
        with pytest.raises(BusyError, match="somebody else holds it now"):
            lease.require()
    assert holder(cluster) == "somebody else"


def test_lease_survives_lost_responses_and_short_outages(
    loopback: LoopbackCluster, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evernear.deployment.kubernetes.cluster.BACKOFF_S", 0.05)
    cluster = Cluster.of(make_settings().kubernetes.namespace)
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
