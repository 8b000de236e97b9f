"""Run the local TorchServe server in the foreground, once a champion exists."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

from evernear.common.store import open_store
from evernear.errors import ServingError, TransientStoreError, UserInterruptError
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.endpoints import read_state
from evernear.settings import RunSettings

FOLLOW_POLL_S = 0.5
CHAMPION_POLL_S = 2.0


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


def follow(home: Path) -> None:
    """Wait until the server in ``home`` exits.

    Raises:
        ServingError: the server died.
    """
    while torchserve.is_running(home):
        time.sleep(FOLLOW_POLL_S)
    if read_state(home) is not None:  # the server was not stopped on purpose
        raise ServingError(f"TorchServe died; see {home}/logs.")
