"""Sites for the scenarios: a loopback cluster and, if ``KUBECONFIG`` selects one, a real
cluster."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from evernear.deployment import kubernetes
from evernear.deployment.kubernetes import rollout, service
from tests.cluster.pods import Pods
from tests.cluster.sandbox import (
    DEPLOYER,
    MISSING_IMAGE,
    Sandbox,
    administrator,
    install_deployer,
    install_store,
    install_store_secret,
    kubeconfig_of,
    temporary_namespace,
)
from tests.environment import of_the_shell
from tests.loopback.kubernetes import ImageMissing, LoopbackCluster

AWS = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
KUBECONFIG, IMAGE = "KUBECONFIG", "EVERNEAR_TEST_IMAGE"
LOOPBACK_IMAGE = "registry.example/evernear-serve@sha256:" + "a" * 64


@pytest.fixture(params=["loopback", pytest.param("real", marks=pytest.mark.cluster)])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """A namespace to deploy into; the environment authenticates as the deployer of
    `deploy/base`."""
    return request.getfixturevalue(f"{request.param}_sandbox")


@pytest.fixture
def loopback_sandbox(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    environment = {name: os.environ[name] for name in AWS}  # set by `bucket`
    store = f"s3://{bucket}/store"
    pods = Pods(lambda: store, tmp_path)
    with LoopbackCluster(tmp_path, second_s=1.0) as running, administrator(running.kubeconfig()) as admin:
        running.set_pod_behavior(pods.behavior)
        running.set_pod_behavior(
            ImageMissing("no such host"), lambda pod: MISSING_IMAGE in str(pod["spec"]["containers"])
        )
        with temporary_namespace(admin) as namespace:
            install_deployer(admin, namespace)
            install_store_secret(admin, namespace, environment)
            monkeypatch.setenv(KUBECONFIG, str(kubeconfig_of(DEPLOYER, admin, namespace, tmp_path)))
            monkeypatch.setattr(rollout, "FAILURE_GRACE_S", 1)
            monkeypatch.setattr(service, "CONVERGENCE_TIMEOUT_S", 5)
            monkeypatch.setattr(kubernetes, "LEASE_S", 5)
            yield Sandbox(namespace, LOOPBACK_IMAGE, store, (443,), admin, rollout_timeout_s=60)
    pods.stop()


@pytest.fixture
def real_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """Only the nightly workflow, which has a kind cluster, has run this so far."""
    image, kubeconfig = os.environ.get(IMAGE), of_the_shell(KUBECONFIG).get(KUBECONFIG)
    if image and not kubeconfig:
        pytest.fail(f"{IMAGE} is set, {KUBECONFIG} is not; the default kubeconfig is never used")
    if not image or not kubeconfig:
        pytest.skip(f"needs {KUBECONFIG} and {IMAGE}")
    with administrator(Path(kubeconfig)) as admin, temporary_namespace(admin) as namespace:
        install_deployer(admin, namespace)
        environment = install_store(admin, namespace)
        install_store_secret(admin, namespace, environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        endpoint = urlsplit(environment["AWS_ENDPOINT_URL"])
        monkeypatch.setenv(KUBECONFIG, str(kubeconfig_of(DEPLOYER, admin, namespace, tmp_path)))
        # SeaweedFS listens on 8333; the node forwards the other port to it.
        ports = (8333, endpoint.port or 443)
        yield Sandbox(namespace, image, "s3://evernear/store", ports, admin, rollout_timeout_s=300)
