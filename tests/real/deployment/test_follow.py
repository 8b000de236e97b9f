"""`evernear serve --follow`: the server follows the champion's pointer of a store that it only
reads."""

import shutil
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from evernear.common.store import open_store
from evernear.deployment import follow
from evernear.deployment.follow import STATE_FILE, Follower, FollowState, follow_state
from evernear.errors import ServingError, TransientStoreError
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.promotions import Champion
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import home_of
from evernear.settings import Settings
from tests.real.deployment.test_foreground import start
from tests.releases import MakeRelease, PackedRelease, forge, settings_on_free_ports


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


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(workdir=tmp_path)


@pytest.fixture
def registry(settings: Settings) -> Registry:
    return Registry(open_store(settings.store_uri))


@pytest.fixture
def promote(registry: Registry, make_release: MakeRelease) -> Callable[[], PackedRelease]:
    def promote() -> PackedRelease:
        release = make_release()
        registry.publish(release.archive)
        registry.set_champion(release.version, registry.champion())
        return release

    return promote


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def follower(settings: Settings, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Follower, Target]:
    return new_follower(settings, lines, monkeypatch)


def new_follower(settings: Settings, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Follower, Target]:
    target = Target(settings)
    monkeypatch.setattr(follow, "LocalTarget", lambda _: target)
    monkeypatch.setattr(follow, "FIRST_PAUSE_S", 0.0)
    return Follower(settings, lines.append), target


def state(settings: Settings) -> FollowState:
    found = follow_state(home_of(settings.workdir))
    assert found is not None
    return found


def test_follower_switches_to_each_champion_and_back(
    follower: tuple[Follower, Target],
    settings: Settings,
    registry: Registry,
    promote: Callable[[], PackedRelease],
    lines: list[str],
):
    following, target = follower
    following.poll()
    following.poll()
    assert lines == [
        f"No release has been promoted in {registry.uri} yet; run `evernear run` first. No release is live; this is "
        "tried again."
    ]
    first = promote()
    following.poll()
    following.poll()
    second = promote()
    following.poll()
    champion = registry.champion()
    assert champion is not None
    registry.roll_back(champion)
    following.poll()
    assert target.switched == [first.version, second.version, first.version]
    assert lines[1:] == [
        f"Release {first.version} is live.",
        f"Release {second.version} is live, after {first.version}.",
        f"Release {first.version} is live, after {second.version}.",
    ]
    assert (state(settings).version, state(settings).fault) == (first.version, "")


def test_release_that_fails_is_reported_once_and_the_live_one_stays(
    follower: tuple[Follower, Target], settings: Settings, promote: Callable[[], PackedRelease], lines: list[str]
):
    following, target = follower
    first = promote()
    following.poll()
    second = promote()
    target.broken.add(second.version)
    for _ in range(3):
        following.poll()
    assert target.switched.count(second.version) == 3
    assert len(lines) == 2
    assert f"Release {second.version} fails its smoke test. Release {first.version} stays live" in lines[1]
    assert state(settings).version == first.version
    assert "fails its smoke test" in state(settings).fault
    target.broken.clear()
    following.poll()
    assert lines[2] == f"Release {second.version} is live, after {first.version}."
    assert (state(settings).version, state(settings).fault) == (second.version, "")


def test_failed_attempts_are_repeated_with_longer_pauses(
    follower: tuple[Follower, Target], promote: Callable[[], PackedRelease], monkeypatch: pytest.MonkeyPatch
):
    following, target = follower
    target.broken.add(promote().version)
    now_s = 0.0
    monkeypatch.setattr(follow, "FIRST_PAUSE_S", 10.0)
    monkeypatch.setattr(follow, "JITTER", 0.0)
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now_s))
    attempts: list[float] = []
    while now_s < 100:
        before = len(target.switched)
        following.poll()
        if len(target.switched) > before:
            attempts.append(now_s)
        now_s += 1
    assert attempts == [0, 10, 30, 70]


def test_unreachable_store_and_pruned_or_damaged_archives_leave_the_release_live(
    follower: tuple[Follower, Target],
    settings: Settings,
    registry: Registry,
    promote: Callable[[], PackedRelease],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    following, target = follower
    first = promote()
    following.poll()
    with monkeypatch.context() as outage:
        outage.setattr(Registry, "champion", raise_unreachable)
        following.poll()
        following.poll()
    assert "unreachable" in state(settings).fault
    following.poll()
    assert lines[1:] == [
        f"The store is unreachable. Release {first.version} stays live; this is tried again.",
        f"Release {first.version} is the champion and is live.",
    ]
    assert state(settings).fault == ""
    second = promote()
    open_store(settings.store_uri).put(registry.get(second.version).archive_key, b"damaged")
    following.poll()
    following.poll()
    assert target.switched == [first.version]
    assert len(lines) == 4
    assert "stays live" in lines[3]


def raise_unreachable(_: Registry) -> Champion:
    raise TransientStoreError("The store is unreachable.")


def test_restart_serves_the_last_release_although_the_store_is_unreachable(
    follower: tuple[Follower, Target],
    settings: Settings,
    promote: Callable[[], PackedRelease],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    first = promote()
    follower[0].start()
    lines.clear()
    monkeypatch.setattr(Registry, "champion", raise_unreachable)
    restarted, target = new_follower(settings, lines, monkeypatch)
    restarted.start()
    assert target.switched == [first.version]
    assert lines[0] == f"Release {first.version} is live again, from this machine's disk."
    assert "unreachable" in lines[1]


def test_restart_does_not_serve_a_changed_file(
    follower: tuple[Follower, Target],
    settings: Settings,
    promote: Callable[[], PackedRelease],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    first = promote()
    follower[0].start()
    follower[1].stored_archive(first.version).write_bytes(b"changed")
    restarted, target = new_follower(settings, lines, monkeypatch)
    restarted.start()
    assert target.switched == [first.version]
    assert lines[-1] == f"Release {first.version} is live."
    home = home_of(settings.workdir)
    (home / STATE_FILE).write_text("{")
    assert follow_state(home) is None


def test_server_follows_verifies_and_keeps_the_old_release(
    make_release: MakeRelease, registry: Registry, promote: Callable[[], PackedRelease], tmp_path: Path
):
    first = promote()
    settings = Settings(workdir=tmp_path, serving=settings_on_free_ports())
    image, _ = open_release(first.archive, tmp_path / "opened").smoke_queries()[0]
    server = start(settings, "--follow", before="from evernear.deployment import follow; follow.POLL_S = 0.2")
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        assert "Following" in server.stdout.readline()
        assert Client.of(settings).predict(image).version == first.version
        second = promote()
        await_version(settings, image, second.version)
        broken = forge(make_release(), tmp_path / "broken.mar", handler_py=b"raise RuntimeError('no')\n")
        registry.publish(broken.archive)
        registry.set_champion(broken.version, registry.champion())
        while f"Release {broken.version}" not in (line := server.stderr.readline()):
            assert line
        assert f"Release {second.version} stays live" in line
        assert Client.of(settings).predict(image).version == second.version
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 0
        assert not torchserve.processes(home_of(tmp_path))
    finally:
        server.kill()
        server.communicate()
        torchserve.stop_server(home_of(tmp_path))


def await_version(settings: Settings, image: bytes, version: str) -> None:
    deadline_s = time.monotonic() + 120
    while Client.of(settings).predict(image).version != version:  # no request fails while the server switches
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
