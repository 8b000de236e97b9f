"""Rollouts on a real TorchServe under continuous client load."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from releases import MakeRelease, PackedRelease, forge, settings_on_free_ports

from evernear import deployment
from evernear.deployment import local, promote, roll_back
from evernear.errors import (
    ConflictError,
    EvernearError,
    IntegrityError,
    ServerUnreachableError,
    ServingError,
    SettingsError,
    StoreError,
    TransientStoreError,
)
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.registry import Cause, Registry
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import home_of, read_state
from evernear.serving.management import Management
from evernear.settings import Settings
from evernear.store import open_store

BROKEN = b"class H:\n    def initialize(self, c): raise RuntimeError('no')\n    def handle(self, d, c): ...\n"
FAILING = b"class H:\n    def initialize(self, c): ...\n    def handle(self, d, c): raise RuntimeError('no')\n"


class Site:
    """A working directory with a live champion."""

    def __init__(self, settings: Settings, make_release: MakeRelease, image: bytes) -> None:
        self.settings = settings
        self.image = image
        self.home = home_of(settings.workdir)
        self.registry = Registry(open_store(settings.store_uri))
        self._make_release = make_release

    @property
    def champion(self) -> str:
        champion = self.registry.champion()
        assert champion is not None
        return champion.version

    @property
    def registered(self) -> list[str]:
        return [model.version for model in Management(self.home).versions("embedding")]

    @property
    def default(self) -> str:
        return Client.of(self.settings).predict(self.image).version

    def candidate(self) -> PackedRelease:
        return self._make_release(parent=self.champion)

    def deploy(self, release: PackedRelease, settings: Settings | None = None) -> deployment.Deployment:
        return deployment.deploy(release.archive, release.verdict, settings or self.settings)

    @contextmanager
    def hammered(self) -> Iterator[set[str]]:
        """Send requests continuously, all of which must succeed; yields the versions that answered."""
        failures: list[str] = []
        versions: set[str] = set()
        stop = threading.Event()
        requests = [0] * 4

        def hammer(number: int) -> None:
            client = Client.of(self.settings)
            while not stop.wait(0.03):
                requests[number] += 1
                try:
                    versions.add(client.predict(self.image).version)
                except EvernearError as error:
                    failures.append(str(error))

        def await_one_more_request_of_each() -> None:
            before, deadline_s = list(requests), time.monotonic() + 240
            # The first may be in progress.
            while any(now < earlier + 2 for now, earlier in zip(requests, before, strict=True)):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)

        threads = [threading.Thread(target=hammer, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            await_one_more_request_of_each()
            yield versions
            await_one_more_request_of_each()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert failures == []
        assert versions


@pytest.fixture(scope="module")
def site(make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    settings = Settings(workdir=directory / "work", serving=settings_on_free_ports())
    first = make_release()
    parts: ReleaseParts = open_release(first.archive, directory / "opened")
    site = Site(settings, make_release, parts.read("smoke-00.png"))
    try:
        assert deployment.open_target(settings).status()["server"] == "down"
        deployed = site.deploy(first)
        assert (deployed.version, deployed.previous) == (first.version, None)
        assert deployed.smoke_queries == settings.serving.smoke_queries
        yield site
    finally:
        torchserve.stop(home_of(settings.workdir))
    assert torchserve.processes(site.home) == []
    assert deployment.open_target(settings).status()["server"] == "down"


def test_rollout_fails_no_request(site: Site) -> None:
    before, candidate = site.champion, site.candidate()
    with site.hammered() as versions:
        deployed = site.deploy(candidate)
    assert (deployed.version, deployed.previous) == (candidate.version, before)
    assert versions == {before, candidate.version}
    assert site.default == site.champion == candidate.version
    assert before in site.registered, "it stays registered for a rollback"
    assert deployment.open_target(site.settings).status() == {
        "server": "up",
        "url": deployed.url,
        "default": candidate.version,
        "ready_workers": 1,
        "registered": site.registered,
        "champion": candidate.version,
        "store": site.settings.store_uri,
    }
    # A repeated deployment, as after a late kill, succeeds:
    assert site.deploy(candidate).version == candidate.version
    assert site.champion == candidate.version


@pytest.mark.parametrize("fault", ["wrong answer", "does not load", "fails at a request"])
def test_failed_candidate_is_removed_and_the_champion_stays_live(site: Site, tmp_path: Path, fault: str) -> None:
    good = site.candidate()
    queries = json.loads(open_release(good.archive, tmp_path / "opened").read("smoke.json"))
    queries[-1]["dist"] += 0.01
    faulty, sentence = {
        "wrong answer": ({"smoke_json": json.dumps(queries).encode()}, "fails its smoke test"),
        "does not load": ({"handler_py": BROKEN}, "rejected POST /models"),
        "fails at a request": ({"handler_py": FAILING}, "fails its smoke test with smoke-00.png"),
    }[fault]
    candidate = forge(good, tmp_path / "faulty.mar", **faulty)
    champion, registered = site.champion, site.registered
    with site.hammered() as versions, pytest.raises(ServingError, match=sentence):
        site.deploy(candidate)
    assert versions == {champion}
    assert site.champion == champion
    assert site.registered == registered
    assert candidate.version in list(site.registry.list()), "an operator may still promote it"
    assert not list(model_store(site.home).glob(f"*{candidate.version}*"))


@pytest.mark.slow
def test_promotion_is_undone_if_the_champion_changes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release becomes champion while the candidate is being tested."""
    candidate, rival = site.candidate(), site.candidate()

    def smoke_and_lose(client: Client, parts: ReleaseParts) -> int:
        site.registry.publish(rival.archive)
        site.registry.set_champion(rival.version, site.registry.champion())
        return real_smoke(client, parts)

    real_smoke = local.smoke
    with monkeypatch.context() as patched, site.hammered():
        patched.setattr(local, "smoke", smoke_and_lose)
        with pytest.raises(ConflictError, match="champion changed"):
            site.deploy(candidate)
    assert site.champion == rival.version
    assert candidate.version not in site.registered

    # `serve` makes the server follow the registry, as after a kill before `set-default`:
    assert local.serve(site.settings) == rival.version
    assert site.default == rival.version


