"""A file that changed is read again, whatever times it has; one that was found equal is not new."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.common.store.base import put_folder
from evernear.common.store.s3_connection import _parse_page
from evernear.data.manifest import Manifest
from evernear.data.source_diff import SourceDiff, diff_source
from evernear.data.sources.folder import Bucket, Folder
from evernear.settings import DataSettings

FIRST, SECOND = Path("1", "000.png"), Path("2", "001.png")


@pytest.fixture
def alike(tree: Path) -> Path:
    """The tree, with two files of equal size and time in different classes."""
    size_bytes = max((tree / name).stat().st_size for name in (FIRST, SECOND))
    for name in (FIRST, SECOND):
        data = (tree / name).read_bytes()
        (tree / name).write_bytes(data + bytes(size_bytes - len(data)))  # decoders ignore what follows a PNG
    for path in tree.rglob("*.png"):
        os.utime(path, ns=(10**18, 10**18))
    return tree


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of all files that are read from a folder or a bucket."""
    names: list[str] = []
    for source in (Folder, Bucket):

        def counting(self: Folder | Bucket, name: str, real=source.read) -> bytes:
            names.append(name)
            return real(self, name)

        monkeypatch.setattr(source, "read", counting)
    return names


@pytest.fixture
def diff(tmp_path: Path) -> Callable[[Path, Manifest], SourceDiff]:
    """The changes of a folder since a snapshot's current tables, as the watcher sees them."""

    def diff(tree: Path, manifest: Manifest) -> SourceDiff:
        store = open_store(manifest.store_uri)
        key = f"datasets/{manifest.name}/manifests/{manifest.digest}.json"
        stored = Manifest.from_json(store.get(key), key)
        (changes,) = diff_source(DataSettings(source=f"folder:{tree}"), store, [stored], cache=tmp_path / "cache")
        return changes

    return diff


