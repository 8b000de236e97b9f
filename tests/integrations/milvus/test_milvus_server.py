"""A real TorchServe that searches a gallery in a Milvus server."""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evernear.deployment.target import smoke
from evernear.embedding.embeddings import Embeddings
from evernear.errors import ServingError
from evernear.index.build import build_index
from evernear.settings import IndexSettings
from tests.ports import free_ports, wait_for_port
from tests.releases import System, release_maker
from tests.served import serving

StartMilvus = Callable[[], subprocess.Popen[bytes]]
RECOVERY_TIMEOUT_S = 60


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def start_milvus(free_port: int, tmp_path: Path) -> Iterator[StartMilvus]:
    """Start a server of Milvus Lite and wait until it accepts connections."""
    servers: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        milvus_lite = Path(sys.executable).with_name("milvus-lite")
        servers.append(
            subprocess.Popen(
                [
                    milvus_lite,
                    "server",
                    "--data-dir",
                    tmp_path / "milvus",
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(free_port),
                ]
            )
        )
        wait_for_port(free_port, servers[-1])
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_release_is_served_and_survives_a_restart_of_milvus(
    system: System, start_milvus: StartMilvus, free_port: int, tmp_path: Path
):
    milvus = start_milvus()
    settings = IndexSettings(backend="milvus", uri=f"http://127.0.0.1:{free_port}")
    embeddings = Embeddings.open(system.index_dir.parent / "embeddings")
    build_index(embeddings, system.dataset.labels, settings, tmp_path / "index")
    in_milvus = dataclasses.replace(system, index_dir=tmp_path / "index")
    (tmp_path / "release").mkdir()
    release = release_maker(in_milvus, lambda: tmp_path / "release")()

    with serving(release, tmp_path / "work") as served:
        assert smoke(served.client(), served.parts) == len(served.parts.smoke_queries())

        milvus.kill()
        milvus.wait()
        with pytest.raises(ServingError, match="The gallery cannot be searched at the moment"):
            served.client().predict(served.parts.smoke_queries()[0][0])

        start_milvus()
        deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
        while True:
            try:
                smoke(served.client(), served.parts)
                break
            except ServingError:
                assert time.monotonic() < deadline_s, "the server did not recover"
                time.sleep(0.2)
