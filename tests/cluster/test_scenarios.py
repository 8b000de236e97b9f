"""Deployments as they go well and badly, on loopback and, marked ``cluster``, on a real cluster."""

import os
from pathlib import Path

import pytest
from kubernetes.client import ApiException, AppsV1Api, CoreV1Api
from releases import MakeRelease, PackedRelease

from cluster.site import MISSING_IMAGE, Site, administrator
from evernear import deployment
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.lease import LeaseLock
from evernear.errors import BusyError, ClusterError
from evernear.release.registry import Registry
from evernear.settings import Settings
from evernear.store import open_store

NAME = "evernear-serving"


def deploy(release: PackedRelease, settings: Settings) -> deployment.Deployment:
    return deployment.deploy(release.archive, release.verdict, settings)


def champion(site: Site) -> str | None:
    found = Registry(open_store(site.store)).champion()
    return found.version if found else None


def serving(site: Site) -> str | None:
    """What a look at the cluster tells."""
    told = deployment.status(site.settings())
    return told["release"] if told["server"] == "up" else told["server"]


def test_a_release_follows_another_and_a_rollback_brings_that_back(site: Site, make_release: MakeRelease) -> None:
    first = make_release()
    deployed = deploy(first, site.settings())
    assert (deployed.version, deployed.previous) == (first.version, None)
    assert deployed.smoke_queries > 0
    assert (champion(site), serving(site)) == (first.version, first.version)
    live = AppsV1Api(site.admin).read_namespaced_deployment(NAME, site.namespace)
    assert live.metadata.labels["app.kubernetes.io/version"] == first.version
    second = make_release(parent=first.version)
    assert deploy(second, site.settings()).previous == first.version
    assert (champion(site), serving(site)) == (second.version, second.version)
    assert deploy(second, site.settings()).version == second.version  # the same step once more
    assert deployment.roll_back(site.settings()).version == first.version
    assert (champion(site), serving(site)) == (first.version, first.version)


@pytest.mark.slow  # tests/deployment/kubernetes has it on loopback
def test_what_cannot_come_up_leaves_what_serves(site: Site, make_release: MakeRelease) -> None:
    first = make_release()
    deploy(first, site.settings())
    second = make_release(parent=first.version)
    with pytest.raises(ClusterError, match=r"cannot be pulled: .*\. Release \S+ was put back and serves\."):
        deploy(second, site.settings(image=MISSING_IMAGE))
    with pytest.raises(ClusterError, match=r"no node takes pod .*Insufficient cpu.*was put back and serves\."):
        deploy(second, site.settings(cpu="1000", rollout_timeout_s=site.pace.rollout_timeout_s // 20))
    assert (champion(site), serving(site)) == (first.version, first.version)
    assert deploy(second, site.settings()).version == second.version


@pytest.mark.slow  # tests/deployment/kubernetes has it on loopback
def test_where_nothing_served_nothing_is_left(site: Site, make_release: MakeRelease) -> None:
    with pytest.raises(ClusterError, match="all that was made for it was removed"):
        deploy(make_release(), site.settings(image=MISSING_IMAGE))
    assert (champion(site), serving(site)) == (None, "down")
    with pytest.raises(ApiException) as caught:
        CoreV1Api(site.admin).read_namespaced_service(NAME, site.namespace)
    assert caught.value.status == 404


@pytest.mark.slow  # tests/deployment/kubernetes has it on loopback
def test_a_field_that_somebody_else_set_is_named_with_who_did(site: Site, make_release: MakeRelease) -> None:
    first = make_release()
    deploy(first, site.settings())
    patch = {"spec": {"revisionHistoryLimit": 7}}
    apps = AppsV1Api(site.admin)
    apps.patch_namespaced_deployment(NAME, site.namespace, patch, field_manager="somebody")
    second = make_release(parent=first.version)
    with pytest.raises(ClusterError, match=r'"somebody" using apps/v1 set \.spec\.revisionHistoryLimit'):
        deploy(second, site.settings())
    assert serving(site) == first.version
    assert deploy(second, site.settings(force_conflicts=True)).version == second.version


def test_of_two_deployments_one_is_told_who_deploys(site: Site, make_release: MakeRelease) -> None:
    settings = site.settings()
    with (
        LeaseLock(Cluster.of(settings.kubernetes), NAME, settings.kubernetes.lease_s),
        pytest.raises(BusyError, match="Another deployment into namespace"),
    ):
        deploy(make_release(), settings)
    assert (champion(site), serving(site)) == (None, "down")


def test_the_deployer_may_do_no_more_than_deploy(site: Site) -> None:
    with administrator(Path(os.environ["KUBECONFIG"])) as deployer:
        core = CoreV1Api(deployer)
        for forbidden in (
            lambda: core.list_namespaced_secret(site.namespace),
            lambda: core.read_namespaced_secret("evernear-s3-reader", site.namespace),
            lambda: core.list_namespaced_pod("kube-system"),
            lambda: core.list_namespace(),
        ):
            with pytest.raises(ApiException) as caught:
                forbidden()
            assert caught.value.status == 403
