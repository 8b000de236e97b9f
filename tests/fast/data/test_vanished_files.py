"""Files that vanish, or cannot be read, while an ingest reads them."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common import retry
from evernear.data.sources import FileSource, open_source
from evernear.data.sources.folder import Folder
from evernear.data.validate import require_valid, validate_dataset
from evernear.errors import DataError, MissingObjectError
from evernear.settings import ValidationSettings
from tests.dataset_images import write_files
from tests.small_ingest import findings, noted, opened

Read = Callable[[Path], bytes]
OnRead = Callable[[Callable[[Path, Read], bytes]], None]


@pytest.fixture
def on_read(monkeypatch: pytest.MonkeyPatch) -> OnRead:
    """Replaces how files of the source are read, without pauses between attempts."""
    original = Path.read_bytes
    monkeypatch.setattr(retry.time, "sleep", lambda pause_s: None)

    def install(read: Callable[[Path, Read], bytes]) -> None:
        monkeypatch.setattr(Path, "read_bytes", lambda path: read(path, original))

    return install


def test_vanished_files_are_as_if_they_had_not_been_listed(tree, run_ingest, make_image, contents, on_read) -> None:
    leaving = {"1/leaves.png": make_image(700), "old/a.png": make_image(701), "old/b.png": make_image(702)}
    write_files(tree, leaving)
    attempts: list[str] = []

    def read(path: Path, original: Read) -> bytes:
        attempts.append(path.name)
        if path.name == "leaves.png":
            path.unlink(missing_ok=True)
        if path.parent.name == "old":
            shutil.rmtree(path.parent, ignore_errors=True)
        return original(path)

    on_read(read)
    manifest = run_ingest(tree, part_names=5)
    assert (len(contents(manifest)), findings(manifest)) == (36, ())
    assert manifest.digest == run_ingest(tree).digest
    stays = [name for name in attempts if f"/{name}" not in str([*leaving])]
    assert max(map(stays.count, stays)) <= 3, "once for its form, and once as an image: finished parts stay"


def test_changed_file_that_vanishes_takes_its_image_along(tree, run_ingest, make_image, contents, on_read) -> None:
    before = contents(run_ingest(tree))
    path = write_files(tree, {"1/000.png": make_image(700)}) / "1" / "000.png"

    def read(file: Path, original: Read) -> bytes:
        if file.name == path.name:
            file.unlink(missing_ok=True)
        return original(file)

    on_read(read)
    assert len(contents(run_ingest(tree))) == len(before) - 1


def test_link_whose_target_vanishes_stops_the_ingest(tree, run_ingest, make_image, tmp_path: Path, on_read) -> None:
    """Images must not leave the dataset when a disk is unmounted."""
    run_ingest(tree)
    disk = write_files(tmp_path / "disk", {f"{number}.png": make_image(number) for number in range(800, 820)})
    (tree / "linked").symlink_to(disk)

    def read(path: Path, original: Read) -> bytes:
        shutil.rmtree(disk, ignore_errors=True)
        return original(path)

    on_read(read)
    with pytest.raises(Exception, match="a link that leads nowhere"):
        run_ingest(tree)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP])
def test_unreadable_file_is_left_out_and_named(tree, run_ingest, make_image, contents, on_read, code: int) -> None:
    write_files(tree, {"1/closed.png": make_image(700)})
    broken = True

    def read(path: Path, original: Read) -> bytes:
        if broken and path.name == "closed.png":
            raise OSError(code, os.strerror(code), str(path))
        return original(path)

    on_read(read)
    manifest = run_ingest(tree)
    assert (len(contents(manifest)), noted(manifest, "undecodable")) == (36, ["1/closed.png"])
    few = ValidationSettings(max_left_out_fraction=0.05)
    require_valid(report := validate_dataset(opened(manifest), few))
    assert f"closed.png cannot be read or written: {os.strerror(code)}." in report.markdown()
    with pytest.raises(DataError, match=r"1 file cannot be decoded and was left out; .* 1/closed\.png"):
        require_valid(validate_dataset(opened(manifest), ValidationSettings(max_left_out_fraction=0)))
    broken = False
    assert len(contents(run_ingest(tree))) == 37, "the next run reads it"


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_transient_error_of_a_file_server_is_retried(tree, run_ingest, contents, on_read, code: int) -> None:
    failed: set[Path] = set()

    def read(path: Path, original: Read) -> bytes:
        if path.suffix == ".png" and path not in failed:
            failed.add(path)
            raise OSError(code, os.strerror(code), str(path))
        return original(path)

    on_read(read)
    manifest = run_ingest(tree)
    assert (len(contents(manifest)), findings(manifest)) == (36, ())


def test_source_that_may_not_be_read_at_all_says_so(tree, run_ingest, on_read) -> None:
    def read(path: Path, original: Read) -> bytes:
        if path.suffix != ".png":
            return original(path)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    on_read(read)
    with pytest.raises(DataError, match=r"No image in .* can be decoded; the first: .*Permission denied"):
        run_ingest(tree)


def test_file_that_vanishes_while_the_folder_is_listed_is_not_listed(
    tree, make_image, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tree, {"1/leaves": make_image(700), "1/inner/leaves.png": make_image(701)})
    names = {entry.name for entry in Folder(tree).entries()}
    scandir, own = os.scandir, str(tree / "1")

    def scan(folder: str):
        if folder != own or not (tree / "1" / "leaves").exists():
            return scandir(folder)
        entries = _Entries(scandir(folder))
        (tree / "1" / "leaves").unlink()
        shutil.rmtree(tree / "1" / "inner")
        return entries

    monkeypatch.setattr(os, "scandir", scan)
    assert {entry.name for entry in Folder(tree).entries()} == names - {"1/leaves", "1/inner/leaves.png"}


class _Entries(list[os.DirEntry[str]]):
    def __enter__(self):
        return iter(self)

    def __exit__(self, *_: object) -> None: ...


def test_missing_file_of_a_table_vanished_too(tree, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("path,label\ntree/1/000.png,a\ntree/2/001.png,b\n")
    source = open_source(f"table:{tmp_path}/table.csv")
    assert isinstance(source, FileSource)
    (tree / "1" / "000.png").unlink()
    with pytest.raises(MissingObjectError, match="deleted or moved after it was listed"):
        source.read("tree/1/000.png")
