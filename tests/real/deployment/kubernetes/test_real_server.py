"""Deployments whose Service forwards to a real TorchServe, started like the pod's containers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from evernear import deployment
from evernear.common.store import open_store
from evernear.deployment.kubernetes import service
from evernear.deployment.kubernetes.cluster import RELEASE
from evernear.release.registry import Registry
from evernear.settings import Settings
from tests.loopback.kubernetes import LoopbackCluster, Ready, labeled
from tests.real.deployment.kubernetes.deployer import MakeSettings
from tests.real.serving.pod.kubelet import Pod
from tests.releases import MakeRelease, PackedRelease

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(make_settings: MakeSettings, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(service, "CONVERGENCE_TIMEOUT_S", 10)
    base = make_settings(store_claim="")
    return base.model_copy(update={"store": f"s3://{bucket}/store"})


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    running = [Pod(tmp_path / f"pod-{number}") for number in range(2)]
    try:
        yield running
    finally:
        for pod in running:
            pod.kill()


def run(pod: Pod, release: PackedRelease, settings: Settings) -> None:
    """Publish the release, then run init container, container and startup probe as a kubelet
    does."""
    record = Registry(open_store(settings.store_uri)).publish(release.archive)
    fetched = pod.fetch(settings.store_uri, release.version, record.archive_sha256)
    assert fetched.returncode == 0, fetched.stderr
    pod.start("--without-token")
    pod.await_started()


def test_deploy_two_releases_and_roll_back(
    loopback: LoopbackCluster, settings: Settings, make_release: MakeRelease, pods: list[Pod]
) -> None:
    first = make_release()
    second = make_release(parent=first.version)
    for release, pod in zip((first, second), pods, strict=True):
        run(pod, release, settings)
        behavior = Ready(serves={8080: ("127.0.0.1", pod.port)})
        loopback.set_pod_behavior(behavior, labeled(RELEASE, release.version))
        deployed = deployment.deploy_release(release.archive, release.verdict, settings)
        assert (deployed.version, deployed.smoke_queries) == (release.version, 8)
    assert deployment.roll_back(settings).version == first.version
