"""The umask decides who may access files and directories."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from evernear.common.disk import write_atomically
from evernear.common.store import open_store
from evernear.data.sources.digits import lay_out_digits


@pytest.fixture(params=[0o077, 0o022, 0o002], ids=["private", "usual", "group"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(directory: Path) -> dict[bool, set[int]]:
    """Of all directories (True) and of all files in ``directory``."""
    paths = list(directory.rglob("*"))
    return {kind: {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_dir() is kind} for kind in (True, False)}


def test_umask_decides_the_modes_of_all_files(umask: int, tmp_path: Path) -> None:
    write_atomically(tmp_path / "settings" / "evernear.toml", "preset = 'quick'")
    store = open_store((tmp_path / "store").as_uri())
    etag = store.put_if("a/compared", b"first", None)
    store.put_if("a/compared", b"second", etag)
    store.put("a/copied", tmp_path / "settings" / "evernear.toml")
    store.fetch("a/copied", tmp_path / "cache" / "fetched")
    lay_out_digits(tmp_path / "digits", without="7")

    assert modes(tmp_path) == {True: {0o777 & ~umask}, False: {0o666 & ~umask}}


def test_replaced_file_keeps_its_mode(umask: int, tmp_path: Path) -> None:
    path = tmp_path / "evernear.toml"
    path.write_text("")
    for mode in (0o600, 0o640, 0o664):
        path.chmod(mode)
        write_atomically(path, "preset = 'quick'")
        assert stat.S_IMODE(path.stat().st_mode) == mode
