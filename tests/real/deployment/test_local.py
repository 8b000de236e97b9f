"""Rollouts on a real TorchServe under continuous client load."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from evernear import deployment
from evernear.common.store import open_store
from evernear.deployment import local, promote_release, roll_back
from evernear.embedding import openvino_version
from evernear.errors import (
    IntegrityError,
    ServerUnreachableError,
    ServingError,
    SettingsError,
    StoreError,
    TransientStoreError,
)
from evernear.release.archive import SMOKE_QUERIES
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.promotions import Cause
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import Management, home_of, read_state
from evernear.settings import Settings
from tests.releases import STUB_HANDLER, MakeRelease, PackedRelease, forge, settings_on_free_ports
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("without_torch")
BROKEN = b"class H:\n    def initialize(self, c): raise RuntimeError('no')\n    def handle(self, d, c): ...\n"
CLIENTS = 2
WRONG = (
    STUB_HANDLER.read_bytes()
    + b"""
right = Handler._answer
Handler._answer = lambda *request: right(*request).replace(b'"dist": ', b'"dist": 1')
"""
)
FAILING = b"class H:\n    def initialize(self, c): ...\n    def handle(self, d, c): raise RuntimeError('no')\n"


class Sandbox:
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
        return deployment.deploy_release(release.archive, release.verdict, settings or self.settings)

    @contextmanager
    def under_load(self) -> Iterator[set[str]]:
        """Send requests continuously, all of which must succeed; yields the set of the versions
        that answered, which is complete afterwards."""
        answers: list[str] = []
        versions: set[str] = set()
        stop = threading.Event()

        def send_requests() -> None:
            with Client.of(self.settings) as client:
                while not stop.wait(0.1):
                    answers.append(client.predict(self.image).version)

        def await_requests() -> None:
            enough = len(answers) + 2 * CLIENTS  # of which as many may be in progress
            until(lambda: len(answers) >= enough or any(future.done() for future in running), timeout_s=240)

        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(send_requests) for _ in range(CLIENTS)]
            try:
                await_requests()
                yield versions
                await_requests()
            finally:
                stop.set()
        for future in running:
            future.result()
        versions.update(answers)


@pytest.fixture(scope="module")
def local_sandbox(make_stub: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    directory = tmp_path_factory.mktemp("sandbox")
    settings = Settings(workdir=directory / "work", serving=settings_on_free_ports())
    first = make_stub()
    parts: ReleaseParts = open_release(first.archive, directory / "opened")
    sandbox = Sandbox(settings, make_stub, parts.read("smoke-00.png"))
    try:
        assert deployment.open_target(settings).status()["server"] == "down"
        deployed = sandbox.deploy(first)
        assert (deployed.version, deployed.previous) == (first.version, None)
        assert deployed.smoke_queries == SMOKE_QUERIES
        sandbox.deploy(sandbox.candidate())  # so that there is one to roll back to
        yield sandbox
    finally:
        torchserve.stop_server(home_of(settings.workdir))
    assert torchserve.processes(sandbox.home) == []
    assert deployment.open_target(settings).status()["server"] == "down"


@contextmanager
def no_registration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("a release that is still registered was registered again")

    with monkeypatch.context() as patched:
        patched.setattr(Management, "register", refuse)
        yield


def test_rollout_rollback_and_promotion_fail_no_request(
    local_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, candidate = local_sandbox.champion, local_sandbox.candidate()
    with local_sandbox.under_load() as versions:
        deployed = local_sandbox.deploy(candidate)
    assert (deployed.version, deployed.previous) == (candidate.version, before)
    assert versions == {before, candidate.version}
    assert local_sandbox.default == local_sandbox.champion == candidate.version
    assert before in local_sandbox.registered, "it stays registered for a rollback"
    assert deployment.open_target(local_sandbox.settings).status() == {
        "server": "up",
        "url": deployed.url,
        "default": candidate.version,
        "engine": "OpenVINO" if openvino_version() else "TorchScript",
        "ready_workers": 1,
        "registered": local_sandbox.registered,
        "champion": candidate.version,
        "store": local_sandbox.settings.store_uri,
    }
    with no_registration(monkeypatch):
        with local_sandbox.under_load() as versions:
            back = roll_back(local_sandbox.settings, cause=Cause(by="ada", why="it confuses 3 and 8"))
        assert versions == {before, candidate.version}
        assert (back.version, back.smoke_queries) == (before, SMOKE_QUERIES)
        assert local_sandbox.default == local_sandbox.champion == before
        with local_sandbox.under_load() as versions:
            assert promote_release(candidate.version, local_sandbox.settings).previous == before
        assert versions == {before, candidate.version}
        assert local_sandbox.default == local_sandbox.champion == candidate.version
    history = [(promotion.version, promotion.how, promotion.why) for promotion in local_sandbox.registry.history()][-3:]
    assert history == [
        (candidate.version, "deploy", ""),
        (before, "rollback", "it confuses 3 and 8"),
        (candidate.version, "promote", ""),
    ]
    # A repeated deployment, as after a late kill, succeeds:
    assert local_sandbox.deploy(candidate).version == candidate.version
    assert local_sandbox.champion == candidate.version


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        pytest.param(WRONG, "fails its smoke test", id="wrong answer"),
        pytest.param(BROKEN, "rejected POST /models", id="does not load"),
        pytest.param(FAILING, "fails its smoke test with smoke-00.png", id="fails at a request"),
    ],
)
def test_failed_candidate_is_removed_and_the_champion_stays_live(
    local_sandbox: Sandbox, tmp_path: Path, handler: bytes, sentence: str
) -> None:
    candidate = forge(local_sandbox.candidate(), tmp_path / "faulty.mar", handler_py=handler)
    champion, registered = local_sandbox.registry.champion(), local_sandbox.registered
    with local_sandbox.under_load() as versions:
        with pytest.raises(ServingError, match=sentence):
            local_sandbox.deploy(candidate)
        assert candidate.version in list(local_sandbox.registry.list()), "an operator may still promote it"
        with pytest.raises(ServingError, match=sentence):
            promote_release(candidate.version, local_sandbox.settings)
    assert versions == {local_sandbox.champion}
    assert local_sandbox.registry.champion() == champion
    assert local_sandbox.registered == registered
    assert not list(model_store(local_sandbox.home).glob(f"*{candidate.version}*"))


KILLED = """
import os, signal, sys
from pathlib import Path
from evernear.deployment import deploy_release, local
from evernear.settings import Settings

