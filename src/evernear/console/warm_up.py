"""Read the store into the console's caches in the background. Pages wait for the warm-up and show
its progress."""

import logging
import threading
from collections.abc import Callable, Iterator

from evernear.console.backend import Backend
from evernear.console.groups import group_items
from evernear.errors import EvernearError

PATIENCE_S = 0.1
"""Seconds that a page waits for the warm-up before the page shows progress instead."""
_log = logging.getLogger(__name__)


class WarmUp:
    """Reads immutable objects into memory in advance. Pages read other objects on demand."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ended = threading.Event()
        self._ended.set()
        self.progress = ""
        """The objects currently being read, such as "the newest releases"."""

    def start(self) -> None:
        """Start the warm-up in a daemon thread."""
        self._ended.clear()
        threading.Thread(target=self._run, name="console-warm-up", daemon=True).start()

    def wait(self) -> bool:
        """Wait up to `PATIENCE_S` seconds, and return whether the warm-up has ended."""
        return self._ended.wait(PATIENCE_S)

    def _run(self) -> None:
        steps: tuple[Callable[[], Iterator[str]], ...] = (self._read_queue, self._read_releases, self._read_runs)
        try:
            for step in steps:
                for self.progress in step():
                    pass
        except EvernearError as error:  # pages report the error themselves
            _log.warning("The console reads the store at the first visit of each page: %s", error)
        finally:
            self._ended.set()

    def _read_runs(self) -> Iterator[str]:
        yield "the list of runs"
        self._backend.records.entries()

    def _read_releases(self) -> Iterator[str]:
        yield "the newest releases"
        self._backend.releases.newest()
        champion = self._backend.releases.champion()
        if champion is not None:
            yield f"the history of {champion.promotion.number:,} promotions"
            self._backend.releases.history(champion)

    def _read_queue(self) -> Iterator[str]:
        yield "images to review"
        answered = self._backend.answers.latest().keys() if self._backend.answers else ()
        group_items(self._backend.pending(answered), self._backend.releases.find)  # loads scipy
