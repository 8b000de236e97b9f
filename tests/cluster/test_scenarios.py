"""Deployments that succeed and fail on a real cluster."""

import os
from pathlib import Path

import pytest
from kubernetes.client import ApiException, AppsV1Api, CoreV1Api

from evernear import deployment
from evernear.common.lease import Lease
from evernear.common.store import open_store
from evernear.deployment.kubernetes import KubernetesTarget
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.lease import LEASE_S, KubernetesRecord
from evernear.errors import BusyError, ClusterError
from evernear.release.registry import Registry
from evernear.settings import Settings
from tests.cluster.sandbox import MISSING_IMAGE, Sandbox, administrator
from tests.releases import MakeRelease, PackedRelease

pytestmark = pytest.mark.cluster
NAME = "evernear-serving"


def deploy(release: PackedRelease, settings: Settings) -> deployment.Deployment:
    return deployment.deploy_release(release.archive, release.verdict, settings)


def champion(sandbox: Sandbox) -> str | None:
    record = Registry(open_store(sandbox.store)).champion()
    return record.version if record else None


def live_release(sandbox: Sandbox) -> str | None:
    """The live release, or the server's state if it is not up."""
    status = deployment.open_target(sandbox.settings()).status()
    return status["release"] if status["server"] == "up" else status["server"]


def test_deploy_two_releases_and_roll_back(cluster_sandbox: Sandbox, make_release: MakeRelease) -> None:
    first = make_release()
    deployed = deploy(first, cluster_sandbox.settings())
    assert (deployed.version, deployed.previous) == (first.version, None)
    assert deployed.smoke_queries > 0
    assert (champion(cluster_sandbox), live_release(cluster_sandbox)) == (first.version, first.version)
    manifest = AppsV1Api(cluster_sandbox.admin).read_namespaced_deployment(NAME, cluster_sandbox.namespace)
    assert manifest.metadata.labels["app.kubernetes.io/version"] == first.version
    second = make_release(parent=first.version)
    assert deploy(second, cluster_sandbox.settings()).previous == first.version
    assert (champion(cluster_sandbox), live_release(cluster_sandbox)) == (second.version, second.version)
    assert deploy(second, cluster_sandbox.settings()).version == second.version  # idempotent
    assert deployment.roll_back(cluster_sandbox.settings()).version == first.version
    assert (champion(cluster_sandbox), live_release(cluster_sandbox)) == (first.version, first.version)


def test_failed_release_is_replaced_by_the_previous_one(cluster_sandbox: Sandbox, make_release: MakeRelease) -> None:
    first = make_release()
    deploy(first, cluster_sandbox.settings())
    second = make_release(parent=first.version)
    with pytest.raises(ClusterError, match=r"cannot be pulled: .*\. Release \S+ was restored and is live\."):
        deploy(second, cluster_sandbox.settings(image=MISSING_IMAGE))
    with pytest.raises(ClusterError, match=r"cannot be scheduled: .*Insufficient cpu.*was restored and is live\."):
        deploy(second, cluster_sandbox.settings(cpu="1000", rollout_timeout_s=cluster_sandbox.rollout_timeout_s // 20))
    assert (champion(cluster_sandbox), live_release(cluster_sandbox)) == (first.version, first.version)
    assert deploy(second, cluster_sandbox.settings()).version == second.version


def test_failed_first_release_leaves_no_objects(cluster_sandbox: Sandbox, make_release: MakeRelease) -> None:
    with pytest.raises(ClusterError, match="its objects were removed"):
        deploy(make_release(), cluster_sandbox.settings(image=MISSING_IMAGE))
    assert (champion(cluster_sandbox), live_release(cluster_sandbox)) == (None, "down")
    with pytest.raises(ApiException) as exc_info:
        CoreV1Api(cluster_sandbox.admin).read_namespaced_service(NAME, cluster_sandbox.namespace)
    assert exc_info.value.status == 404


def test_field_conflict_names_the_field_and_its_manager(cluster_sandbox: Sandbox, make_release: MakeRelease) -> None:
    first = make_release()
    deploy(first, cluster_sandbox.settings())
    patch = {"spec": {"revisionHistoryLimit": 7}}
    apps = AppsV1Api(cluster_sandbox.admin)
    apps.patch_namespaced_deployment(NAME, cluster_sandbox.namespace, patch, field_manager="somebody")
    second = make_release(parent=first.version)
    with pytest.raises(ClusterError, match=r'"somebody" using apps/v1 set \.spec\.revisionHistoryLimit'):
        deploy(second, cluster_sandbox.settings())
    assert live_release(cluster_sandbox) == first.version
    for manifest in KubernetesTarget(cluster_sandbox.settings()).render(None, warn=pytest.fail):  # what the remedy does
        Cluster.of(cluster_sandbox.namespace).apply(manifest, force=True)
    assert deploy(second, cluster_sandbox.settings()).version == second.version


def test_second_concurrent_deployment_fails(cluster_sandbox: Sandbox, make_release: MakeRelease) -> None:
    settings = cluster_sandbox.settings()
    with (
        Lease(KubernetesRecord(Cluster.of(settings.kubernetes.namespace), NAME, LEASE_S)),
        pytest.raises(BusyError, match="Another deployment to namespace"),
    ):
        deploy(make_release(), settings)
    assert (champion(cluster_sandbox), live_release(cluster_sandbox)) == (None, "down")


def test_deployer_has_minimal_rights(cluster_sandbox: Sandbox) -> None:
    with administrator(Path(os.environ["KUBECONFIG"])) as deployer:
        core = CoreV1Api(deployer)
        for forbidden in (
            lambda: core.list_namespaced_secret(cluster_sandbox.namespace),
            lambda: core.read_namespaced_secret("evernear-s3-reader", cluster_sandbox.namespace),
            lambda: core.list_namespaced_pod("kube-system"),
            lambda: core.list_namespace(),
        ):
            with pytest.raises(ApiException) as exc_info:
                forbidden()
            assert exc_info.value.status == 403
