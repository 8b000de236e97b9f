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

FILE_IMAGES = 40
Ingest = Callable[..., Manifest]
ExportTo = Callable[..., None]


@pytest.fixture
def ingest(tmp_path: Path) -> Ingest:
    """``ingest(source, **settings)`` ingests a source into a store of its name in the test's
    directory."""

    def ingest(source: str, store: str = "store", **settings: object) -> Manifest:
        return ingest_with(source, (tmp_path / store).as_uri(), **settings)

    return ingest


@pytest.fixture
def snapshot(tmp_path: Path, ingest: Ingest) -> Manifest:
    """A snapshot of 300 images in several shards."""
    write_images(tmp_path / "photos", 300)
    return ingest(f"folder:{tmp_path / 'photos'}")


@pytest.fixture
def export_to(monkeypatch: pytest.MonkeyPatch) -> ExportTo:
    """``export_to(out, format, snapshot)`` exports a snapshot to a directory or store, in files of
    40 images."""
    monkeypatch.setattr(export, "FILE_IMAGES", FILE_IMAGES)

    def export_to(out: Path | Store, form: export.Format, manifest: Manifest, release: str | None = None) -> None:
        out = open_store(out.as_uri()) if isinstance(out, Path) else out
        export_snapshot(open_store(manifest.store_uri), manifest, out, form, release)

    return export_to
