"""Special files in place of a regular file. Opening some of the special files blocks forever."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # keeps the socket path short enough
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(before)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _directory(path: Path) -> None:
    path.mkdir()


def _link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_suffix(".fifo"))
    path.symlink_to(path.with_suffix(".fifo"))


NO_FILES: tuple[Callable[[Path], None], ...] = (_fifo, _socket, _device, _directory, _link_to_a_fifo)
