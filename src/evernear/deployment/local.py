"""The TorchServe of a working directory: bring a release up, prove it, let it serve, or keep the old one.

The registry's champion is the truth and the server follows it: after a crash at any point, `serve` or the
next `deploy` makes them agree again.
"""

import contextlib
import errno
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from evernear.deployment.promotion_policy import Deployment, admit, unrecorded
from evernear.deployment.smoke import smoke
from evernear.disk import atomic_file, disk_errors, sha256_file
from evernear.errors import IntegrityError, ServingError, StoreError, TransientStoreError, UserInterruptError
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.registry import Cause, Champion, Registry
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.endpoints import Endpoints, home_of, read_state
from evernear.serving.management import Management
from evernear.settings import RunSettings
from evernear.store import open_store

DRAIN_TIMEOUT_S = 30
FOLLOW_S = 0.5
SPARE_BYTES = 2**20  # files take whole blocks, and TorchServe writes logs
LAST_BATCH_S = 0.5  # a batch that left the queue is answered in far less
_STAGING = ".release-"


def deploy(archive: Path, verdict_file: Path, settings: RunSettings, cause: Cause | None = None) -> Deployment:
    """Roll a release out on the TorchServe of ``settings.workdir``, which is started if it is not up.

    The champion answers all the while. The release is registered beside it, has to answer its stored queries
    on its own URL, and only then becomes champion and default. A release that fails is removed again; one that is
    proved stays registered if the store cannot be reached then. A champion that cannot be brought up, since its
    archive is damaged, does not stand in the way.

    Raises:
        IntegrityError, ConflictError: it may not serve, see `evernear.deployment.promotion_policy.admit`.
        ServingError: TorchServe or the release does not come up, or the smoke test fails.
        StoreError: the registry cannot be reached, or another release became champion meanwhile.
        BusyError: another deployment into this working directory does not end.
    """
    registry = Registry(open_store(settings.store_uri))
    with _site(settings) as site, site.temporary_directory() as temporary:
        champion = registry.champion()
        parts = admit(archive, verdict_file, champion, temporary / "release")
        version = parts.manifest.version

        def commit() -> Champion:
            registry.publish(archive)
            return registry.set_champion(version, champion, cause=cause)

        with site.server():
            if champion is not None and champion.version == version:  # the same step again
                site.follow(champion, registry)
                return site.deployed(champion, smoke(Client.of(settings), parts))
            fault = site.try_to_follow(champion, registry)
            return site.roll_out(archive, parts, commit).model_copy(update={"champion_fault": fault})


def move(
    version: str,
    settings: RunSettings,
    registry: Registry,
    vet: Callable[[ReleaseParts], None],
    commit: Callable[[], Champion],
) -> Deployment:
    """Let a release of the registry serve on the TorchServe that is up, proved as in `deploy`.

    ``vet`` may refuse it, ``commit`` moves the champion's pointer to it. A release that is still registered
    and is the published one is neither fetched nor loaded again.

    Raises:
        ServingError: the release does not come up or fails the smoke test; what served before still does.
        IntegrityError: its archive is damaged, or ``vet`` refuses it.
        StoreError: the registry cannot be reached, or the champion changed meanwhile.
        BusyError: another deployment into this working directory does not end.
    """
    with _site(settings) as site, site.temporary_directory() as temporary:
        archive = site.archive_of(version, registry, temporary)
        parts = open_release(archive, temporary / "release")
        vet(parts)
        return site.roll_out(archive, parts, commit)


def is_up(settings: RunSettings) -> bool:
    """Whether the TorchServe of ``settings.workdir`` runs."""
    return torchserve.is_running(home_of(settings.workdir))


def serve(settings: RunSettings) -> str:
    """Bring the champion up, after a reboot for one, and return its version; it may be up already.

    Raises:
        ServingError: nothing was released yet, or TorchServe or the release does not come up.
        IntegrityError: the champion's archive is damaged.
        StoreError: the registry cannot be reached.
        BusyError: a deployment into this working directory does not end.
    """
    registry = Registry(open_store(settings.store_uri))
    champion = registry.champion()
    if champion is None:
        raise ServingError(f"No release has been promoted in {settings.store_uri} yet; run `evernear run` first.")
    with _site(settings) as site, site.server():
        site.follow(champion, registry)
    return champion.version