KILLED = """
import os, signal, sys
from pathlib import Path
from evernear.deployment import deploy, local
from evernear.settings import Settings

def die(source, target):
    target.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

local.shutil.copyfileobj = die
deploy(Path(sys.argv[1]), Path(sys.argv[2]), Settings.model_validate_json(sys.argv[3]))
"""


def test_next_deployment_removes_the_files_of_a_killed_one(site: Site) -> None:
    killed, candidate = site.candidate(), site.candidate()
    words = [sys.executable, "-c", KILLED, killed.archive, killed.verdict, site.settings.model_dump_json()]
    assert subprocess.run(words, timeout=120).returncode == -signal.SIGKILL
    assert temporary_files(site)
    site.deploy(candidate)
    assert temporary_files(site) == []


def temporary_files(site: Site) -> list[Path]:
    return [*site.home.glob(".*"), *model_store(site.home).glob(".*")]


def test_release_that_passed_its_smoke_test_stays_loaded_if_the_store_is_unreachable(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion, candidate = site.champion, site.candidate()

    def unreachable(*_: object, **__: object) -> None:
        raise TransientStoreError("http://s3 cannot be reached.")

    with monkeypatch.context() as patched, site.hammered() as versions:
        patched.setattr(Registry, "set_champion", unreachable)
        with pytest.raises(
            TransientStoreError, match=r"stays in place, but it may not be recorded .* cannot be reached"
        ):
            site.deploy(candidate)
    assert versions == {champion}
    assert candidate.version in site.registered
    with no_registration(monkeypatch), site.hammered():
        promote(candidate.version, site.settings)
    assert site.default == site.champion == candidate.version
    roll_back(site.settings)


def test_release_that_does_not_fit_on_the_disk_leaves_no_files(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    champion, candidate, registered = site.champion, site.candidate(), site.registered
    before = sorted(model_store(site.home).iterdir())
    full = shutil.disk_usage(site.home)._replace(free=candidate.archive.stat().st_size)
    with monkeypatch.context() as patched, site.hammered() as versions:
        patched.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(StoreError, match=r"The disk that holds .* is full; free some space and run again\."):
            site.deploy(candidate)
    assert versions == {champion}
    assert site.registered == registered
    assert sorted(model_store(site.home).iterdir()) == before


def test_next_deployment_unregisters_the_release_of_a_killed_one(site: Site) -> None:
    killed, candidate = site.candidate(), site.candidate()
    shutil.copy(killed.archive, model_store(site.home) / f"embedding-{killed.version}.mar")
    Management(site.home).register(f"embedding-{killed.version}.mar", site.settings.serving)
    assert killed.version in site.registered
    serving = site.settings.serving.model_copy(update={"keep_registered": 1})
    with site.hammered():
        site.deploy(candidate, site.settings.model_copy(update={"serving": serving}))
    assert site.registered == [candidate.version], "keep_registered=1 keeps only the champion"
    assert site.default == candidate.version


@contextmanager
def no_registration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("a release that is still registered was registered again")

    with monkeypatch.context() as patched:
        patched.setattr(Management, "register", refuse)
        yield


def test_rollback_and_promotion_reuse_registered_releases(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = site.champion, site.candidate()
    site.deploy(bad)
    with no_registration(monkeypatch):
        with site.hammered() as versions:
            back = roll_back(site.settings, cause=Cause(by="ada", why="it confuses 3 and 8"))
        assert versions == {good, bad.version}
        assert (back.version, back.smoke_queries) == (good, site.settings.serving.smoke_queries)
        assert site.default == site.champion == good
        with site.hammered() as versions:
            assert promote(bad.version, site.settings).previous == good
        assert versions == {good, bad.version}
        assert site.default == site.champion == bad.version
    history = [(move.version, move.how, move.why) for move in site.registry.history()][-3:]
    assert history == [
        (bad.version, "deploy", ""),
        (good, "rollback", "it confuses 3 and 8"),
        (bad.version, "promote", ""),
    ]


def test_unregistered_release_is_fetched_tested_and_promoted(site: Site) -> None:
    oldest, before = next(site.registry.list()), site.champion
    if oldest in site.registered:
        Management(site.home).unregister("embedding", oldest)
    (model_store(site.home) / f"embedding-{oldest}.mar").unlink(missing_ok=True)
    with site.hammered() as versions:
        moved = promote(oldest, site.settings)
    assert versions == {before, oldest}
    assert (moved.version, moved.previous) == (oldest, before)
    assert site.default == site.champion == oldest
    assert before in site.registered
    with pytest.raises(StoreError, match="is already the champion"):
        promote(oldest, site.settings)
    assert roll_back(site.settings).version == before


def test_failed_promotion_changes_nothing(site: Site, tmp_path: Path) -> None:
    good = site.candidate()
    queries = json.loads(open_release(good.archive, tmp_path / "opened").read("smoke.json"))
    queries[0]["dist"] += 0.01
    invalid = forge(good, tmp_path / "wrong.mar", smoke_json=json.dumps(queries).encode())
    site.registry.publish(invalid.archive)
    champion, registered = site.registry.champion(), site.registered
    with site.hammered() as versions, pytest.raises(ServingError, match="fails its smoke test"):
        promote(invalid.version, site.settings)
    assert versions == {site.champion}
    assert site.registry.champion() == champion
    assert site.registered == registered


def test_held_release_is_promoted_only_by_force_with_a_reason(site: Site, make_release: MakeRelease) -> None:
    candidate, before = make_release(parent=site.champion, promote=False), site.champion
    site.registry.publish(candidate.archive)
    with pytest.raises(IntegrityError, match=r"is hold: A test says so\. To promote it anyway, add --force"):
        promote(candidate.version, site.settings)
    with pytest.raises(SettingsError, match="needs a reason"):
        promote(candidate.version, site.settings, force=True, cause=Cause(by="ada", why=" "))
    assert site.default == site.champion == before
    with site.hammered():
        promote(candidate.version, site.settings, force=True, cause=Cause(by="ada", why="the floor was wrong"))
    assert site.default == candidate.version
    last = list(site.registry.history())[-1]
    assert (last.how, last.why, last.by) == ("force", "the floor was wrong", "ada")
    roll_back(site.settings)


@pytest.mark.slow
def test_one_of_two_concurrent_promotions_fails(site: Site) -> None:
    rivals = [site.candidate(), site.candidate()]
    for rival in rivals:
        site.registry.publish(rival.archive)
    ready = threading.Barrier(2)
    outcomes: list[str] = []

    def compete(version: str) -> None:
        ready.wait()
        try:
            outcomes.append(promote(version, site.settings).version)
        except ConflictError:
            outcomes.append("lost")

    with site.hammered() as versions:
        threads = [threading.Thread(target=compete, args=(rival.version,)) for rival in rivals]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes.count("lost") == 1
    assert site.default == site.champion == max(outcomes, key=lambda word: word != "lost")
    assert versions <= {
        site.champion,
        *(rival.version for rival in rivals),
        site.registry.get(site.champion).manifest.parent,
    }


@pytest.mark.slow
def test_pruning_the_registry_fails_no_request(site: Site) -> None:
    serving = site.settings.serving.model_copy(update={"keep_registered": 2})
    for _ in range(2):  # in addition to the champion and its parent, which a prune keeps
        site.deploy(site.candidate())
    candidate = site.candidate()
    with site.hammered() as versions:
        removed = site.registry.prune(1)
        site.deploy(candidate, site.settings.model_copy(update={"serving": serving}))
    assert removed
    previous = site.registry.champion()
    assert previous is not None
    assert versions == {candidate.version, previous.previous}
    assert site.registered == sorted([candidate.version, str(previous.previous)]), "the champion and its predecessor"
    assert roll_back(site.settings).version == previous.previous
    promote(candidate.version, site.settings)


@pytest.mark.slow
def test_candidate_replaces_a_champion_with_a_damaged_archive(site: Site) -> None:
    champion, candidate, broken = site.champion, site.candidate(), site.candidate()
    store = open_store(site.settings.store_uri)
    key = site.registry.get(champion).archive_key
    archive = store.get(key)
    torchserve.stop(home_of(site.settings.workdir))
    for stored in model_store(site.home).glob("*.mar"):
        stored.unlink()
    store.put(key, b"damaged")
    with pytest.raises(IntegrityError, match="is damaged"):
        local.serve(site.settings)
    assert not torchserve.is_running(site.home)

    faulty = forge(broken, candidate.archive.with_name("faulty.mar"), handler_py=BROKEN)
    with pytest.raises(ServingError, match="rejected POST /models"):
        site.deploy(faulty)
    assert site.champion == champion

    deployed = site.deploy(candidate)
    assert (deployed.version, deployed.previous) == (candidate.version, champion)
    assert "is damaged" in str(deployed.champion_fault)
    assert site.default == site.champion == candidate.version
    with pytest.raises(IntegrityError, match="is damaged"):
        roll_back(site.settings)
    assert site.default == site.champion == candidate.version
    store.put(key, archive)


def test_held_release_is_not_registered(site: Site, make_release: MakeRelease) -> None:
    candidate = make_release(parent=site.champion, promote=False)
    registered = site.registered
    with pytest.raises(IntegrityError, match="A test says so"):
        site.deploy(candidate)
    assert site.registered == registered


def test_server_killed_during_a_deployment_restarts_with_its_champion(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion, candidate = site.champion, site.candidate()
    state = read_state(site.home)
    assert state is not None

    def die_and_smoke(client: Client, parts: ReleaseParts) -> int:
        workers = [process for process in torchserve.processes(site.home) if process.pid != state.pid]
        os.kill(state.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert alive == [], "workers end with their Java process"
        return real_smoke(client, parts)

    real_smoke = local.smoke
    with monkeypatch.context() as patched:
        patched.setattr(local, "smoke", die_and_smoke)
        with pytest.raises(ServingError, match="start it with `evernear serve`"):
            site.deploy(candidate)
    assert site.champion == champion
    assert deployment.open_target(site.settings).status()["server"] == "died"
    with pytest.raises(ServerUnreachableError, match="start it with `evernear serve`"):
        Client.of(site.settings).predict(site.image)

    assert local.serve(site.settings) == champion == site.default
    assert site.registered == [champion]


def test_serve_requires_a_champion(tmp_path: Path) -> None:
    settings = Settings(workdir=tmp_path / "work", serving=settings_on_free_ports())
    with pytest.raises(ServingError, match="run `evernear run` first"):
        local.serve(settings)
    assert deployment.open_target(settings).status()["server"] == "down"
    assert not torchserve.stop(home_of(settings.workdir))


def test_failed_first_release_leaves_no_server(make_release: MakeRelease, tmp_path: Path) -> None:
    settings = Settings(workdir=tmp_path / "work", serving=settings_on_free_ports())
    broken = forge(make_release(), tmp_path / "broken.mar", handler_py=BROKEN)
    with pytest.raises(ServingError):
        deployment.deploy(broken.archive, broken.verdict, settings)
    assert torchserve.processes(home_of(settings.workdir)) == []
    assert deployment.open_target(settings).status()["server"] == "down"
    assert deployment.open_target(settings).status()["champion"] is None
