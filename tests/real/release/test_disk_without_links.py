"""A working directory on exFAT or SMB, which have neither links nor sockets."""

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from evernear.serving import configuration, torchserve
from evernear.serving.configuration import temporary_directory
from evernear.serving.endpoints import home_of
from tests.releases import MakeRelease, settings_on_free_ports


@pytest.fixture(params=[errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def linkless_disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which every link and every socket is refused."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    class Socket(socket.socket):
        def bind(self, address: Any, /) -> None:
            if self.family == socket.AF_UNIX and os.fsdecode(address).startswith(str(tmp_path)):
                refuse()
            super().bind(address)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(configuration.socket, "socket", Socket)
    configuration.has_sockets.cache_clear()
    return tmp_path


def test_release_is_archived_without_links(linkless_disk: Path, make_release: MakeRelease) -> None:
    assert make_release().archive.stat().st_size > 0


def test_sockets_are_elsewhere(linkless_disk: Path) -> None:
    home = home_of(linkless_disk)
    torchserve.require_startable(settings_on_free_ports(), home)
    assert temporary_directory(home).parent == Path("/tmp")
    assert list(home.glob(".sock*")) == []


def test_sockets_are_in_the_working_directory_where_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "UNIX_SOCKET_PATH_BYTES", 4096)
    home = home_of(tmp_path)
    configuration.has_sockets.cache_clear()
    assert temporary_directory(home) == home / "tmp"
    torchserve.require_startable(settings_on_free_ports(), home)
    assert not (home / "tmp").exists()
    assert list(home.glob(".sock*")) == []
