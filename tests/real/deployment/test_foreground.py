"""`evernear serve --foreground`, as a container runs it: no process outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evernear.common.store import open_store
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.endpoints import home_of
from evernear.settings import Settings
from tests.releases import MakeRelease, settings_on_free_ports


def start(settings: Settings, *words: str, before: str = "") -> subprocess.Popen[str]:
    """Start `evernear serve` with ``words``, after the Python statement ``before``."""
    ports = {
        f"EVERNEAR_SERVING__{name.upper()}": str(value)
        for name, value in settings.serving.model_dump().items()
        if name.endswith("_port")
    }
    program = f"{before}\nfrom evernear.__main__ import main\nmain()"
    command = [sys.executable, "-c", program, "serve", *words, "--workdir", settings.workdir]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | ports, text=True, **pipes)


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_foreground_server_ends_with_its_command(
    make_release: MakeRelease, tmp_path: Path, end: signal.Signals, exit_code: int
) -> None:
    release = make_release()
    settings = Settings(workdir=tmp_path, serving=settings_on_free_ports())
    registry = Registry(open_store(settings.store_uri))
    registry.publish(release.archive)
    registry.set_champion(release.version, None)
    server = start(settings, "--foreground")
    home = home_of(tmp_path)
    try:
        assert server.stdout is not None
        assert release.version in server.stdout.readline()
        image, query = open_release(release.archive, tmp_path / "opened").smoke_queries()[0]
        assert Client.of(settings).predict(image).pred == query.pred
        assert torchserve.processes(home)
        server.send_signal(end)
        _, stderr = server.communicate(timeout=60)
        assert server.returncode == exit_code
        assert ("Interrupted. TorchServe answered the requests in flight" in stderr) is (end == signal.SIGINT)
        assert "Traceback" not in stderr
        _, alive = psutil.wait_procs(torchserve.processes(home), timeout=30)
        assert alive == []
    finally:
        server.kill()
        server.communicate()
        torchserve.stop_server(home)


@pytest.mark.slow
def test_interrupted_start_leaves_no_process(make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release()
    settings = Settings(workdir=tmp_path, serving=settings_on_free_ports())
    registry = Registry(open_store(settings.store_uri))
    registry.publish(release.archive)
    registry.set_champion(release.version, None)
    home = home_of(tmp_path)
    with start(settings) as server:
        while not torchserve.processes(home):
            assert server.poll() is None
            time.sleep(0.05)
        server.send_signal(signal.SIGINT)
        _, stderr = server.communicate(timeout=60)
    assert (server.returncode, stderr) == (
        130,
        f"evernear: Interrupted. TorchServe was stopped; `evernear serve --workdir {tmp_path}` tries again.\n",
    )
    assert torchserve.processes(home) == []
