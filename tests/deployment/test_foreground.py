"""`evernear serve --foreground`, as a container runs it: it serves, and nothing outlives it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from releases import MakeRelease, settings_on_free_ports

from evernear.release.parts import open_release
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.connection import home_of
from evernear.settings import Settings
from evernear.store import open_store


@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_server_in_the_foreground_ends_with_its_command(
    make_release: MakeRelease, tmp_path: Path, end: signal.Signals
) -> None:
    release = make_release()
    settings = Settings(workdir=tmp_path, serving=settings_on_free_ports())
    registry = Registry(open_store(settings.store_uri))
    registry.publish(release.archive)
    registry.set_champion(release.version, None)
    ports = {
        f"EVERNEAR_SERVING__{name.upper()}": str(value)
        for name, value in settings.serving.model_dump().items()
        if name.endswith("_port")
    }
    command = [Path(sys.executable).with_name("evernear"), "serve", "--foreground", "--workdir", tmp_path]
    server = subprocess.Popen(command, env=os.environ | ports, stdout=subprocess.PIPE, text=True)
    home = home_of(tmp_path)
    try:
        assert server.stdout is not None
        assert release.version in server.stdout.readline()
        image, query = open_release(release.archive, tmp_path / "opened").smoke_queries()[0]
        assert Client.of(settings).predict(image).pred == query.pred
        assert torchserve.processes(home)
        server.send_signal(end)
        server.communicate(timeout=60)
        assert server.returncode == (0 if end == signal.SIGTERM else -signal.SIGKILL)
        _, left = psutil.wait_procs(torchserve.processes(home), timeout=30)
        assert left == []
    finally:
        server.kill()
        server.communicate()
        torchserve.stop(home)
