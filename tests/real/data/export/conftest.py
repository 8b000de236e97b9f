"""Snapshots of small folders of noise, and exports of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.store import Store, open_store
from evernear.data import export
from evernear.data.manifest import Manifest
from evernear.release.export_dataset import export_snapshot
from tests.dataset_images import write_images
from tests.small_ingest import ingest_with

FILE_IMAGES = 20
SHARD_SIZE_BYTES = 2**15
Ingest = Callable[..., Manifest]
ExportTo = Callable[..., None]


@pytest.fixture
def ingest_in_shards(tmp_path: Path) -> Ingest:
    """``ingest_in_shards(source, store)`` ingests a source into a store in the test's directory."""

    def ingest_in_shards(source: str, store: str = "store", **settings: object) -> Manifest:
        return ingest_with(source, (tmp_path / store).as_uri(), **{"shard_size_bytes": SHARD_SIZE_BYTES} | settings)

    return ingest_in_shards


@pytest.fixture(scope="package")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A snapshot of 120 images in several shards, which nobody changes."""
    directory = tmp_path_factory.mktemp("snapshot")
    write_images(directory / "photos", 120)
    source, store = f"folder:{directory / 'photos'}", (directory / "store").as_uri()
    return ingest_with(source, store, shard_size_bytes=SHARD_SIZE_BYTES)


@pytest.fixture
def export_to(monkeypatch: pytest.MonkeyPatch) -> ExportTo:
    """``export_to(out, format, snapshot)`` exports in files of 20 images."""
    monkeypatch.setattr(export, "FILE_IMAGES", FILE_IMAGES)

    def export_to(out: Path | Store, form: export.Format, manifest: Manifest, release: str | None = None) -> None:
        out = open_store(out.as_uri()) if isinstance(out, Path) else out
        export_snapshot(open_store(manifest.store_uri), manifest, out, form, release)

    return export_to
