"""Lifecycle of a pod: its containers, probes and hook, and its replacement."""

import dataclasses
import signal
import time
from pathlib import Path

import psutil
import pytest
import requests

from evernear.errors import PredictionRejectedError
from evernear.serving.client import Client, Format, Target
from evernear.serving.endpoints import home_of, read_key
from tests.real.serving.pod.balancer import Balancer
from tests.real.serving.pod.callers import Calls, calling, calling_grpc
from tests.real.serving.pod.kubelet import TOKEN, Pod, Shipped, StartPod, can_contain
from tests.real.serving.raw import Raw, request
from tests.waiting import until

FORMATS: tuple[Format, ...] = ("rest", "grpc")
LAG_S = 0.5  # delay between a change of the endpoints and of the balancer


@pytest.fixture(scope="module")
def pod(start_pod: StartPod) -> Pod:
    return start_pod(removal_s=2, threads=2)


class Service:
    """One port of all pods, behind a balancer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.balancer = Balancer()

    def add(self, pod: Pod, lag_s: float = 0) -> None:
        self.balancer.add(getattr(pod.serving, self._name), lag_s)

    def remove(self, pod: Pod, lag_s: float = 0) -> None:
        self.balancer.remove(getattr(pod.serving, self._name), lag_s)


def target(pod: Pod, token: str | None, format: Format = "rest") -> Target:
    return dataclasses.replace(Target.remote(pod.settings, "127.0.0.1", format), token=lambda: token)


def workers(pod: Pod) -> list[psutil.Process]:
    return [process for process in pod.first_process().children() if "python" in process.name()]


def test_inference_accepts_only_the_shared_token(pod: Pod, shipped: Shipped) -> None:
    for format in FORMATS:
        with Client(target(pod, TOKEN, format)) as client:
            assert client.predict(shipped.image).version == shipped.version
        for token in ("f" * 32, None):
            with Client(target(pod, token, format)) as client, pytest.raises(PredictionRejectedError):
                client.predict(shipped.image)


def test_only_inference_and_metrics_are_reachable_from_outside(pod: Pod) -> None:
    java = pod.first_process()
    listening = {
        connection.laddr.port: connection.laddr.ip
        for connection in java.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    external = {port for port, address in listening.items() if address.removeprefix("::ffff:") != "127.0.0.1"}
    serving = pod.serving
    assert external == {serving.inference_port, serving.metrics_port, serving.grpc_inference_port}
    assert {serving.management_port, serving.grpc_management_port} <= set(listening)


def test_models_cannot_be_registered_even_with_the_pods_key(pod: Pod) -> None:
    key = read_key(home_of(pod.workdir), "management")
    url = f"http://127.0.0.1:{pod.serving.management_port}/models"
    headers = {"Authorization": f"Bearer {key}"}
    assert requests.get(url, timeout=10).status_code == 401
    assert [model["modelName"] for model in requests.get(url, headers=headers, timeout=10).json()["models"]]
    response = requests.post(url, params={"url": "embedding.mar"}, headers=headers, timeout=10)
    assert (response.status_code, response.json()["type"]) == (405, "MethodNotAllowedException")


def test_server_and_worker_have_no_secret_in_their_environment(pod: Pod) -> None:
    (worker,) = workers(pod)
    for process in (pod.first_process(), worker):
        assert not [name for name in process.environ() if name.startswith(("AWS_", "EVERNEAR_TOKEN"))]
        assert TOKEN not in " ".join([*process.cmdline(), *process.environ().values()])
    assert TOKEN not in pod.log
    assert worker.environ()["OMP_NUM_THREADS"] == "2"


@pytest.mark.skipif(not can_contain(), reason="the kernel does not allow unprivileged namespaces")
def test_runs_unprivileged_on_a_read_only_root(pod: Pod) -> None:
    """`container.sh` sets this up, and every other test runs in it; this one checks that the setup
    is in effect."""
    for process in (pod.first_process(), *workers(pod)):
        proc = Path("/proc") / str(process.pid)
        status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
        assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
        options = {fields[4]: set(fields[5].split(",")) for fields in mounts}
        assert "ro" in options["/"]
        assert "ro" in options["/mnt"]
        assert "rw" in options["/srv"]
    first = (Path("/proc") / str(pod.first_process().pid) / "status").read_text()
    assert "1" in first.partition("NSpid:")[2].splitlines()[0].split()
    assert "Read-only file system" not in pod.log


def test_ready_needs_no_token_and_reveals_nothing_else(pod: Pod, shipped: Shipped) -> None:
    response = requests.get(f"http://127.0.0.1:{pod.port}/ready", timeout=10)
    assert (response.status_code, response.json()) == (200, {"status": "Ready"})
    url = f"http://127.0.0.1:{pod.port}/ready/predictions"
    assert requests.get(url, timeout=10).status_code != 200
    assert requests.post(f"http://127.0.0.1:{pod.port}/ready", shipped.image, timeout=10).status_code != 200


def test_ready_is_pipelined_and_only_a_bare_get_needs_no_token(pod: Pod, shipped: Shipped) -> None:
    time.sleep(2.5)  # idle long enough that the probe sends a query
    token = b"Authorization: Bearer %s\r\n" % TOKEN.encode()
    predict = request(b"POST /predictions/embedding", token, shipped.image)
    ready = request(b"GET /ready")
    for order in ((ready, predict, ready), (predict, ready, predict)):
        with Raw.to(pod.port) as connection:
            responses = connection.send(b"".join(order)).end().all_answers()
        assert [b"Ready" in response.body for response in responses] == [item is ready for item in order]
        assert {response.status for response in responses} == {200}
    for other in (request(b"GET /ready", body=b"x"), request(b"POST /ready"), request(b"GET /ready?x")):
        with Raw.to(pod.port) as connection:
            assert [response.status for response in connection.send(ready + other).all_answers()] == [200, 401]


@pytest.mark.slow
def test_probe_sends_no_query_under_traffic(pod: Pod, shipped: Shipped) -> None:
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
        with Client(target(pod, TOKEN, format)) as client:
            client.predict(shipped.image)
        assert [pod.probe() for _ in range(10)] == [200] * 10
        assert handled() == before + number
    assert pod.probe() == 200  # without traffic, it sends a query
    assert handled() == before + len(FORMATS) + 1
    assert count("evernear_requests_total") == clients + len(FORMATS)  # the query of a probe is not a client's


def test_pod_with_a_stopped_worker_is_not_ready(pod: Pod) -> None:
    (worker,) = workers(pod)
    until(lambda: pod.probe() == 200)
    worker.send_signal(signal.SIGSTOP)
    try:
        time.sleep(2.5)
        assert pod.probe(timeout_s=1) == 0
    finally:
        worker.send_signal(signal.SIGCONT)
    until(lambda: pod.probe() == 200)


@pytest.mark.slow
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


@pytest.mark.slow
def test_without_token_serves_everyone(shipped: Shipped, tmp_path: Path) -> None:
    pod = Pod(tmp_path / "pod")
    try:
        assert pod.fetch(shipped.store, shipped.version, shipped.sha256).returncode == 0
        pod.start("--without-token")
        assert "8 stored queries" in pod.await_started()
        assert pod.probe() == 200
        with Client(target(pod, None)) as client:
            assert client.predict(shipped.image).version == shipped.version
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
