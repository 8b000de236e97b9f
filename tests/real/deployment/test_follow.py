"""`evernear serve --follow` and `--foreground`: the server follows the champion's pointer of a
store that it only reads, and no process outlives the command."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from evernear.common.store import open_store
from evernear.deployment import follow
from evernear.deployment.follow import STATE_FILE, Follower, await_champion, follow_state
from evernear.errors import PredictionRejectedError, ServingError, TransientStoreError
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.promotions import Champion
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import home_of
from evernear.settings import Settings
from tests.releases import MakeRelease, forge, settings_on_free_ports
from tests.waiting import until


class Target:
    """Records what a server without a process would load; the registry and the archives are
    real."""

    def __init__(self, settings: Settings) -> None:
        self.registry = Registry(open_store(settings.store_uri))
        self.home = home_of(settings.workdir)
        self.switched: list[str] = []
        self.broken: set[str] = set()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        yield

    def fetch(self, version: str, directory: Path) -> Path:
        self.registry.fetch(version, directory / "release.mar")
        return directory / "release.mar"

    def switch(self, archive: Path, parts: ReleaseParts) -> None:
        version = parts.manifest.version
        self.switched.append(version)
        if version in self.broken:
            raise ServingError(f"Release {version} fails its smoke test.")
        stored = self.stored_archive(version)
        stored.parent.mkdir(parents=True, exist_ok=True)
        if archive != stored:
            shutil.copy(archive, stored)

    def stored_archive(self, version: str) -> Path:
        return model_store(self.home) / f"embedding-{version}.mar"


@dataclass
class Following:
    """A follower of a new store, and what it has printed."""

    settings: Settings
    make_stub: MakeRelease
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = Registry(open_store(self.settings.store_uri))
        self.start()

    def start(self) -> None:
        self.target = Target(self.settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(follow, "LocalTarget", lambda _: self.target)
            self.follower = Follower(self.settings, self.lines.append)

    def promote(self) -> str:
        release = self.make_stub()
        self.registry.publish(release.archive)
        self.registry.set_champion(release.version, self.registry.champion())
        return release.version

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.follower.poll()

    def state(self) -> tuple[str | None, str]:
        """The live version, and the fault."""
        found = follow_state(home_of(self.settings.workdir))
        assert found is not None
        return found.version, found.fault


@pytest.fixture
def following(make_stub: MakeRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Following:
    monkeypatch.setattr(follow, "FIRST_PAUSE_S", 0.0)
    return Following(Settings(workdir=tmp_path), make_stub)


def test_follower_switches_to_each_champion_and_back(following: Following) -> None:
    following.poll(2)
    assert following.lines == [
        f"No release has been promoted in {following.registry.uri} yet; run `evernear run` first. No release is live; "
        "this is tried again."
    ]
    first = following.promote()
    following.poll(2)
    second = following.promote()
    following.poll()
    champion = following.registry.champion()
    assert champion is not None
    following.registry.roll_back(champion)
    following.poll()
    assert following.target.switched == [first, second, first]
    assert following.lines[1:] == [
        f"Release {first} is live.",
        f"Release {second} is live, after {first}.",
        f"Release {first} is live, after {second}.",
    ]
    assert following.state() == (first, "")


def test_release_that_fails_is_reported_once_and_the_live_one_stays(following: Following) -> None:
    first = following.promote()
    following.poll()
    second = following.promote()
    following.target.broken.add(second)
    following.poll(3)
    assert following.target.switched.count(second) == 3
    assert len(following.lines) == 2
    assert f"Release {second} fails its smoke test. Release {first} stays live" in following.lines[1]
    version, fault = following.state()
    assert (version, "fails its smoke test" in fault) == (first, True)
    following.target.broken.clear()
    following.poll()
    assert following.lines[2] == f"Release {second} is live, after {first}."
    assert following.state() == (second, "")


def test_failed_attempts_are_repeated_with_longer_pauses(following: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    following.target.broken.add(following.promote())
    now_s = 0.0
    monkeypatch.setattr(follow, "FIRST_PAUSE_S", 10.0)
    monkeypatch.setattr(follow, "JITTER", 0.0)
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now_s))
    attempts: list[float] = []
    while now_s < 100:
        before = len(following.target.switched)
        following.poll()
        if len(following.target.switched) > before:
            attempts.append(now_s)
        now_s += 1
    assert attempts == [0, 10, 30, 70]


def test_unreachable_store_and_damaged_archives_leave_the_release_live(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = following.promote()
    following.poll()
    with monkeypatch.context() as outage:
        outage.setattr(Registry, "champion", raise_unreachable)
        following.poll(2)
    assert "unreachable" in following.state()[1]
    following.poll()
    assert following.lines[1:] == [
        f"The store is unreachable. Release {first} stays live; this is tried again.",
        f"Release {first} is the champion and is live.",
    ]
    assert following.state() == (first, "")
    second = following.promote()
    open_store(following.settings.store_uri).put(following.registry.get(second).archive_key, b"damaged")
    following.poll(2)
    assert following.target.switched == [first]
    assert len(following.lines) == 4
    assert "stays live" in following.lines[3]


def raise_unreachable(_: Registry) -> Champion:
    raise TransientStoreError("The store is unreachable.")


def test_restart_serves_the_last_release_although_the_store_is_unreachable(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = following.promote()
    following.follower.start()
    monkeypatch.setattr(Registry, "champion", raise_unreachable)
    following.start()
    following.follower.start()
    assert following.target.switched == [first]
    assert following.lines[1] == f"Release {first} is live again, from this machine's disk."
    assert "unreachable" in following.lines[2]


def test_restart_does_not_serve_a_changed_file(following: Following) -> None:
    first = following.promote()
    following.follower.start()
    following.target.stored_archive(first).write_bytes(b"changed")
    following.start()
    following.follower.start()
    assert following.target.switched == [first]
    assert following.lines[-1] == f"Release {first} is live."
    home = home_of(following.settings.workdir)
    (home / STATE_FILE).write_text("{")
    assert follow_state(home) is None


def test_each_reason_to_wait_for_a_champion_is_reported_once(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`evernear serve --wait`."""
    registry, release, reachable, polls = following.registry, following.make_stub(), Registry.champion, 0

    def champion(self: Registry) -> object:
        nonlocal polls
        polls += 1
        if polls in (3, 4):
            raise TransientStoreError("The store is unreachable.")
        if polls == 5:
            registry.publish(release.archive)
        if polls == 7:
            registry.set_champion(release.version, None)
        return reachable(self)

    monkeypatch.setattr(follow, "CHAMPION_POLL_S", 0.0)
    monkeypatch.setattr(Registry, "champion", champion)
    await_champion(following.settings, following.lines.append)
    assert polls == 7
    first, unreachable, unpromoted = following.lines
    assert first == f"No release has been promoted in {registry.uri} yet; run `evernear run` first. Waiting."
    assert unreachable == "The store is unreachable. Waiting."
    assert f"registry promote {release.version}" in unpromoted


