"""A pod's containers, probes and hook, run as processes in the order of a kubelet.

If the kernel allows it, each container has separate process, mount and user namespaces:
the server is process 1 of an unprivileged user on a read-only root file system.
Containers share the host's network, so each pod has its own ports.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import requests

from evernear.common.disk import sha256_file
from evernear.release.archive_reader import ReleaseParts
from evernear.serving.client import Format, Target
from evernear.serving.pod import GRACE_PERIOD_S
from evernear.settings import ServingSettings, Settings
from tests.releases import PackedRelease, settings_on_free_ports

FORMATS: tuple[Format, ...] = ("rest", "grpc")
EVERNEAR = str(Path(sys.executable).with_name("evernear"))
CONTAINER = str(Path(__file__).with_name("container.sh"))
NAMESPACES = ["--user", "--map-user=65532", "--map-group=65532", "--keep-caps", "--mount", "--pid", "--fork"]
PERIOD_S = 3  # of the startup probe, whose process uses a core for a second
STORE_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")


class Pod:
    """One pod; ``directory`` is on the node, with the pod's emptyDir, /tmp and Secret in it."""

    def __init__(self, directory: Path, token: str | None = None, removal_s: float = 10) -> None:
        self.removal_s = removal_s
        self.serving: ServingSettings = settings_on_free_ports()
        self.workdir, self._secret, self._tmp = (directory / name for name in ("work", "secret", "tmp"))
        for path in (self.workdir, self._secret, self._tmp):
            path.mkdir(parents=True)
        self._token = token
        if token is not None:
            (self._secret / "token").write_text(token + "\n")
        self._log = directory / "log"
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.serving.inference_port

    @property
    def log(self) -> str:
        """The server's console."""
        return self._log.read_text(errors="replace")

    @property
    def settings(self) -> Settings:
        return Settings(workdir=self.workdir, serving=self.serving)

    def target(self, token: str | None, format: Format = "rest") -> Target:
        return dataclasses.replace(Target.remote(self.settings, "127.0.0.1", format), token=lambda: token)

    def fetch(self, store: str, version: str, sha256: str) -> subprocess.CompletedProcess[str]:
        """Run the init container, which alone has access to the store."""
        environment = {name: os.environ[name] for name in STORE_VARIABLES if name in os.environ}
        command = [*self._container_command(), EVERNEAR, "pod", "fetch", "--release", version, "--sha256", sha256]
        environment |= self._environment(contained=True) | {"EVERNEAR_STORE": store}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def start(self, *flags: str) -> None:
        """Start the container; its console is the pod's log."""
        command = [*self._container_command(), EVERNEAR, "pod", "serve", *flags]
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(command, env=self._environment(contained=True), stdout=log, stderr=log)

    def exec(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run an exec probe, as a process next to the server."""
        environment = self._environment(contained=False)
        return subprocess.run([EVERNEAR, "pod", command], env=environment, capture_output=True, text=True, timeout=120)

    def await_started(self, timeout_s: float = 120) -> str:
        """Repeat the startup probe until it succeeds; returns its output."""
        deadline_s = time.monotonic() + timeout_s
        while (probe := self.exec("ready")).returncode:
            assert self.is_alive(), self.log
            assert time.monotonic() < deadline_s, probe.stderr + self.log
            time.sleep(PERIOD_S)
        return probe.stdout

    def probe(self, timeout_s: float = 5) -> int:
        """Run the readiness probe; returns its status, 0 without a response."""
        try:
            return requests.get(f"http://127.0.0.1:{self.port}/ready", timeout=timeout_s).status_code
        except requests.RequestException:
            return 0

    def is_alive(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def first_process(self) -> psutil.Process:
        """Process 1 of the container, as the node sees it."""
        assert self._server is not None
        process = psutil.Process(self._server.pid)
        return process.children()[0] if can_contain() else process

    def delete(self) -> float:
        """Sleep as preStop does, send SIGTERM and wait until all processes end; returns the seconds
        that this took.

        A pod that outlives its grace period is killed, which is a failure.
        """
        started_s = time.monotonic()
        time.sleep(self.removal_s)
        assert self._server is not None
        self.first_process().terminate()
        try:
            self._server.wait(timeout=GRACE_PERIOD_S - (time.monotonic() - started_s))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the pod was not gone after {GRACE_PERIOD_S} s: {self.log}") from None
        return time.monotonic() - started_s

    def kill(self) -> None:
        """Kill all processes of the pod."""
        if self._server is not None:
            for process in psutil.Process(self._server.pid).children(recursive=True) if self.is_alive() else []:
                process.kill()
            self._server.kill()
            self._server.wait()

    def _container_command(self) -> list[str]:
        if not can_contain():
            return []
        volumes = [str(path) for path in (self.workdir, self._secret, self._tmp)]
        return ["unshare", *NAMESPACES, "--kill-child", "--", "sh", CONTAINER, *volumes]

    def _environment(self, *, contained: bool) -> Mapping[str, str]:
        inside = contained and can_contain()
        secret = "/mnt" if inside else str(self._secret)
        numbers = {
            f"EVERNEAR_SERVING__{name.upper()}": str(value)
            for name, value in self.serving.model_dump(exclude_defaults=True).items()
        }
        return {
            "PATH": os.environ["PATH"],
            "HOME": "/tmp" if inside else str(self._tmp),
            "EVERNEAR_WORKDIR": "/srv" if inside else str(self.workdir),
            **({"EVERNEAR_TOKEN_FILE": f"{secret}/token"} if self._token is not None else {}),
            **numbers,
        }


def can_contain() -> bool:
    """Whether this kernel allows user namespaces with mounts, and /tmp is not an ancestor of this
    checkout; cached."""
    if not _contains:
        script = 'mount --bind /srv /tmp && exec setpriv --no-new-privs "$0" -c "import evernear"'
        command = ["unshare", *NAMESPACES, "sh", "-c", script, sys.executable]
        try:
            _contains.append(subprocess.run(command, capture_output=True).returncode == 0)
        except FileNotFoundError:
            _contains.append(False)
    return _contains[0]


_contains: list[bool] = []


TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Shipped:
    """A published release."""

    release: PackedRelease
    parts: ReleaseParts
    store: str

    @property
    def version(self) -> str:
        return self.release.version

    @property
    def sha256(self) -> str:
        return sha256_file(self.release.archive)

    @property
    def image(self) -> bytes:
        return self.parts.smoke_queries()[0][0]


class StartPod(Protocol):
    def __call__(self, removal_s: float = 10) -> Pod: ...
