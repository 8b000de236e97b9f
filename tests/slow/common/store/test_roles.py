"""The commands of each role run with exactly its policy, on a real SeaweedFS."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from evernear.kubeflow import GOLDEN
from tests.loopback.kfp import KfpServer
from tests.ports import free_ports
from tests.real.common.store.test_permissions import EMPTY, SecuredServer, seaweedfs_with_users
from tests.real.scenarios.workspace import PORTS, write_digits

pytestmark = pytest.mark.slow
ENDED = (0, -signal.SIGTERM)


@dataclass
class Roles:
    """Runs commands with the keys of a role. Those of the server share a working directory."""

    server: SecuredServer
    directory: Path
    ports: list[int] = field(default_factory=lambda: free_ports(8))

    @property
    def images(self) -> Path:
        return self.directory / "images"

    @property
    def source(self) -> tuple[str, str]:
        return "--source", f"folder:{self.images}"

    def environment(self, user: str) -> dict[str, str]:
        names = (*(f"SERVING__{name.upper()}" for name in PORTS), "PREP__PORT", "CONSOLE__PORT", "WATCH__HEALTH_PORT")
        access_key, secret_key = self.server.keys[user]
        return {
            **os.environ,
            **{f"EVERNEAR_{name}": str(port) for name, port in zip(names, self.ports, strict=True)},
            "AWS_ENDPOINT_URL_S3": self.server.endpoint,
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "EVERNEAR_STORE": EMPTY,
            "EVERNEAR_SERVING__QUERY_LOG": "images",
            "EVERNEAR_WORKDIR": str(self.directory / ("server" if user == "shipper" else user)),
        }

    def run(self, user: str, *command: str, **variables: str) -> str:
        words = [sys.executable, "-m", "evernear", *command]
        environment = self.environment(user) | variables
        completed = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    @contextmanager
    def running(self, user: str, *command: str, until_line: str) -> Iterator[str]:
        """Start a command, yield its line with ``until_line``, and end it with SIGTERM."""
        words = [sys.executable, "-u", "-m", "evernear", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(words, env=self.environment(user), text=True, **pipes) as process:
            try:
                assert process.stdout is not None
                lines = [line := process.stdout.readline()]
                while until_line not in line:
                    assert line, "".join(lines)
                    lines.append(line := process.stdout.readline())
                yield line
                process.terminate()
                rest = process.communicate(timeout=120)[0]
                assert process.returncode in ENDED, rest
                assert "is not permitted" not in "".join(lines) + rest
            finally:
                process.kill()


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    """With a champion, which the keys of the pipeline have trained."""
    directory = tmp_path_factory.mktemp("roles")
    (directory / "seaweedfs").mkdir()
    with seaweedfs_with_users(directory / "seaweedfs") as server:
        roles = Roles(server, directory)
        write_digits(roles.images)
        trained = roles.run("writer", "run", *roles.source, "--preset", "quick", "--set", "target=registry")
        assert "promoted" in trained
        (directory / "server").mkdir()
        yield roles


def test_each_role_lists_and_checks_what_it_may_read(roles: Roles) -> None:
    assert "champion" in roles.run("server", "registry", "list")
    assert "1 release, champion " in roles.run("server", "doctor", "store")
    assert "1 release, champion " in roles.run("watcher", "doctor", "store")
    assert "conditional writes; 1 release, champion " in roles.run("writer", "doctor", "store")


def test_server_prep_and_sidecar_serve_and_ship(roles: Roles, tmp_path: Path) -> None:
    (release,) = json.loads(roles.run("server", "registry", "list", "--json"))
    shown = json.loads(roles.run("server", "registry", "show", release["version"], "--json"))
    pinned = ("--release", release["version"], "--sha256", shown["archive_sha256"])
    roles.ports = free_ports(8)  # others may have taken those of an earlier minute
    assert "Fetched release" in roles.run("server", "pod", "fetch", *pinned, EVERNEAR_WORKDIR=str(tmp_path))
    image = next(roles.images.rglob("*.png"))
    with roles.running("server", "serve", "--follow", until_line="Following"):
        assert release["version"] in roles.run("server", "predict", str(image), "--json")
        with roles.running("server", "prep", until_line="/predict") as line:
            url = re.findall(r"http://\S+/predict", line)[0]
            answer = httpx.post(url, json={"data": base64.b64encode(image.read_bytes()).decode()}, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["version"] == release["version"]
        with roles.running("shipper", "watch", "--ship", until_line="Shipping the query log"):
            pass
    assert "Shipped 1 file" in roles.run("shipper", "watch", "--ship", "--now")


def test_watcher_checks_and_starts_a_run(roles: Roles) -> None:
    write_digits(roles.images, labels="4")
    with KfpServer() as kfp:
        for pipeline in ("continuous_training", "reindex"):
            kfp.publish(GOLDEN / f"{pipeline}.yaml", version="1")
        acting = ("--set", "watch.policy=start", "--set", f"pipeline.endpoint={kfp.url}")
        with roles.running("watcher", "watch", *roles.source, *acting, until_line="reindex"):
            kfp.wait_for_run(timeout_s=120)
            assert "last check" in roles.run("watcher", "watch", "--status")


def test_console_opens_with_the_keys_of_the_pipeline(roles: Roles) -> None:
    with roles.running("writer", "console", until_line="/review") as line:
        url = re.findall(r"http://\S+", line)[0]
        with httpx.Client(follow_redirects=True) as client:
            for page in (url, url.replace("/review", "/releases")):
                answer = client.get(page)
                assert answer.status_code == 200, answer.text
