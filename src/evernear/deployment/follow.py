"""TorchServe in the foreground: with one release, or following the champion pointer
(`evernear serve --follow`).

A server that follows polls the pointer, and needs only read access to the store. Before the switch,
it downloads the release, checks the archive hash and every part, loads it alongside the live one,
and runs its smoke test. If a step fails, the live release stays live. The server reports the reason
once per release, and retries with increasing pauses. After a restart, it first loads the last live
release from its own disk, so it can answer requests even if the store is unreachable.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import AwareDatetime

from evernear.common.disk import sha256_file
from evernear.common.frozen import Frozen
from evernear.common.retry import backoff_s
from evernear.common.store import open_store
from evernear.deployment.local import LocalTarget
from evernear.errors import (
    EvernearError,
    FormatError,
    IntegrityError,
    ServingError,
    StoreError,
    TransientStoreError,
    UserInterruptError,
)
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import home_of, read_state
from evernear.settings import RunSettings

STATE_FILE = "follow.json"
POLL_S = 30.0  # until the champion's pointer is read again
CHAMPION_POLL_S = 2.0  # until the first release is looked for again
PROCESS_POLL_S = 0.5
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0
JITTER = 0.2
"""Relative variation of each pause, so that servers that started together poll separately."""


class FollowState(Frozen):
    """The live release of a server that follows the champion, stored next to its logs."""

    remedy = "delete it and start the server again"

    pid: int
    version: str
    archive: str
    """Name of the release's archive in the model store."""
    archive_sha256: str
    since: AwareDatetime
    fault: str = ""
    """Why the server does not serve the champion, as a sentence."""


def follow_state(home: Path) -> FollowState | None:
    """The follow state of the server in ``home``, None if no running process follows."""
    state = _load_state(home)
    return state if state and psutil.pid_exists(state.pid) else None


