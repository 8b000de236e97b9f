"""A file that is needed for each request is read again only after a change."""

import os
from pathlib import Path

import pytest

from evernear.common.disk import reread, write_atomically

LONG_AGO_NS = 10**18


def test_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path, reads = tmp_path / "key", 0

    @reread
    def content(path: Path) -> str:
        nonlocal reads
        reads += 1
        return path.read_text()

    def write(text: str, *, modified_ns: int = LONG_AGO_NS) -> None:
        write_atomically(path, text)
        os.utime(path, ns=(modified_ns, modified_ns))

    with pytest.raises(FileNotFoundError):
        content(path)
    write("first")
    assert [content(path) for _ in range(3)] == ["first"] * 3
    assert reads == 1
    write("other")  # of the same size and time, as a restored backup
    assert [content(path) for _ in range(3)] == ["other"] * 3
    assert reads == 2
    path.unlink()
    with pytest.raises(FileNotFoundError):
        content(path)


def test_file_that_was_just_written_is_read_each_time(tmp_path: Path) -> None:
    """Two changes within one tick of the disk's clock leave the same time."""
    path = tmp_path / "key"
    content = reread(Path.read_text)
    for number in range(10):
        path.write_text(f"{number}")
        assert content(path) == f"{number}"
