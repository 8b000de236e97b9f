"""Deployments that succeed and fail, on loopback and, marked ``cluster``, on a real cluster."""

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
    record = Registry(open_store(site.store)).champion()
    return record.version if record else None


def live_release(site: Site) -> str | None:
    """The live release, or the server's state if it is not up."""
    status = deployment.open_target(site.settings()).status()
    return status["release"] if status["server"] == "up" else status["server"]


def test_deploy_two_releases_and_roll_back(site: Site, make_release: MakeRelease) -> None:
    first = make_release()
    deployed = deploy(first, site.settings())
    assert (deployed.version, deployed.previous) == (first.version, None)
    assert deployed.smoke_queries > 0
    assert (champion(site), live_release(site)) == (first.version, first.version)
    manifest = AppsV1Api(site.admin).read_namespaced_deployment(NAME, site.namespace)
    assert manifest.metadata.labels["app.kubernetes.io/version"] == first.version
    second = make_release(parent=first.version)
    assert deploy(second, site.settings()).previous == first.version
    assert (champion(site), live_release(site)) == (second.version, second.version)
    assert deploy(second, site.settings()).version == second.version  # idempotent
    assert deployment.roll_back(site.settings()).version == first.version
    assert (champion(site), live_release(site)) == (first.version, first.version)


@pytest.mark.slow  # tests/deployment/kubernetes covers it on loopback
def test_failed_release_is_replaced_by_the_previous_one(site: Site, make_release: MakeRelease) -> None:
    first = make_release()
    deploy(first, site.settings())
    second = make_release(parent=first.version)
    with pytest.raises(ClusterError, match=r"cannot be pulled: .*\. Release \S+ was restored and is live\."):
        deploy(second, site.settings(image=MISSING_IMAGE))
    with pytest.raises(ClusterError, match=r"cannot be scheduled: .*Insufficient cpu.*was restored and is live\."):
        deploy(second, site.settings(cpu="1000", rollout_timeout_s=site.pace.rollout_timeout_s // 20))
    assert (champion(site), live_release(site)) == (first.version, first.version)
    assert deploy(second, site.settings()).version == second.version


@pytest.mark.slow  # tests/deployment/kubernetes covers it on loopback
def test_failed_first_release_leaves_no_objects(site: Site, make_release: MakeRelease) -> None:
    with pytest.raises(ClusterError, match="its objects were removed"):
        deploy(make_release(), site.settings(image=MISSING_IMAGE))
    assert (champion(site), live_release(site)) == (None, "down")
    with pytest.raises(ApiException) as exc_info:
        CoreV1Api(site.admin).read_namespaced_service(NAME, site.namespace)
    assert exc_info.value.status == 404


@pytest.mark.slow  # tests/deployment/kubernetes covers it on loopback
def test_field_conflict_names_the_field_and_its_manager(site: Site, make_release: MakeRelease) -> None:
    first = make_release()
    deploy(first, site.settings())
    patch = {"spec": {"revisionHistoryLimit": 7}}
    apps = AppsV1Api(site.admin)
    apps.patch_namespaced_deployment(NAME, site.namespace, patch, field_manager="somebody")
    second = make_release(parent=first.version)
    with pytest.raises(ClusterError, match=r'"somebody" using apps/v1 set \.spec\.revisionHistoryLimit'):
        deploy(second, site.settings())
    assert live_release(site) == first.version
    assert deploy(second, site.settings(force_conflicts=True)).version == second.version


def test_second_concurrent_deployment_fails(site: Site, make_release: MakeRelease) -> None:
    settings = site.settings()
    with (
        LeaseLock(Cluster.of(settings.kubernetes), NAME, settings.kubernetes.lease_s),
        pytest.raises(BusyError, match="Another deployment to namespace"),
    ):
        deploy(make_release(), settings)
    assert (champion(site), live_release(site)) == (None, "down")


def test_deployer_has_minimal_rights(site: Site) -> None:
    with administrator(Path(os.environ["KUBECONFIG"])) as deployer:
        core = CoreV1Api(deployer)
        for forbidden in (
            lambda: core.list_namespaced_secret(site.namespace),
            lambda: core.read_namespaced_secret("evernear-s3-reader", site.namespace),
            lambda: core.list_namespaced_pod("kube-system"),
            lambda: core.list_namespace(),
        ):
            with pytest.raises(ApiException) as exc_info:
                forbidden()
            assert exc_info.value.status == 403
