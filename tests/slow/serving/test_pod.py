"""The replacement of pods under load, and probes under traffic."""

import time
from pathlib import Path

import pytest
import requests

from evernear.serving.client import Client
from evernear.serving.configuration import logged_queries
from evernear.serving.endpoints import home_of
from evernear.serving.query_log_files import parse_file
from tests.real.serving.pod.kubelet import FORMATS, TOKEN, Pod, Shipped, StartPod
from tests.slow.serving.balancer import Balancer
from tests.slow.serving.callers import Calls, calling, calling_grpc
from tests.waiting import until

pytestmark = pytest.mark.slow
LAG_S = 0.5  # delay between a change of the endpoints and of the balancer


class Service:
    """One port of all pods, behind a balancer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.balancer = Balancer()

    def add(self, pod: Pod, lag_s: float = 0) -> None:
        self.balancer.add(getattr(pod.serving, self._name), lag_s)

    def remove(self, pod: Pod, lag_s: float = 0) -> None:
        self.balancer.remove(getattr(pod.serving, self._name), lag_s)


def test_probe_sends_no_query_under_traffic(start_pod: StartPod, shipped: Shipped) -> None:
    pod = start_pod()

    def count(name: str) -> int:
        """The sum of a metric. The worker's metrics arrive once a second."""
        time.sleep(2.5)
        text = requests.get(f"http://127.0.0.1:{pod.serving.metrics_port}/metrics", timeout=10).text
        return sum(int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def handled() -> int:
        return count("ts_inference_requests_total")

    clients = count("evernear_requests_total")
    before = handled()
    for number, format in enumerate(FORMATS, start=1):
        with Client(pod.target(TOKEN, format)) as client:
            client.predict(shipped.image)
        assert [pod.probe() for _ in range(10)] == [200] * 10
        assert handled() == before + number
    assert pod.probe() == 200  # without traffic, it sends a query
    assert handled() == before + len(FORMATS) + 1
    assert count("evernear_requests_total") == clients + len(FORMATS)  # the query of a probe is not a client's


@pytest.mark.timeout(1200)
def test_replacements_under_load_fail_no_request_of_5000_unless_prestop_is_too_short(
    start_pod: StartPod, shipped: Shipped, capsys: pytest.CaptureFixture[str]
) -> None:
    """The endpoint is removed immediately, then late, then later than the preStop delay, which must
    fail requests."""
    pods = [start_pod(removal_s=3)]
    rest, grpc = Service("inference_port"), Service("grpc_inference_port")
    for service in (rest, grpc):
        service.add(pods[0])
    with (
        rest.balancer.running() as balancer,
        grpc.balancer.running() as grpc_balancer,
        calling(balancer.port, shipped.image, TOKEN, clients=10, pause_s=0.02) as calls,
        calling_grpc(grpc_balancer.port, shipped.image, TOKEN, clients=2, pause_s=0.02) as grpc_calls,
    ):
        for lag_s in (LAG_S, 2.7):
            pods.append(start_pod(removal_s=3))
            end_s = replace([rest, grpc], pods[-2], pods[-1], lag_s)
            with capsys.disabled():
                print(f"\nendpoint removed after {lag_s} s, pod gone after {end_s:.1f} s: {summary(calls, grpc_calls)}")
        until(lambda: calls.total >= 5000, timeout_s=200)
        assert calls.failures + grpc_calls.failures == []
        assert balancer.refused + grpc_balancer.refused == 0
        pods.append(start_pod(removal_s=0))
        replace([rest, grpc], pods[-2], pods[-1], LAG_S)
        pods.append(start_pod())
        replace([rest, grpc], pods[-2], pods[-1], 3)
        time.sleep(3)  # until the endpoint of a deleted pod is removed
    with capsys.disabled():
        print(f"endpoint removed after 3 s, without a preStop delay: {summary(calls, grpc_calls)}")
    assert calls.failures


def test_without_token_serves_everyone_and_writes_the_query_log_at_its_end(shipped: Shipped, tmp_path: Path) -> None:
    pod = Pod(tmp_path / "pod")
    try:
        assert pod.fetch(shipped.store, shipped.version, shipped.sha256).returncode == 0
        pod.start("--without-token")
        assert "8 stored queries" in pod.await_started()
        assert pod.probe() == 200
        with Client(pod.target(None)) as client:
            answer = client.predict(shipped.image)
        assert answer.version == shipped.version
        pod.delete()
        (logged,) = logged_queries(home_of(pod.workdir)).glob("*.jsonl")
        assert answer.id in {query.id for query in parse_file(logged.read_bytes(), logged.name)[1]}
    finally:
        pod.kill()


def summary(calls: Calls, grpc_calls: Calls) -> str:
    failed = len(calls.failures), len(grpc_calls.failures)
    return f"{calls.total:,} requests so far and {grpc_calls.total:,} over gRPC; {failed[0]} and {failed[1]} failed"


def replace(services: list[Service], pod: Pod, successor: Pod, lag_s: float) -> float:
    """Replace a pod as a Deployment with maxUnavailable 0; returns the seconds until the old pod is
    gone."""
    for service in services:
        service.add(successor, LAG_S)
    time.sleep(2 * LAG_S)
    for service in services:
        service.remove(pod, lag_s)
    return pod.delete()