def swap_by_renaming(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def swap_in_place(first: Path, second: Path) -> None:
    """As ``rsync --times --inplace`` does."""
    one, two = first.read_bytes(), second.read_bytes()
    for path, data in ((first, two), (second, one)):
        with path.open("r+b") as file:
            file.write(data)
        os.utime(path, ns=(10**18, 10**18))


def swap_links(first: Path, second: Path) -> None:
    targets = first.parent.parent.parent / "one", first.parent.parent.parent / "two"
    for path, target in zip((first, second), reversed(targets), strict=True):
        path.rename(target)
    for path, target in zip((first, second), targets, strict=True):
        path.symlink_to(target)


@pytest.mark.parametrize("swap", [swap_by_renaming, swap_in_place, swap_links])
def test_swapped_files_of_equal_size_and_time_get_their_new_labels(alike, run_ingest, contents, swap) -> None:
    before = contents(run_ingest(alike))
    swap(alike / FIRST, alike / SECOND)
    after = contents(run_ingest(alike))
    assert after.split == before.split
    changed = {digest: (label, after.label[digest]) for digest, label in before.label.items()}
    assert sorted(pair for pair in changed.values() if pair[0] != pair[1]) == [("1", "2"), ("2", "1")]


def test_swapped_class_folders_get_their_new_labels(alike, run_ingest, contents) -> None:
    """Renaming a folder does not touch the files in it, so only their inodes tell."""
    for label in "12":
        for number, path in enumerate(sorted((alike / label).iterdir())):
            path.rename(path.with_name(f"{number}.png"))
    before = contents(run_ingest(alike))
    swap_by_renaming(alike / "1", alike / "2")
    after = contents(run_ingest(alike))
    assert after.label == {digest: {"1": "2", "2": "1", "10": "10"}[label] for digest, label in before.label.items()}


def chmod(tree: Path) -> None:
    for path in tree.rglob("*.png"):
        path.chmod(0o640)


def link_elsewhere(tree: Path) -> None:
    """As backups with hard links do, which changes the time of the inode."""
    backup = tree.parent / "backup"
    backup.mkdir()
    for number, path in enumerate(tree.rglob("*.png")):
        (backup / str(number)).hardlink_to(path)


def restore(tree: Path) -> None:
    """As from a backup that preserves times."""
    shutil.copytree(tree, tree.parent / "restored")
    shutil.rmtree(tree)
    (tree.parent / "restored").rename(tree)


@pytest.mark.parametrize("change", [chmod, link_elsewhere, restore])
def test_files_with_another_mode_or_inode_are_read_once_and_are_not_new(tree, run_ingest, read, diff, change) -> None:
    first = run_ingest(tree)
    change(tree)
    assert diff(tree, first).new == 0, "nothing to start a run for"
    read.clear()
    second = run_ingest(tree)
    assert len(read) == 36
    assert (second.digest, second.parent) == (first.digest, first.parent)
    read.clear()
    assert run_ingest(tree) == second
    assert (read, diff(tree, second).new) == ([], 0)


def touch(tree: Path) -> None:
    for path in tree.rglob("*.png"):
        path.touch()


def rename(tree: Path) -> None:
    for path in sorted(tree.rglob("*.png")):
        path.rename(path.with_name(f"renamed-{path.name}"))


@pytest.mark.parametrize(("change", "removed"), [(touch, 0), (rename, 36)])
def test_touched_and_renamed_files_are_new_until_a_run_has_read_them(tree, run_ingest, read, diff, change, removed):
    first = run_ingest(tree)
    change(tree)
    assert (diff(tree, first).new, diff(tree, first).removed) == (36, removed)
    second = run_ingest(tree)
    assert second.digest == first.digest
    assert (diff(tree, first).new, diff(tree, first).removed) == (0, 0)
    read.clear()
    assert run_ingest(tree) == second
    assert read == []


def test_tables_without_change_times_is_read_again_once(alike, run_ingest, read, diff, contents, monkeypatch) -> None:
    """Two files were swapped before the upgrade, and the earlier version did not see it."""

    def earlier(stat: os.stat_result) -> str:
        return f"{stat.st_size}-{stat.st_mtime_ns}"

    with monkeypatch.context() as patched:
        patched.setattr("evernear.data.sources.folder.file_etag", earlier)
        stale = run_ingest(alike)
        swap_by_renaming(alike / FIRST, alike / SECOND)
        assert run_ingest(alike) == stale
    assert diff(alike, stale).new == 0, "an upgrade is no reason to start a run"
    read.clear()
    corrected = run_ingest(alike)
    assert len(read) == 36
    old, new = contents(stale), contents(corrected)
    assert sum(label != new.label[digest] for digest, label in old.label.items()) == 2
    assert new.split == old.split
    read.clear()
    assert run_ingest(alike) == corrected
    assert read == []


def test_reread_finds_changes_that_the_listing_does_not_show(alike, run_ingest, read, contents, monkeypatch) -> None:
    """A network file system may serve cached attributes."""
    monkeypatch.setattr("evernear.data.sources.folder.file_etag", lambda stat: str(stat.st_size))
    first = run_ingest(alike)
    swap_by_renaming(alike / FIRST, alike / SECOND)
    assert run_ingest(alike) == first
    read.clear()
    second = run_ingest(alike, reread=True)
    assert len(read) == 36
    old, new = contents(first), contents(second)
    assert sum(label != new.label[digest] for digest, label in old.label.items()) == 2
    read.clear()
    assert run_ingest(alike) == second, "only the run with the setting reads everything"
    assert read == []


def test_reread_of_equal_files_stores_nothing(tree, run_ingest, read, tmp_path: Path) -> None:
    (tree / "1" / "broken.png").write_text("no image")
    first = run_ingest(tree)

    def files() -> list[tuple[Path, int]]:
        stored = (path for path in (tmp_path / "store").rglob("*.*") if path.is_file())
        return sorted((path, path.stat().st_mtime_ns) for path in stored)

    before = files()
    read.clear()
    assert run_ingest(tree, reread=True) == first
    assert len(read) == 37
    assert files() == before


@pytest.mark.slow
def test_reread_applies_to_buckets(tree, run_ingest, read, bucket: str) -> None:
    put_folder(open_store(f"s3://{bucket}"), "images", tree)
    first = run_ingest(f"s3://{bucket}/images")
    read.clear()
    run_ingest(f"s3://{bucket}/images")
    assert read == []
    assert run_ingest(f"s3://{bucket}/images", reread=True) == first
    assert len(read) == 36


@pytest.fixture
def kill_ingest(run_ingest, monkeypatch) -> Callable[..., None]:
    """``kill_ingest(source, ...)`` ends when all parts have results."""

    def kill_ingest(source: Path, **settings: object) -> None:
        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("evernear.data.ingest.combine", killed)
            with pytest.raises(KeyboardInterrupt):
                run_ingest(source, **settings)

    return kill_ingest


def test_killed_reread_starts_over(tree, run_ingest, kill_ingest, read) -> None:
    """Its parts could be days old, and "again" means now."""
    first = run_ingest(tree)
    kill_ingest(tree, reread=True)
    read.clear()
    assert run_ingest(tree, reread=True).digest == first.digest
    assert len(read) == 36


def test_parts_of_earlier_tables_are_obsolete(tree, run_ingest, kill_ingest, read, make_image) -> None:
    first = run_ingest(tree)
    added = tree / "1" / "new.png"
    added.write_bytes(make_image(1000))
    kill_ingest(tree)
    added.unlink()
    for path in tree.rglob("*.png"):
        path.touch()
    assert run_ingest(tree).digest == first.digest, "with other tables"
    added.write_bytes(make_image(1000))
    read.clear()
    run_ingest(tree)
    assert read == ["1/new.png"]


def test_listing_without_etags_uses_the_modification_time() -> None:
    page = b"""<ListBucketResult><Contents><Key>a/1.png</Key><Size>3</Size>
      <LastModified>2026-01-02T03:04:05Z</LastModified></Contents></ListBucketResult>"""
    assert _parse_page(page).objects[0].etag == "2026-01-02T03:04:05Z"