def follow(settings: RunSettings) -> None:
    """Stay as long as the server does; SIGTERM and Ctrl-C drain it and end both.

    Raises:
        ServingError: the server died.
        SystemExit: SIGTERM, with exit code 0.
        UserInterruptError: Ctrl-C.
    """
    home = home_of(settings.workdir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while torchserve.is_running(home):
            time.sleep(FOLLOW_S)
    except SystemExit:
        torchserve.stop(home)
        raise
    except KeyboardInterrupt:
        torchserve.stop(home)
        raise UserInterruptError(
            "Interrupted. TorchServe answered the requests in flight and ended; `evernear serve` starts it again."
        ) from None
    if read_state(home) is not None:  # nobody stopped it
        raise ServingError(f"TorchServe died; see {home}/logs.")


def stop(settings: RunSettings) -> bool:
    """End the TorchServe of ``settings.workdir`` with all its workers; whether there was one."""
    return torchserve.stop(home_of(settings.workdir))


def status(settings: RunSettings) -> dict[str, Any]:
    """What serves and what should, for people and programs.

    ``server`` is ``up``, ``down``, ``died`` (it was started and is gone) or ``not answering``.
    """
    home = home_of(settings.workdir)
    champion = Registry(open_store(settings.store_uri)).champion()
    told: dict[str, Any] = {
        "server": "down",
        "url": None,
        "default": None,
        "ready_workers": 0,
        "registered": [],
        "champion": champion.version if champion else None,
        "store": settings.store_uri,
    }
    if read_state(home) is None:
        return told
    if not torchserve.is_running(home):
        return told | {"server": "died"}
    management, model = Management(home), settings.serving.model_name
    try:
        versions = management.versions(model)
        default = management.describe(model) if versions else None
    except ServingError:
        return told | {"server": "not answering"}
    return told | {
        "server": "up",
        "url": _url(settings),
        "default": default.version if default else None,
        "ready_workers": default.ready_workers if default else 0,
        "registered": [registered.version for registered in versions],
    }


class _Site:
    """One working directory's server, and what a rollout does to it."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.home = home_of(settings.workdir)
        self.model = settings.serving.model_name
        self.management = Management(self.home)

    def remove_remains(self) -> None:
        """Remove the files that a killed deployment left."""
        with disk_errors(self.home):
            for directory in self.home.glob(f"{_STAGING}*"):
                shutil.rmtree(directory)
            for file in torchserve.model_store(self.home).glob(".*"):
                file.unlink()

    @contextlib.contextmanager
    def temporary_directory(self) -> Generator[Path]:
        """A directory on the server's own disk that is gone afterwards."""
        with disk_errors(self.home):
            temporary = tempfile.TemporaryDirectory(dir=self.home, prefix=_STAGING)
        with temporary as name:
            yield Path(name)

    @contextlib.contextmanager
    def server(self) -> Generator[None]:
        """Have the server up; one that was started for nothing is ended again."""
        torchserve.start(self.settings.serving, self.home)
        try:
            yield
        except BaseException:
            with contextlib.suppress(ServingError):
                if not self.management.versions(self.model):
                    torchserve.stop(self.home)
            raise

    def follow(self, champion: Champion | None, registry: Registry) -> None:
        """Make the champion the default, and remove what a killed deployment left: it was never published."""
        registered = {found.version for found in self.management.versions(self.model)}
        if champion is not None:
            if champion.version not in registered:
                with self.temporary_directory() as temporary:
                    archive = self.archive_of(champion.version, registry, temporary)
                    open_release(archive, temporary / "release")
                    self.load(archive, champion.version)
            torchserve.await_ready(self.settings.serving, self.home, champion.version)
            self.management.set_default(self.model, champion.version)
        for version in registered.difference(registry.list()):
            if champion is None or version != champion.version:
                self.unload(version)

    def try_to_follow(self, champion: Champion | None, registry: Registry) -> str | None:
        """`follow`, or the reason why the champion cannot be brought up."""
        try:
            self.follow(champion, registry)
        except (IntegrityError, ServingError, StoreError) as error:
            return str(error)
        return None

    def roll_out(self, archive: Path, parts: ReleaseParts, commit: Callable[[], Champion]) -> Deployment:
        """Bring a release up beside the one that serves, prove it, ``commit`` to it and let it serve."""
        version = parts.manifest.version
        loaded = self._bring_up(archive, version)
        try:
            queries = smoke(Client.of(self.settings), parts)
            champion = commit()
        except TransientStoreError as error:  # the pointer may have moved to it
            raise unrecorded(version, error) from None
        except BaseException:
            if loaded:
                self.unload(version)
            raise
        self.management.set_default(self.model, version)
        with contextlib.suppress(ServingError):  # the release serves; the next deploy tries again
            self.prune(champion)
        return self.deployed(champion, queries)

    def deployed(self, champion: Champion, smoke_queries: int) -> Deployment:
        """What is told of a release that serves."""
        return Deployment(
            version=champion.version,
            previous=champion.previous,
            url=_url(self.settings),
            smoke_queries=smoke_queries,
        )

    def archive_of(self, version: str, registry: Registry, temporary: Path) -> Path:
        """The published archive of a release: the server's own copy if it still is that, else fetched."""
        stored = self._stored(version)
        if stored.is_file() and sha256_file(stored) == registry.get(version).archive_sha256:
            return stored
        registry.fetch(version, temporary / "release.mar")
        return temporary / "release.mar"

    def _bring_up(self, archive: Path, version: str) -> bool:
        """Have a release registered and ready; whether it was loaded for that."""
        registered = {found.version: found for found in self.management.versions(self.model)}
        if version in registered:
            if archive == self._stored(version) and registered[version].ready_workers:
                return False
            self._unregister(version)
        self.load(archive, version)
        return True

    def load(self, archive: Path, version: str) -> None:
        """Register a release, without making it the default unless it is the only one; a broken one goes again."""
        stored = self._stored(version)
        with atomic_file(stored) as file, archive.open("rb") as source:
            shutil.copyfileobj(source, file)
        try:
            with disk_errors(self.home):
                # TorchServe unpacks it there, and would only say that it failed to save the model.
                if shutil.disk_usage(self.home).free < stored.stat().st_size + SPARE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.management.register(stored.name, self.settings.serving)
            torchserve.await_ready(self.settings.serving, self.home, version)
        except BaseException:  # TorchServe answers 500 to a broken release and keeps it, without workers
            self.unload(version)
            raise

    def unload(self, version: str) -> None:
        """Remove a release if it is there."""
        self._unregister(version)
        self._stored(version).unlink(missing_ok=True)

    def _unregister(self, version: str) -> None:
        with contextlib.suppress(ServingError):  # TorchServe keeps the default, as long as there are others
            if version in {found.version for found in self.management.versions(self.model)}:
                self.management.unregister(self.model, version)

    def prune(self, champion: Champion) -> None:
        """Keep ``serving.keep_registered`` releases registered: the champion, what a rollback leads to, the newest."""
        found = [found.version for found in self.management.versions(self.model)]
        by_worth = sorted(found, key=lambda v: (v == champion.version, v == champion.previous, v), reverse=True)
        for version in by_worth[self.settings.serving.keep_registered :]:
            self._drain(version)
            self.unload(version)

    def _drain(self, version: str) -> None:
        """Let a release that was the default a moment ago finish what it was asked."""
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while self.management.describe(self.model, version).queue.pending and time.monotonic() < deadline_s:
            time.sleep(torchserve.POLL_S)
        time.sleep(LAST_BATCH_S)

    def _stored(self, version: str) -> Path:
        return torchserve.model_store(self.home) / f"{self.model}-{version}.mar"


@contextlib.contextmanager
def _site(settings: RunSettings) -> Generator[_Site]:
    """The site, for one deployment at a time."""
    site = _Site(settings)
    busy = f"Another deployment into {settings.workdir} is under way; wait for it and try again."
    with torchserve.exclusive_lock(site.home / "deploy.lock", busy):
        site.remove_remains()
        yield site


def _url(settings: RunSettings) -> str:
    return f"{Endpoints.of(settings.serving).inference_url}/predictions/{settings.serving.model_name}"