def die(source, target):
    target.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

local.shutil.copyfileobj = die
deploy_release(Path(sys.argv[1]), Path(sys.argv[2]), Settings.model_validate_json(sys.argv[3]))
"""


@pytest.mark.slow
def test_next_deployment_removes_what_killed_ones_left(local_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was killed while it copied its archive, another after its release had been registered."""
    copying, registered, candidate = local_sandbox.candidate(), local_sandbox.candidate(), local_sandbox.candidate()
    words = [sys.executable, "-c", KILLED, copying.archive, copying.verdict, local_sandbox.settings.model_dump_json()]
    assert subprocess.run(words, timeout=120).returncode == -signal.SIGKILL
    assert temporary_files(local_sandbox)
    shutil.copy(registered.archive, model_store(local_sandbox.home) / f"embedding-{registered.version}.mar")
    Management(local_sandbox.home).register(f"embedding-{registered.version}.mar", local_sandbox.settings.serving)
    assert registered.version in local_sandbox.registered
    champion = local_sandbox.champion
    monkeypatch.setattr(local, "KEEP_REGISTERED", 2)
    with local_sandbox.under_load():
        local_sandbox.deploy(candidate)
    assert temporary_files(local_sandbox) == []
    assert local_sandbox.registered == [champion, candidate.version], "the champion and its predecessor"
    assert local_sandbox.default == candidate.version


