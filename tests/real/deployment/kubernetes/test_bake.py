"""A bake on the loopback cluster: pods with metrics, clients that send requests throughout, and a
real rollback."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from evernear import deployment
from evernear.common.store import open_store
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.service import service_client
from evernear.errors import ConflictError, EvernearError
from evernear.release.promotions import Cause
from evernear.release.registry import Registry
from evernear.settings import Settings
from evernear.triggers.watch.baker import BAKER, Baker, PodMetrics
from tests.loopback.kubernetes import LoopbackCluster, Ready, labeled
from tests.real.deployment.kubernetes.deployer import Answers, MakeSettings, known_answers, reply
from tests.real.serving.fake_servers import http_server
from tests.releases import MakeRelease, PackedRelease

RELEASE = "evernear.dev/release"
POLL = timedelta(seconds=10)
PER_POLL = 50
"""Simulated queries between two polls: five a second."""


class ServedPod(Answers):
    """A pod of one release, and the metrics of queries that a test adds."""

    def __init__(self, release: PackedRelease, directory: Path, unknown: float) -> None:
        super().__init__(release.version, known_answers(release, directory))
        self.release, self.unknown, self.predictions = release, unknown, 0

    def report(self, handler: Any) -> None:
        version, unknown = self.version, round(self.unknown * self.predictions)
        reply(
            handler,
            f'evernear_release_info{{version="{version}",network="n"}} 1.0\n'
            f'evernear_requests_total{{version="{version}",outcome="ok"}} {self.predictions}\n'
            f'evernear_predictions_total{{version="{version}",unknown="true"}} {unknown}\n'
            f'evernear_predictions_total{{version="{version}",unknown="false"}} {self.predictions - unknown}\n',
        )


class Clients:
    """Sends a request at a time through the Service, until `stop`."""

    def __init__(self, settings: Settings, image: bytes) -> None:
        self._client = service_client(Cluster.of(settings.kubernetes.namespace), settings)
        self._image = image
        self._stopping = threading.Event()
        self.versions: list[str] = []
        self.lost: list[str] = []
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        while not self._stopping.wait(0.01):
            try:
                self.versions.append(self._client.predict(self._image).version)
            except EvernearError as error:
                self.lost.append(str(error))

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


@pytest.fixture
def pods(
    loopback: LoopbackCluster, make_release: MakeRelease, tmp_path: Path
) -> Iterator[tuple[list[ServedPod], list[int]]]:
    first = make_release()
    second = make_release(parent=first.version)
    with ExitStack() as stack:
        pods, ports = list[ServedPod](), list[int]()
        for number, release in enumerate((first, second)):
            pod = ServedPod(release, tmp_path / "opened", unknown=0.04 + 0.2 * number)
            answers = {"do_POST": lambda handler, pod=pod: pod.answer(handler)}
            answers["do_GET"] = lambda handler, pod=pod: pod.report(handler)
            port = stack.enter_context(http_server(**answers))
            loopback.set_pod_behavior(Ready(serves={8080: ("127.0.0.1", port)}), labeled(RELEASE, release.version))
            pods.append(pod)
            ports.append(port)
        yield pods, ports


def test_planted_rise_of_unknown_is_undone_without_a_lost_request(
    pods: tuple[list[ServedPod], list[int]], make_settings: MakeSettings
) -> None:
    (good, bad), ports = pods
    settings = make_settings()
    deployment.deploy_release(good.release.archive, good.release.verdict, settings)
    clients = Clients(settings, next(iter(good.known)))
    now, live = datetime.now(UTC) - timedelta(minutes=10), good
    read = PodMetrics(lambda: [("127.0.0.1", ports[0 if live is good else 1])])
    baker = Baker(settings, open_store(settings.store_uri), None, read, lambda: now)
    registry = Registry(open_store(settings.store_uri))
    try:
        for _ in range(20):
            now += POLL
            live.predictions += PER_POLL
            baker.poll()
        deployment.deploy_release(bad.release.archive, bad.release.verdict, settings)
        now, live = datetime.now(UTC), bad
        rollout, sentence = now, ""
        while "is rolled back" not in sentence:
            assert now - rollout < timedelta(minutes=1)  # simulated; leaves a minute for the rollout of the rollback
            sentence = baker.poll()
            now += POLL
            live.predictions += PER_POLL
        answered = len(clients.versions)
        while len(clients.versions) < answered + 5:
            time.sleep(0.01)
    finally:
        clients.stop()
    champion = registry.champion()
    assert champion is not None
    assert champion.version == good.release.version
    assert (champion.promotion.how, champion.promotion.by) == ("rollback", BAKER)
    assert champion.promotion.why.startswith("Rule unknown: 24.0% of ")
    assert clients.lost == []
    assert clients.versions[-1] == good.release.version
    assert bad.release.version in clients.versions
    # Neither a repeated deploy step nor an equal release of another run brings it back, but a
    # person does.
    with pytest.raises(
        ConflictError, match=r"was rolled back after its rollout: Rule unknown: .* A person can promote it"
    ):
        deployment.deploy_release(bad.release.archive, bad.release.verdict, settings)
    deployment.promote_release(bad.release.version, settings, cause=Cause(by="Ada", why="new cameras"))
    assert "Ada promoted it after a bake had rolled it back" in baker.poll()
    assert baker.poll() == ""