@pytest.mark.usefixtures("without_torch")
def test_server_follows_verifies_and_keeps_the_old_release(
    following: Following, make_stub: MakeRelease, tmp_path: Path
) -> None:
    first, registry = following.promote(), following.registry
    settings = Settings(workdir=tmp_path, serving=settings_on_free_ports())
    registry.fetch(first, tmp_path / "first.mar")
    image, _ = open_release(tmp_path / "first.mar", tmp_path / "opened").smoke_queries()[0]
    server = start(settings, "--follow", before="from evernear.deployment import follow; follow.POLL_S = 0.2")
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        assert "Following" in server.stdout.readline()
        assert Client.of(settings).predict(image).version == first
        second = following.promote()
        until(lambda: Client.of(settings).predict(image).version == second)  # no request fails meanwhile
        broken = forge(make_stub(), tmp_path / "broken.mar", handler_py=b"raise RuntimeError('no')\n")
        registry.publish(broken.archive)
        registry.set_champion(broken.version, registry.champion())
        while f"Release {broken.version}" not in (line := server.stderr.readline()):
            assert line
        assert f"Release {second} stays live" in line
        assert Client.of(settings).predict(image).version == second
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 0
        assert not torchserve.processes(home_of(tmp_path))
    finally:
        server.kill()
        server.communicate()
        torchserve.stop_server(home_of(tmp_path))


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


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_foreground_server_ends_with_its_command(
    following: Following, tmp_path: Path, end: signal.Signals, exit_code: int
) -> None:
    settings, version = Settings(workdir=tmp_path, serving=settings_on_free_ports()), following.promote()
    server = start(settings, "--foreground")
    home = home_of(tmp_path)
    try:
        assert server.stdout is not None
        assert version in server.stdout.readline()
        with pytest.raises(PredictionRejectedError, match="is not a PNG"):
            Client.of(settings).predict(b"text")
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
@pytest.mark.usefixtures("without_torch")
def test_interrupted_start_leaves_no_process(following: Following, tmp_path: Path) -> None:
    settings, _ = Settings(workdir=tmp_path, serving=settings_on_free_ports()), following.promote()
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
