"""The TorchServe server of a working directory as a deployment target.

The registry's champion is authoritative. If the server does not serve it after a crash,
`serve_local` or the next deployment makes the server switch to it.
"""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from evernear.common.disk import atomic_file, disk_errors, file_lock, sha256_file
from evernear.common.store import open_store
from evernear.common.store.current import current_store
from evernear.deployment.target import VerifiedRollout, smoke, unrecorded_error
from evernear.errors import IntegrityError, ServingError, StoreError, TransientStoreError
from evernear.release.archive_reader import ARCHIVE_FILE, ReleaseParts
from evernear.release.promotions import Champion
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import Endpoints, Management, RegisteredVersion, home_of, read_state
from evernear.settings import RunSettings
from evernear.settings.serving import MODEL_NAME

DRAIN_TIMEOUT_S = 30
KEEP_REGISTERED = 3  # releases, for a fast rollback; each takes the memory of its workers
SPARE_BYTES = 2**20  # for filesystem blocks and TorchServe's logs
LAST_BATCH_S = 0.5  # time in which a batch that has left the queue is certainly answered


class LocalTarget:
    """The TorchServe of ``settings.workdir``."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._registry = Registry(open_store(settings.store_uri))
        self._home = home_of(settings.workdir)
        self._management = Management(self._home)
        self._url = f"{Endpoints.of(settings.serving).inference_url}/predictions/{MODEL_NAME}"

    def is_running(self) -> bool:
        return torchserve.is_running(self._home)

    def require_deployable(self) -> None:
        """Check that TorchServe can start."""
        torchserve.require_startable(self._settings.serving, self._home)

    @contextlib.contextmanager
    def exclusive(self) -> Generator[None]:
        """Hold the working directory's deployment lock, and clean up after killed deployments.

        Raises:
            BusyError: a different deployment does not finish in time.
        """
        busy = f"Another deployment to {self._settings.workdir} is in progress; wait for it and try again."
        with file_lock(self._home / "deploy.lock", torchserve.LOCK_TIMEOUT_S, lambda: busy):
            with disk_errors(self._home):
                for staged in model_store(self._home).glob(".*"):
                    staged.unlink()
            yield

    def fetch(self, version: str, directory: Path) -> Path:
        """The server's copy of the published archive if it is intact, otherwise a download."""
        if self._has_archive(version):
            return self.stored_archive(version)
        self._registry.fetch(version, directory / ARCHIVE_FILE)
        return directory / ARCHIVE_FILE

    @contextlib.contextmanager
    def rollout(self, archive: Path, parts: ReleaseParts) -> Generator[VerifiedRollout]:
        """Load a release alongside the live one, and verify it at a separate URL. After the body
        completes, make it the default. After a failure other than a `TransientStoreError`, unload
        it.

        The live release continues to serve. TorchServe is started if it is not running. If the
        champion does not start, for example because its archive is damaged, a different release can
        still be rolled out.
        """
        version = parts.manifest.version
        with self._server():
            champion_fault = self._try_to_follow_champion(version)
            with self._verified(archive, parts) as answered:
                try:
                    yield VerifiedRollout(self._url, answered, champion_fault)
                except TransientStoreError as error:  # the pointer may have moved
                    raise unrecorded_error(version, error) from None

    def switch(self, archive: Path, parts: ReleaseParts) -> None:
        """Like `rollout`, but ignore the champion pointer."""
        with self._server():
            with self._verified(archive, parts):
                pass
            with contextlib.suppress(ServingError, StoreError, IntegrityError):  # the release is live
                self._unload_unpublished(parts.manifest.version)

    @contextlib.contextmanager
    def _verified(self, archive: Path, parts: ReleaseParts) -> Generator[int]:
        """Load a release and run its smoke test. After the body, which may reject it, make it the
        default. If the body raises `TransientStoreError`, the release stays loaded.

        Yield the number of answered queries.
        """
        version = parts.manifest.version
        loaded = self._ensure_loaded(archive, version)
        try:
            yield smoke(Client.of(self._settings), parts)
        except TransientStoreError:
            raise
        except BaseException:
            if loaded:
                self._unload(version)
            raise
        self._management.set_default(MODEL_NAME, version)
        # The release is already live, so ignore a failure. The next deployment prunes again.
        with contextlib.suppress(ServingError, StoreError, IntegrityError):
            self._prune()

    def default_version(self) -> str | None:
        """The version that answers requests by default, or None if no release is loaded."""
        return self._management.describe(MODEL_NAME).version if self._registered() else None

    def stored_archive(self, version: str) -> Path:
        """The server's copy of a release's archive."""
        return model_store(self._home) / f"{MODEL_NAME}-{version}.mar"

    def follow_champion(self, champion: Champion) -> None:
        """Make the champion the default, and start TorchServe if it is not running."""
        with self._server():
            self._follow(champion)
            torchserve.await_ready(self._settings.serving, self._home, champion.version)

    def status(self) -> dict[str, Any]:
        """The state of the server (with its actual address) and of the registry.

        ``server`` is ``up``, ``down``, ``died`` (no longer running) or ``not answering``.
        """
        champion = self._registry.champion()
        state: dict[str, Any] = {
            "server": "down",
            "url": None,
            "default": None,
            "engine": None,
            "ready_workers": 0,
            "registered": [],
            "champion": champion.version if champion else None,
            "store": self._settings.store_uri,
        }
        running = read_state(self._home)
        if running is None:
            return state
        if not self.is_running():
            return state | {"server": "died"}
        try:
            versions = [registered.version for registered in self._management.versions(MODEL_NAME)]
            default = self._management.describe(MODEL_NAME) if versions else None
        except ServingError:
            return state | {"server": "not answering"}
        return state | {
            "server": "up",
            "url": f"{running.endpoints.inference_url}/predictions/{MODEL_NAME}",
            "default": default.version if default else None,
            "engine": self._engine(default.version) if default else None,
            "ready_workers": default.ready_workers if default else 0,
            "registered": versions,
        }

    def _engine(self, version: str) -> str | None:
        """What runs the network of a release, or None if the store no longer has the release."""
        with contextlib.suppress(StoreError):
            return self._registry.get(version, include_pruned=True).manifest.engine
        return None

    @contextlib.contextmanager
    def _server(self) -> Generator[None]:
        """Start the server if needed. If the body fails and no model is loaded, stop it."""
        torchserve.start_server(self._settings.serving, self._home)
        try:
            yield
        except BaseException:
            with contextlib.suppress(ServingError):
                if not self._registered():
                    torchserve.stop_server(self._home)
            raise

    def _registered(self) -> dict[str, RegisteredVersion]:
        """The releases that the server has loaded, keyed by version, oldest first."""
        return {model.version: model for model in self._management.versions(MODEL_NAME)}

    def _follow(self, champion: Champion) -> None:
        """Make the champion the default, and unload releases that were never published."""
        registered = self._registered()
        if champion.version not in registered:
            if not self._has_archive(champion.version):
                self._registry.fetch(champion.version, self.stored_archive(champion.version))
            self._load(champion.version)
        self._management.set_default(MODEL_NAME, champion.version)
        self._unload_unpublished(champion.version)

    def _unload_unpublished(self, live: str) -> None:
        """Except for ``live``, unload releases that are not in the registry."""
        for version in self._registered().keys() - {live, *self._registry.list()}:
            self._unload(version)

    def _try_to_follow_champion(self, candidate: str) -> str | None:
        """Make the champion the default, or return the reason why it does not start."""
        champion = self._registry.champion()
        if champion is None or champion.version == candidate:
            return None
        try:
            self._follow(champion)
        except (IntegrityError, ServingError, StoreError) as error:
            return str(error)
        return None

    def _ensure_loaded(self, archive: Path, version: str) -> bool:
        """Load a release, and return True, unless the same archive is loaded and ready."""
        registered, stored = self._registered(), self.stored_archive(version)
        if version in registered:
            same = stored.is_file() and (archive == stored or sha256_file(archive) == sha256_file(stored))
            if same and registered[version].ready_workers:
                return False
            self._unregister(version)
        if archive != stored:
            with atomic_file(stored) as file, archive.open("rb") as source:
                shutil.copyfileobj(source, file)
        self._load(version)
        return True

    def _load(self, version: str) -> None:
        """Register a stored archive. It becomes the default only if it is the only one."""
        stored = self.stored_archive(version)
        try:
            with disk_errors(self._home):
                # TorchServe unpacks the archive in its home directory. If the disk is full, its
                # error does not say so.
                if shutil.disk_usage(self._home).free < stored.stat().st_size + SPARE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._management.register(stored.name, self._settings.serving)
            torchserve.await_ready(self._settings.serving, self._home, version)
        except BaseException:  # TorchServe returns 500 for a broken release, and leaves it registered without workers
            self._unload(version)
            raise

    def _unload(self, version: str) -> None:
        self._unregister(version)
        self.stored_archive(version).unlink(missing_ok=True)

    def _unregister(self, version: str) -> None:
        with contextlib.suppress(ServingError):  # TorchServe refuses to unregister a default among several
            if version in self._registered():
                self._management.unregister(MODEL_NAME, version)

    def _prune(self) -> None:
        """Keep `KEEP_REGISTERED` releases: the champion, its rollback target, then the newest."""
        champion = self._registry.champion()
        if champion is None:
            return
        rank = {champion.version: 2, champion.previous: 1}
        by_rank = sorted(self._registered(), key=lambda version: (rank.get(version, 0), version), reverse=True)
        for version in by_rank[KEEP_REGISTERED:]:
            self._drain(version)
            self._unload(version)

    def _drain(self, version: str) -> None:
        """Wait until the previous default release has answered its requests."""
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while self._management.describe(MODEL_NAME, version).queue.pending and time.monotonic() < deadline_s:
            time.sleep(torchserve.POLL_S)
        time.sleep(LAST_BATCH_S)

    def _has_archive(self, version: str) -> bool:
        """Whether the server's copy of an archive is identical to the published one."""
        stored = self.stored_archive(version)
        return stored.is_file() and sha256_file(stored) == self._registry.get(version).archive_sha256


def at_running_server(settings: RunSettings) -> RunSettings:
    """``settings`` with the addresses of the working directory's server, if one was started."""
    state = read_state(home_of(settings.workdir))
    if state is None:
        return settings
    serving = settings.serving.model_copy(update=state.endpoints.model_dump())
    return settings.model_copy(update={"serving": serving})


def serve_local(settings: RunSettings) -> str:
    """Start the champion unless it is already live, and return its version.

    Raises:
        BusyError: a deployment to this working directory does not finish in time.
    """
    registry = Registry(current_store(settings.store_uri))
    champion = registry.champion()
    if champion is None:
        raise ServingError(registry.explain_no_champion())
    target = LocalTarget(settings)
    with target.exclusive():
        target.follow_champion(champion)
    return champion.version