class Follower:
    """Polls the champion pointer for the TorchServe server of ``settings.workdir``. ``report``
    receives each event once."""

    def __init__(self, settings: RunSettings, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        self._home = home_of(settings.workdir)
        self._registry = Registry(open_store(settings.store_uri))
        self._target = LocalTarget(settings)
        self._live = ""
        self._reported = self._fault = ""
        self._failures = 0
        self._retry_at_s = 0.0
        self._failed = ""

    def start(self) -> None:
        """Start the last live release from disk, or else the champion, once there is one."""
        self._restore()
        while True:
            self.poll()
            if self._live:
                self._save(self._fault)
                return
            time.sleep(_jittered(POLL_S))

    def run(self) -> None:
        """Follow until the server exits.

        Raises:
            ServingError: the server died.
        """
        poll_at_s = time.monotonic() + _jittered(POLL_S)

        def poll_when_due() -> None:
            nonlocal poll_at_s
            if time.monotonic() >= poll_at_s:
                self.poll()
                poll_at_s = time.monotonic() + _jittered(POLL_S)

        await_exit(self._home, poll_when_due)

    def poll(self) -> None:
        """Switch to the champion unless it is live. After a failure, the live release stays."""
        try:
            version = self._registry.require_champion().version
        except (StoreError, IntegrityError) as error:
            if isinstance(error, FormatError) and not self._live:
                raise
            self._keep(str(error))
            return
        if version == self._live:
            self._settle()
            return
        if version == self._failed and time.monotonic() < self._retry_at_s:
            return
        try:
            self._switch(lambda directory: self._target.fetch(version, directory))
        except EvernearError as error:
            self._failed, self._failures = version, self._failures + 1 if version == self._failed else 1
            pause_s = backoff_s(self._failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._retry_at_s = time.monotonic() + _jittered(pause_s)
            self._keep(f"Release {version} is the champion, but cannot be brought up here: {error}", version)
            return
        self._report(f"Release {version} is live{f', after {self._live}' if self._live else ''}.")
        self._became_live(version)

    def _switch(self, fetch: Callable[[Path], Path]) -> None:
        with self._target.exclusive(), tempfile.TemporaryDirectory(prefix="evernear-follow-") as temporary:
            archive = fetch(Path(temporary))
            self._target.switch(archive, open_release(archive, Path(temporary) / "release"))

    def _restore(self) -> None:
        """Start the last live release from this machine's disk, unless a server runs."""
        state = _load_state(self._home)
        if torchserve.is_running(self._home):
            self._live = self._target.default_version() or ""
            return
        if state is None:
            return
        archive = model_store(self._home) / Path(state.archive).name
        if not archive.is_file() or sha256_file(archive) != state.archive_sha256:
            return
        try:
            self._switch(lambda _: archive)
        except EvernearError as error:
            self._report(f"Release {state.version}, which was live before, cannot be brought up again: {error}")
            return
        self._report(f"Release {state.version} is live again, from this machine's disk.")
        self._became_live(state.version)

    def _became_live(self, version: str) -> None:
        self._live = version
        self._failed = self._reported = ""
        self._save("")

    def _settle(self) -> None:
        """Clear an earlier failure, because the champion is live."""
        if self._reported or self._failed:
            self._failed = self._reported = ""
            self._report(f"Release {self._live} is the champion and is live.")
            self._save("")

    def _keep(self, fault: str, subject: str = "") -> None:
        """Report why the champion is not live, once per ``subject`` or (if empty) ``fault``."""
        if (subject or fault) == self._reported:
            return
        self._reported = subject or fault
        kept = f"Release {self._live} stays live" if self._live else "No release is live"
        self._report(f"{fault} {kept}; this is tried again.")
        if self._live:
            self._save(fault)

    def _save(self, fault: str) -> None:
        self._fault = fault
        archive = self._target.stored_archive(self._live)
        previous = _load_state(self._home)
        same = previous is not None and previous.version == self._live
        FollowState(
            pid=os.getpid(),
            version=self._live,
            archive=archive.name,
            archive_sha256=previous.archive_sha256 if previous and same else sha256_file(archive),
            since=previous.since if previous and same else datetime.now(UTC),
            fault=fault,
        ).save(self._home / STATE_FILE)


def _jittered(pause_s: float) -> float:
    return pause_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no cryptography


def _load_state(home: Path) -> FollowState | None:
    path = home / STATE_FILE
    if not path.is_file():
        return None
    try:
        return FollowState.load(path)
    except IntegrityError:
        return None


def await_champion(settings: RunSettings, report: Callable[[str], None]) -> None:
    """Wait until the store has a champion. ``report`` receives each new reason for waiting."""
    registry = Registry(open_store(settings.store_uri))
    reported = ""
    while True:
        try:
            if registry.champion() is not None:
                return
            reason = registry.explain_no_champion()
        except TransientStoreError as error:
            reason = str(error)
        if reason != reported:
            report(f"{reason} Waiting.")
        reported = reason
        time.sleep(CHAMPION_POLL_S)


@contextlib.contextmanager
def stopped_by_signals(home: Path) -> Generator[None]:
    """Bind the server's lifetime to this process. SIGTERM and Ctrl-C drain it, then stop both.

    Raises:
        SystemExit: the process received SIGTERM. The exit code is 0.
        UserInterruptError: the user pressed Ctrl-C.
    """
    torchserve.adopt(home)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    except SystemExit:
        torchserve.stop_server(home)
        raise
    except KeyboardInterrupt:
        torchserve.stop_server(home)
        raise UserInterruptError(
            "Interrupted. TorchServe answered the requests in flight and stopped; `evernear serve` starts it again."
        ) from None


def await_exit(home: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until the server in ``home`` exits.

    Raises:
        ServingError: the server died.
    """
    while torchserve.is_running(home):
        meanwhile()
        time.sleep(PROCESS_POLL_S)
    if read_state(home) is not None:  # the server was not stopped on purpose
        raise ServingError(f"TorchServe died; see {home}/logs.")
