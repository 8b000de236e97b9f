"""The preprocessing server while real TorchServes behind the name of its predictor are killed and
started."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from evernear.common.disk import sha256_file
from evernear.common.store import open_store
from evernear.release.registry import Registry
from evernear.settings import PrepSettings, ServingSettings, Settings
from tests.ports import free_ports
from tests.prep_server import prep_client
from tests.real.serving.name_server import NameServer, use_name_server
from tests.real.serving.prep.test_prep_faults import png
from tests.real.serving.prep.test_prep_pods import NAME, recovers
from tests.releases import MakeRelease, PackedRelease, settings_on_free_ports

EVERNEAR = str(Path(sys.executable).with_name("evernear"))
pytestmark = pytest.mark.slow
A, B, C, D = (f"127.0.0.{last}" for last in (21, 22, 23, 24))


class TorchServes:
    """TorchServes of one release, each on another address. All that are ready are in DNS."""

    def __init__(self, names: NameServer, store: str, release: PackedRelease, directory: Path) -> None:
        self.grpc_port = free_ports(1)[0]
        self._names, self._store, self._release, self._directory = names, store, release, directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str) -> None:
        settings = settings_on_free_ports(host=host, grpc_inference_port=self.grpc_port)
        ports = {f"EVERNEAR_SERVING__{name.upper()}": str(port) for name, port in settings if name.endswith("_port")}
        environment = os.environ | ports | {"EVERNEAR_SERVING__HOST": host, "EVERNEAR_STORE": self._store}
        environment |= {"EVERNEAR_WORKDIR": str(self._directory / host)}
        fetch = [EVERNEAR, "pod", "fetch", "--release", self._release.version, "--sha256"]
        subprocess.run([*fetch, sha256_file(self._release.archive)], env=environment, check=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._running[host] = subprocess.Popen([EVERNEAR, "pod", "serve", "--without-token"], env=environment, **quiet)
        while not is_ready(f"http://{host}:{settings.inference_port}/ready"):  # the test's timeout ends this
            time.sleep(0.2)
        self._names.addresses = [*self._names.addresses, host]

    def delete(self, host: str) -> None:
        """Kill all processes of a server, as a pod that is deleted by force."""
        self._names.addresses = [address for address in self._names.addresses if address != host]
        with self._running.pop(host) as server:
            for process in [*psutil.Process(server.pid).children(recursive=True), server]:
                process.kill()

    def close(self) -> None:
        for host in list(self._running):
            self.delete(host)


def is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False


@pytest.fixture
def release(make_release: MakeRelease) -> PackedRelease:
    return make_release()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    with NameServer(caching=False).running() as names:
        use_name_server(names.port, monkeypatch)
        yield names


@pytest.fixture
def store(release: PackedRelease, tmp_path: Path) -> str:
    """A store whose champion is the release."""
    registry = Registry(open_store((tmp_path / "store").as_uri()))
    registry.publish(release.archive)
    registry.set_champion(release.version, None)
    return registry.uri


@pytest.fixture
def servers(names: NameServer, store: str, release: PackedRelease, tmp_path: Path) -> Iterator[TorchServes]:
    servers = TorchServes(names, store, release, tmp_path)
    servers.start(A)
    servers.start(B)
    yield servers
    servers.close()


@pytest.fixture
def prep(servers: TorchServes, store: str) -> Iterator[httpx.Client]:
    serving = ServingSettings(grpc_inference_port=servers.grpc_port)
    with prep_client(Settings(store=store, serving=serving, prep=PrepSettings(predictor_host=NAME))) as client:
        yield client


def test_killed_and_replaced_servers_are_used(prep: httpx.Client, servers: TorchServes, names: NameServer) -> None:
    assert recovers(prep, names)
    servers.delete(A)
    servers.start(C)
    servers.delete(B)
    assert recovers(prep, names)
    servers.delete(C)
    assert prep.post("/predict", json=png(8)).status_code == 503
    servers.start(D)
    assert recovers(prep, names)
