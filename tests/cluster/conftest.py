"""A namespace of the cluster that ``KUBECONFIG`` selects."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster.sandbox import (
    DEPLOYER,
    Sandbox,
    administrator,
    install_deployer,
    install_store,
    install_store_secret,
    kubeconfig_of,
    temporary_namespace,
)
from tests.environment import of_the_shell

KUBECONFIG, IMAGE = "KUBECONFIG", "EVERNEAR_TEST_IMAGE"


@pytest.fixture
def cluster_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A namespace to deploy into; the environment authenticates as the deployer of
    `deploy/base`."""
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
