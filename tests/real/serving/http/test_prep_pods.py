"""The preprocessing server while the pods behind the name of its predictor change."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from evernear.serving.client.inference_pb2 import PredictionsRequest
from tests.ports import free_ports
from tests.prep_server import ReleaseStore, prep_client
from tests.real.serving.fake_servers import answers, grpc_server
from tests.real.serving.http.test_prep_faults import png

NAME = "pods.test"
A, B, C, D = (f"127.0.0.{last}" for last in (11, 12, 13, 14))
MAX_RESOLUTIONS = 2  # until a request succeeds after a ready pod exists; one begins every second


class Names:
    """Resolves `NAME` to the addresses of a headless Service, like a name server. With ``caching``,
    the first answer is repeated, as by a server on a node until the end of its TTL."""

    def __init__(self, *, caching: bool) -> None:
        self.addresses: list[str] = []
        self.queries = 0
        self._caching = caching
        self._answer: list[str] = []
        self._resolve = socket.getaddrinfo

    def getaddrinfo(self, host: bytes | str | None, *args: Any, **options: Any) -> list[Any]:
        if host not in (NAME, NAME.encode()):
            return self._resolve(host, *args, **options)
        self.queries += 1
        if not (self._caching and self._answer):
            self._answer = self.addresses
        if not self._answer:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for address in self._answer for found in self._resolve(address, *args, **options)]


class Pods:
    """The pods of one headless Service. All are ready, and so in DNS."""

    def __init__(self, names: Names, version: str) -> None:
        self.port = free_ports(1)[0]
        self.calls: dict[str, int] = {}
        self._names = names
        self._version = version
        self._running: dict[str, ExitStack] = {}

    def start(self, host: str) -> None:
        self.calls[host] = 0

        def answer(request: PredictionsRequest, _: object) -> bytes:
            self.calls[host] += 1
            return answers(request, version=self._version)

        self._running[host] = ExitStack()
        self._running[host].enter_context(grpc_server(answer, self.port, host=host))
        self._names.addresses = [*self._names.addresses, host]

    def delete(self, host: str) -> None:
        """Delete a pod by force: it dies at once."""
        self._names.addresses = [address for address in self._names.addresses if address != host]
        self._running.pop(host).close()

    def close(self) -> None:
        for host in list(self._running):
            self.delete(host)


@pytest.fixture
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names(caching=getattr(request, "param", False))
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


@pytest.fixture
def pods(stored_releases: ReleaseStore, names: Names) -> Iterator[Pods]:
    pods = Pods(names, stored_releases.release(1, champion=True))
    pods.start(A)
    pods.start(B)
    yield pods
    pods.close()


@pytest.fixture
def pods_prep(stored_releases: ReleaseStore, pods: Pods) -> Iterator[httpx.Client]:
    with prep_client(stored_releases.settings(pods.port, predictor_host=NAME)) as client:
        yield client


def recovers(prep: httpx.Client, names: Names) -> bool:
    """Whether a request succeeds before more than `MAX_RESOLUTIONS` end."""
    first = names.queries
    while prep.post("/predict", json=png(8)).status_code != 200:
        if names.queries > first + MAX_RESOLUTIONS:
            return False
    return True


def wait_for_resolutions(names: Names, count: int) -> None:
    end = names.queries + count
    while names.queries < end:
        time.sleep(0.01)


def test_replaced_pods_are_used(pods_prep: httpx.Client, pods: Pods, names: Names) -> None:
    assert recovers(pods_prep, names)
    pods.delete(A)
    pods.start(C)
    pods.delete(B)
    assert recovers(pods_prep, names)
    assert pods.calls[C]


def test_rollout_loses_no_request(pods_prep: httpx.Client, pods: Pods, names: Names) -> None:
    assert recovers(pods_prep, names)
    for old, new in ((A, C), (B, D)):
        pods.start(new)
        wait_for_resolutions(names, 2)
        pods.delete(old)
        assert [pods_prep.post("/predict", json=png(8)).status_code for _ in range(20)] == [200] * 20
    assert pods.calls[C]
    assert pods.calls[D]


def test_additional_pod_gets_requests(pods_prep: httpx.Client, pods: Pods, names: Names) -> None:
    assert recovers(pods_prep, names)
    pods.start(C)
    wait_for_resolutions(names, 2)
    while not pods.calls[C]:  # the test's timeout ends this
        assert pods_prep.post("/predict", json=png(8)).status_code == 200


@pytest.mark.parametrize(
    "resolutions", [pytest.param(4, id="seconds"), pytest.param(60, id="a minute", marks=pytest.mark.slow)]
)
def test_first_pod_after_an_outage_is_used(pods_prep: httpx.Client, pods: Pods, names: Names, resolutions: int) -> None:
    assert recovers(pods_prep, names)
    pods.close()
    end = names.queries + resolutions
    while names.queries < end:
        assert pods_prep.post("/predict", json=png(8)).status_code == 503
    pods.start(D)
    assert recovers(pods_prep, names)


@pytest.mark.parametrize("names", [True], indirect=True, ids=["caching name server"])
def test_fallback_host_answers_while_dns_is_outdated(stored_releases: ReleaseStore, names: Names, pods: Pods) -> None:
    hosts = {"predictor_host": NAME, "predictor_fallback_host": C}  # C is the ClusterIP
    with prep_client(stored_releases.settings(pods.port, **hosts)) as prep:
        assert recovers(prep, names)
        pods.start(C)
        pods.delete(A)
        pods.delete(B)
        assert recovers(prep, names)
        assert pods.calls[C]


def test_failed_resolution_leaves_the_addresses(pods_prep: httpx.Client, names: Names) -> None:
    assert recovers(pods_prep, names)
    names.addresses = []
    wait_for_resolutions(names, 2)
    assert [pods_prep.post("/predict", json=png(8)).status_code for _ in range(4)] == [200] * 4
