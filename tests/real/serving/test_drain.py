"""Shutdown of a server: requests in flight are answered, and no process or file remains."""

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from evernear.serving import configuration, torchserve
from evernear.serving.endpoints import read_key
from tests.releases import PackedRelease
from tests.served import Served, serving
from tests.waiting import until

CLIENTS = 12


@pytest.fixture
def server(release: PackedRelease, tmp_path: Path) -> Iterator[Served]:
    with serving(release, tmp_path) as served:
        yield served


class Caller:
    """A client that counts responses and failures of requests on open connections."""

    def __init__(self, server: Served, keep_alive: bool) -> None:
        self._port = server.settings.serving.inference_port
        self._keep_alive = keep_alive
        self._headers = {"Authorization": f"Bearer {read_key(server.home, 'inference')}"}
        self._image = server.parts.smoke_queries()[0][0]
        self.answers = 0
        self.failures: list[str] = []

    def call_until_refused(self) -> None:
        while not self.failures:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            try:
                connection.connect()
            except ConnectionRefusedError:
                return
            before = self.answers
            try:
                while self._call(connection) and self._keep_alive:
                    pass
            except ConnectionResetError as fault:
                if self.answers == before:
                    return  # accepted by the kernel as the listener closed, and never by Java: refused (decision 9)
                self.failures.append(repr(fault))
            except (OSError, http.client.HTTPException) as fault:
                self.failures.append(repr(fault))
            finally:
                connection.close()

    def _call(self, connection: http.client.HTTPConnection) -> bool:
        connection.request("POST", "/predictions/embedding", self._image, self._headers)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status == 200:
            self.answers += 1
        else:
            self.failures.append(f"{answer.status} {body!r}")
        return not answer.will_close


def test_stop_under_load_fails_no_request(server: Served) -> None:
    """`stop` sends SIGTERM to Java, as a container runtime does."""
    callers = [Caller(server, keep_alive=number % 3 > 0) for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        calls = [pool.submit(caller.call_until_refused) for caller in callers]
        until(lambda: all(caller.answers >= 5 for caller in callers))
        assert torchserve.stop_server(server.home)
        for call in calls:
            call.result(timeout=60)
    assert [caller.failures for caller in callers if caller.failures] == []
    assert torchserve.processes(server.home) == []


def test_drain_waits_for_a_request_that_is_being_sent(server: Served) -> None:
    image, query = server.parts.smoke_queries()[0]
    connection = http.client.HTTPConnection("127.0.0.1", server.settings.serving.inference_port, timeout=30)
    connection.putrequest("POST", "/predictions/embedding")
    connection.putheader("Authorization", f"Bearer {read_key(server.home, 'inference')}")
    connection.putheader("Content-Length", str(len(image)))
    connection.endheaders(image[:50])
    stop = threading.Thread(target=torchserve.stop_server, args=[server.home])
    stop.start()
    until(lambda: not torchserve.is_ready(server.home, "embedding"))
    time.sleep(2)  # longer than the timeout of idle connections
    connection.send(image[50:])
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("connection")) == (200, "close")
    assert f'"pred":"{query.pred}"'.encode() in answer.read()
    stop.join(30)
    assert torchserve.processes(server.home) == []


@pytest.mark.slow
def test_drain_times_out_on_an_endless_request(
    release: PackedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "DRAIN_TIMEOUT_S", 1)
    with serving(release, tmp_path) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.settings.serving.inference_port, timeout=30)
        connection.putrequest("POST", "/predictions/embedding")
        connection.putheader("Authorization", f"Bearer {read_key(server.home, 'inference')}")
        connection.putheader("Content-Length", "10")
        connection.endheaders(b"begin")
        assert torchserve.stop_server(server.home)
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.getresponse()
        assert torchserve.processes(server.home) == []


def test_server_ends_with_its_owner_even_if_killed(server: Served) -> None:
    script = (
        "import sys, time; from pathlib import Path; from evernear.serving import torchserve; "
        "torchserve.adopt(Path(sys.argv[1])); print('adopted', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(server.home)], stdout=subprocess.PIPE, text=True)
    caller = Caller(server, keep_alive=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "adopted\n"
        calls = threading.Thread(target=caller.call_until_refused)
        calls.start()
        until(lambda: caller.answers >= 5)
        time.sleep(1)  # for the server to learn of its owner
    finally:
        owner.kill()
        owner.communicate()
    calls.join(60)
    assert caller.failures == []
    _, left = psutil.wait_procs(torchserve.processes(server.home), timeout=30)
    assert left == []


def test_is_ready_only_if_a_request_would_succeed(served: Served, tmp_path: Path) -> None:
    assert torchserve.is_ready(served.home, "embedding")
    command = [Path(sys.executable).with_name("evernear"), "ready", "--workdir"]
    assert subprocess.run([*command, served.settings.workdir]).returncode == 0
    (tmp_path / "elsewhere").mkdir()
    assert subprocess.run([*command, tmp_path / "elsewhere"]).returncode == 1
    assert not torchserve.is_ready(served.home, "another-model")
    assert not torchserve.is_ready(tmp_path / "elsewhere", "embedding")
    for worker in torchserve.processes(served.home):
        if "java" not in worker.name():
            worker.kill()
    until(lambda: not torchserve.is_ready(served.home, "embedding"))
    until(lambda: torchserve.is_ready(served.home, "embedding"))
    image, query = served.parts.smoke_queries()[0]
    assert served.client().predict(image).pred == query.pred


def test_ready_command_imports_neither_torch_nor_faiss() -> None:
    script = "import sys, evernear.serving.torchserve; print({'torch', 'faiss'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"
