"""Lifecycle of a pod: its containers, probes and hook."""

import signal
import time
from pathlib import Path

import psutil
import pytest
import requests

from evernear.errors import PredictionRejectedError
from evernear.serving.client import Client
from evernear.serving.endpoints import home_of, read_key
from tests.real.serving.pod.kubelet import FORMATS, TOKEN, Pod, Shipped, StartPod, can_contain
from tests.real.serving.raw import Raw, request
from tests.waiting import until


@pytest.fixture(scope="module")
def pod(start_pod: StartPod) -> Pod:
    return start_pod(removal_s=2)


def workers(pod: Pod) -> list[psutil.Process]:
    return [process for process in pod.first_process().children() if "python" in process.name()]


def test_inference_accepts_only_the_shared_token(pod: Pod, shipped: Shipped) -> None:
    for format in FORMATS:
        with Client(pod.target(TOKEN, format)) as client:
            assert client.predict(shipped.image).version == shipped.version
        for token in ("f" * 32, None):
            with Client(pod.target(token, format)) as client, pytest.raises(PredictionRejectedError):
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
