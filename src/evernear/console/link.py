"""The link of the console that runs in a working directory, so that a second start can show it."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from evernear.common.disk import disk_errors, file_lock
from evernear.common.frozen import Frozen
from evernear.errors import BusyError, StoreError

_LOCK = "console.lock"
_LINKS = "console.json"


class Links(Frozen):
    """What `evernear console` printed. The first link contains the token."""

    port: int
    lines: tuple[str, ...]


class LinkFile:
    """The links in ``console.json``, which only their user can read. They are those of a running
    console while its process holds ``console.lock``."""

    def __init__(self, workdir: Path) -> None:
        self._path = workdir / _LINKS
        self._lock = ExitStack()
        self._is_ours = False

    def __enter__(self) -> Self:
        with suppress(BusyError, StoreError):  # of another console, or a disk without locks
            self._lock.enter_context(file_lock(self._path.with_name(_LOCK), timeout_s=0))
            self._is_ours = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self._path.unlink(missing_ok=True)
        self._lock.close()

    def of_another(self) -> Links | None:
        """The links of the console that is running, or None if this process is the only one."""
        return None if self._is_ours or not self._path.exists() else Links.load(self._path)

    def write(self, port: int, lines: Sequence[str]) -> None:
        if not self._is_ours:
            return
        with disk_errors(self._path):
            self._path.unlink(missing_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(Links(port=port, lines=tuple(lines)).to_json())