def temporary_files(sandbox: Sandbox) -> list[Path]:
    return [*sandbox.home.glob(".*"), *model_store(sandbox.home).glob(".*")]


@pytest.mark.slow
def test_release_that_passed_its_smoke_test_stays_loaded_if_the_store_is_unreachable(
    local_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion, candidate = local_sandbox.champion, local_sandbox.candidate()

    def unreachable(*_: object, **__: object) -> None:
        raise TransientStoreError("http://s3 cannot be reached.")

    with monkeypatch.context() as patched, local_sandbox.under_load() as versions:
        patched.setattr(Registry, "set_champion", unreachable)
        with pytest.raises(
            TransientStoreError, match=r"stays in place, but it may not be recorded .* cannot be reached"
        ):
            local_sandbox.deploy(candidate)
    assert versions == {champion}
    assert candidate.version in local_sandbox.registered
    with no_registration(monkeypatch), local_sandbox.under_load():
        promote_release(candidate.version, local_sandbox.settings)
    assert local_sandbox.default == local_sandbox.champion == candidate.version
    roll_back(local_sandbox.settings)


def test_release_that_does_not_fit_on_the_disk_leaves_no_files(
    local_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion, candidate, registered = local_sandbox.champion, local_sandbox.candidate(), local_sandbox.registered
    before = sorted(model_store(local_sandbox.home).iterdir())
    full = shutil.disk_usage(local_sandbox.home)._replace(free=candidate.archive.stat().st_size)
    with monkeypatch.context() as patched, local_sandbox.under_load() as versions:
        patched.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(StoreError, match=r"The disk that holds .* is full; free some space and run again\."):
            local_sandbox.deploy(candidate)
    assert versions == {champion}
    assert local_sandbox.registered == registered
    assert sorted(model_store(local_sandbox.home).iterdir()) == before


def test_running_server_is_used_wherever_it_is(local_sandbox: Sandbox) -> None:
    address = deployment.open_target(local_sandbox.settings).status()["url"]
    assert address == f"http://127.0.0.1:{local_sandbox.settings.serving.inference_port}/predictions/embedding"
    elsewhere = Settings(workdir=local_sandbox.settings.workdir)
    assert elsewhere.serving.inference_port != local_sandbox.settings.serving.inference_port
    assert deployment.open_target(elsewhere).status()["url"] == address

    champion = local_sandbox.champion
    assert roll_back(elsewhere).url == address
    assert promote_release(champion, elsewhere).url == address
    assert local_sandbox.default == local_sandbox.champion == champion


def test_held_release_is_fetched_tested_and_promoted_only_by_force_with_a_reason(
    local_sandbox: Sandbox, make_stub: MakeRelease
) -> None:
    candidate, before = make_stub(parent=local_sandbox.champion, promote=False), local_sandbox.champion
    local_sandbox.registry.publish(candidate.archive)
    with pytest.raises(IntegrityError, match=r"is hold: A test says so\. To promote it anyway, add --force"):
        promote_release(candidate.version, local_sandbox.settings)
    with pytest.raises(SettingsError, match="needs a reason"):
        promote_release(candidate.version, local_sandbox.settings, force=True, cause=Cause(by="ada", why=" "))
    assert local_sandbox.default == local_sandbox.champion == before
    with local_sandbox.under_load() as versions:  # it is not registered: it is fetched and tested first
        moved = promote_release(
            candidate.version, local_sandbox.settings, force=True, cause=Cause(by="ada", why="the floor was wrong")
        )
    assert versions == {before, candidate.version}
    assert (moved.version, moved.previous) == (candidate.version, before)
    assert moved.smoke_queries == SMOKE_QUERIES
    assert local_sandbox.default == local_sandbox.champion == candidate.version
    assert before in local_sandbox.registered
    last = list(local_sandbox.registry.history())[-1]
    assert (last.how, last.why, last.by) == ("force", "the floor was wrong", "ada")
    with pytest.raises(SettingsError, match="is already the champion"):
        promote_release(candidate.version, local_sandbox.settings)
    assert roll_back(local_sandbox.settings).version == before


@pytest.mark.slow
def test_candidate_replaces_a_champion_with_a_damaged_archive(local_sandbox: Sandbox) -> None:
    champion, candidate, broken = local_sandbox.champion, local_sandbox.candidate(), local_sandbox.candidate()
    store = open_store(local_sandbox.settings.store_uri)
    key = local_sandbox.registry.get(champion).archive_key
    archive = store.get(key)
    torchserve.stop_server(home_of(local_sandbox.settings.workdir))
    for stored in model_store(local_sandbox.home).glob("*.mar"):
        stored.unlink()
    store.put(key, b"damaged")
    with pytest.raises(IntegrityError, match="is damaged"):
        local.serve_local(local_sandbox.settings)
    assert not torchserve.is_running(local_sandbox.home)

    faulty = forge(broken, candidate.archive.with_name("faulty.mar"), handler_py=BROKEN)
    with pytest.raises(ServingError, match="rejected POST /models"):
        local_sandbox.deploy(faulty)
    assert local_sandbox.champion == champion

    deployed = local_sandbox.deploy(candidate)
    assert (deployed.version, deployed.previous) == (candidate.version, champion)
    assert "is damaged" in str(deployed.champion_fault)
    assert local_sandbox.default == local_sandbox.champion == candidate.version
    with pytest.raises(IntegrityError, match="is damaged"):
        roll_back(local_sandbox.settings)
    assert local_sandbox.default == local_sandbox.champion == candidate.version
    store.put(key, archive)


@pytest.mark.slow
def test_server_killed_during_a_deployment_restarts_with_its_champion(
    local_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion, candidate = local_sandbox.champion, local_sandbox.candidate()
    state = read_state(local_sandbox.home)
    assert state is not None

    def die_and_smoke(client: Client, parts: ReleaseParts) -> int:
        workers = [process for process in torchserve.processes(local_sandbox.home) if process.pid != state.pid]
        os.kill(state.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert alive == [], "workers end with their Java process"
        return real_smoke(client, parts)

    real_smoke = local.smoke
    with monkeypatch.context() as patched:
        patched.setattr(local, "smoke", die_and_smoke)
        with pytest.raises(ServingError, match="start it with `evernear serve`"):
            local_sandbox.deploy(candidate)
    assert local_sandbox.champion == champion
    assert deployment.open_target(local_sandbox.settings).status()["server"] == "died"
    with pytest.raises(ServerUnreachableError, match="start it with `evernear serve`"):
        Client.of(local_sandbox.settings).predict(local_sandbox.image)

    assert local.serve_local(local_sandbox.settings) == champion == local_sandbox.default
    assert local_sandbox.registered == [champion]


def test_serve_requires_a_champion(tmp_path: Path) -> None:
    settings = Settings(workdir=tmp_path / "work", serving=settings_on_free_ports())
    with pytest.raises(ServingError, match="run `evernear run` first"):
        local.serve_local(settings)
    assert deployment.open_target(settings).status()["server"] == "down"
    assert not torchserve.stop_server(home_of(settings.workdir))


@pytest.mark.slow
def test_failed_first_release_leaves_no_server(make_stub: MakeRelease, tmp_path: Path) -> None:
    settings = Settings(workdir=tmp_path / "work", serving=settings_on_free_ports())
    broken = forge(make_stub(), tmp_path / "broken.mar", handler_py=BROKEN)
    with pytest.raises(ServingError):
        deployment.deploy_release(broken.archive, broken.verdict, settings)
    assert torchserve.processes(home_of(settings.workdir)) == []
    assert deployment.open_target(settings).status()["server"] == "down"
    assert deployment.open_target(settings).status()["champion"] is None
