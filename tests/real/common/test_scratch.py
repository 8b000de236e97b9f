"""Scratch directories in /tmp, where other users can create files."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evernear.common.disk import make_private, scratch, scratch_name
from evernear.errors import StoreError
from evernear.serving import torchserve
from evernear.serving.configuration import temporary_directory
from tests.releases import settings_on_free_ports

UID, OTHER_UID = 12345, 23456
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


@contextmanager
def user(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared_directory(tmp_path: Path) -> Path:
    """A world-writable directory like /tmp, with accessible parents."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == "root" and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o711)
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    return shared


def plain(directory: Path) -> None:
    directory.mkdir()
    (directory / "library.so").write_text("theirs")


def open_to_all(directory: Path) -> None:
    plain(directory)
    directory.chmod(0o777)


def link(directory: Path) -> None:
    plain(directory.with_name("elsewhere"))
    directory.with_name("elsewhere").chmod(0o777)
    directory.symlink_to(directory.with_name("elsewhere"))


def file(directory: Path) -> None:
    directory.write_text("theirs")


def fifo(directory: Path) -> None:
    os.mkfifo(directory)


HOSTILE_PATHS = (plain, open_to_all, link, file, fifo)


@as_root
@pytest.mark.parametrize("create", HOSTILE_PATHS)
def test_directory_of_another_user_is_not_used(shared_directory: Path, create: Callable[[Path], None]) -> None:
    directory = shared_directory / "evernear-known"
    with user(OTHER_UID):
        create(directory)
    with user(UID), pytest.raises(StoreError, match="evernear-known is not a directory of this user"):
        make_private(directory)


@as_root
def test_server_does_not_start_in_a_directory_of_another_user(tmp_path: Path) -> None:
    """Java would load a native library from such a directory."""
    home = tmp_path / ("d" * 100)
    directory = temporary_directory(home)
    assert directory.parent == Path("/tmp")
    try:
        with user(OTHER_UID):
            plain(directory)
        with pytest.raises(StoreError, match=rf"{directory} is not a directory of this user; remove it"):
            torchserve.start_server(settings_on_free_ports(), home)
        assert not torchserve.processes(home)
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("create", HOSTILE_PATHS)
def test_previous_content_is_removed(shared_directory: Path, create: Callable[[Path], None]) -> None:
    """Applies only to directories of the same user, not to links or files."""
    directory = shared_directory / "evernear-known"
    create(directory)
    if create in (plain, open_to_all):
        make_private(directory)
        assert (stat.S_IMODE(directory.stat().st_mode), list(directory.iterdir())) == (0o700, [])
    else:
        with pytest.raises(StoreError):
            make_private(directory)


def test_scratch_starts_empty_and_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "scratch"
    plain(directory)  # left behind by a killed process
    with scratch(directory) as created:
        assert list(created.iterdir()) == []
        (created / "file").touch()
    assert not directory.exists()


def test_name_is_short_and_contains_the_owner(tmp_path: Path) -> None:
    assert len(scratch_name(tmp_path)) < 25
    assert scratch_name(tmp_path) == scratch_name(tmp_path) != scratch_name(tmp_path / "other")


def test_all_processes_share_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline step with a separate TMPDIR starts the server that `evernear stop` ends."""
    home = tmp_path / ("d" * 100)
    before = temporary_directory(home)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert temporary_directory(home) == before == Path("/tmp") / before.name
