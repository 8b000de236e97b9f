"""A real SeaweedFS server, started as in ``deploy/overlays/local``.

``TEST_WEED`` is the path of the ``weed`` binary."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml

from tests import ROOT

LOCAL = ROOT / "deploy/overlays/local"
SERVER = next(
    document["spec"]["template"]["spec"]
    for document in yaml.safe_load_all((LOCAL / "seaweedfs.yaml").read_text())
    if document["kind"] == "Deployment"
)
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
S3_PORTS = ("s3.port", "s3.port.grpc")


@dataclass
class SeaweedFS:
    """A running server."""

    ports: dict[str, int]
    pid: int
    binary: Path

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3.port']}"

    def make_buckets(self, *names: str) -> str:
        """Run the pod's postStart command and return its output."""
        environment = {
            **os.environ,
            "PATH": f"{self.binary.parent}:{os.environ['PATH']}",
            "SEAWEEDFS_S3": self.endpoint,
            "SEAWEEDFS_MASTER": f"127.0.0.1:{self.ports['master.port']}.{self.ports['master.port.grpc']}",
        }
        completed = subprocess.run(
            ["sh", str(LOCAL / "seaweedfs/buckets.sh"), *names],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout + completed.stderr


@contextmanager
def seaweedfs(directory: Path, config: Path) -> Iterator[SeaweedFS]:
    """Start the server on free ports, with its data in ``directory`` and the S3 identities in
    ``config``."""
    if "TEST_WEED" not in os.environ:
        pytest.skip("TEST_WEED does not name a SeaweedFS binary")
    binary = Path(os.environ["TEST_WEED"])
    assert binary.name == "weed", "TEST_WEED must end in /weed"
    (container,) = SERVER["containers"]
    names = (*PORTS, *S3_PORTS)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        ports = {name: sock.getsockname()[1] for name, sock in zip(names, sockets, strict=True)}
    substitutions = {"/usr/bin/weed": str(binary), "-dir=/data": f"-dir={directory}"}
    substitutions["-s3.config=/identities/s3.json"] = f"-s3.config={config}"
    words = [*container["command"], *container["args"]]
    assert substitutions.keys() <= {*words}, "the manifest has changed"
    command = [*(substitutions.get(word, word) for word in words), *(f"-{name}={port}" for name, port in ports.items())]
    if "-s3.port.lance" in subprocess.run([binary, "help", "server"], capture_output=True, text=True).stderr:
        command.append("-s3.port.lance=0")  # as deploy/README.md says for versions after 4.34
    environment = os.environ | {sock["name"]: sock["value"] for sock in container["env"]}
    directory.mkdir(exist_ok=True)
    log = directory.with_suffix(".log")
    with log.open("ab") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            running = SeaweedFS(ports, process.pid, binary)
            deadline_s = time.monotonic() + 120
            while not _answers(running.endpoint):
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline_s, log.read_text()[-2000:]
                time.sleep(0.1)
            yield running
        finally:
            process.kill()  # a graceful shutdown takes 10 s


def _answers(endpoint: str) -> bool:
    try:
        with urlopen(f"{endpoint}/healthz", timeout=5):
            return True
    except (URLError, OSError):
        return False
