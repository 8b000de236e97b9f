"""``evernear dataset export`` as a user types it."""

import json
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest
from evernear.errors import MissingObjectError, SettingsError
from evernear.release.export_dataset import select_snapshot
from evernear.release.registry import Registry
from evernear.settings import DataSettings
from tests.command_line import evernear
from tests.dataset_images import write_images
from tests.releases import copy_store


@pytest.fixture
def snapshots(tmp_path: Path) -> tuple[Manifest, Manifest]:
    """Two snapshots of one dataset."""

    def ingest(count: int, first: int) -> Manifest:
        write_images(tmp_path / "photos", count, first, size=(8, 8))
        return ingest_source(DataSettings(source=f"folder:{tmp_path / 'photos'}"), (tmp_path / "store").as_uri())

    return ingest(45, 0), ingest(15, 45)


def export(tmp_path: Path, *options: str, out: str = "out", form: str = "parquet"):
    store = (tmp_path / "store").as_uri()
    return evernear("dataset", "export", "--format", form, "--out", tmp_path / out, "--store", store, *options)


def test_newest_snapshot_is_exported(tmp_path: Path, snapshots: tuple[Manifest, Manifest]) -> None:
    ended = export(tmp_path)
    assert (ended.returncode, ended.stdout) == (
        0,
        f"60 images of photos, snapshot {snapshots[1].digest[:12]}, as parquet in {(tmp_path / 'out').as_uri()}.\n",
    )
    again = export(tmp_path, "--json", "--snapshot", snapshots[1].digest)
    assert json.loads(again.stdout) == {
        "out": (tmp_path / "out").as_uri(),
        "format": "parquet",
        "dataset": "photos",
        "digest": snapshots[1].digest,
        "release": "",
        "images": 60,
    }


def test_output_is_a_directory_or_a_bucket(tmp_path: Path, snapshots: tuple[Manifest, Manifest]) -> None:
    store = (tmp_path / "store").as_uri()
    for out, message in (
        ("http://host/out", "is neither a directory nor s3"),
        (f"{store}/out", f"in the store {store};"),
    ):
        ended = evernear("dataset", "export", "--format", "folder", "--out", out, "--store", store)
        assert (ended.returncode, message in ended.stderr) == (SettingsError.exit_code, True), ended.stderr


def test_snapshot_is_chosen_by_the_start_of_its_digest(tmp_path: Path, snapshots: tuple[Manifest, Manifest]) -> None:
    ended = export(tmp_path, "--snapshot", snapshots[0].digest[:8])
    assert ended.stdout.startswith(f"45 images of photos, snapshot {snapshots[0].digest[:12]}, ")


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--snapshot", "1234567"], 2, "'1234567' is not the digest of a snapshot, nor its first 8 or more digits."),
        (["--snapshot", "../../head"], 2, "is not the digest of a snapshot"),
        (["--snapshot", "00000000"], 3, "/store has no snapshot 00000000."),
        (["--release", "20260101.000000.00000000"], 4, "Release 20260101.000000.00000000 does not exist in"),
        (["--set", "data.dataset=other"], 3, "/store has no dataset 'other'; `evernear run` makes one."),
    ],
)
def test_unknown_snapshot_is_one_sentence(
    tmp_path: Path, snapshots: tuple[Manifest, Manifest], options: list[str], exit_code: int, message: str
) -> None:
    ended = export(tmp_path, *options)
    assert ended.returncode == exit_code
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_dataset_is_named_if_the_store_has_several(tmp_path: Path, snapshots: tuple[Manifest, Manifest]) -> None:
    write_images(tmp_path / "flowers", 30, size=(8, 8))
    ingest_source(DataSettings(source=f"folder:{tmp_path / 'flowers'}"), (tmp_path / "store").as_uri())
    ended = export(tmp_path)
    assert (ended.returncode, "flowers, photos; choose one with --set data.dataset=flowers." in ended.stderr) == (
        2,
        True,
    )
    assert export(tmp_path, "--set", "data.dataset=flowers").stdout.startswith("30 images of flowers, ")
    assert export(tmp_path, "--snapshot", snapshots[0].digest, out="earlier").stdout.startswith("45 images of photos, ")


def test_release_selects_its_snapshot(tmp_path: Path, make_release, system) -> None:
    release = make_release()
    store = copy_store(system, tmp_path / "store").dataset.store
    Registry(store).publish(release.archive)
    assert select_snapshot(store, "", None, release.version).digest == system.dataset.digest
    folder = evernear(
        "dataset", "export", "--format", "folder", "--out", tmp_path / "out", "--store", store.uri,
        "--release", release.version,
    )  # fmt: skip
    assert folder.returncode == 2
    assert f"or --snapshot {system.dataset.digest[:12]} instead of --release." in folder.stderr
    other = open_store((tmp_path / "other").as_uri())
    Registry(other).publish(release.archive)
    with pytest.raises(MissingObjectError, match="no longer has the snapshot"):
        select_snapshot(other, "", None, release.version)
