"""Snapshots of small folders of noise, and exports of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.parts import Parts
from evernear.common.run_parts import Processes, run_parts
from evernear.common.store import Store, open_store
from evernear.data.export.plan import plan_export
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest
from evernear.release.export_dataset import open_worker
from evernear.settings import DataSettings
from tests.dataset_images import described, write_images

SHARD_BYTES = 2**16
Ingest = Callable[..., Manifest]
ExportTo = Callable[..., Parts]


@pytest.fixture
def ingest(tmp_path: Path) -> Ingest:
    """``ingest(source, **settings)`` ingests a source into a store of its name in the
    test's directory.
    """

    def ingest(source: str, store: str = "store", **settings: object) -> Manifest:
        values = DataSettings.model_validate({"source": source, "shard_size_bytes": SHARD_BYTES, **settings})
        return ingest_source(values, (tmp_path / store).as_uri())

    return ingest


@pytest.fixture
def snapshot(tmp_path: Path, ingest: Ingest) -> Manifest:
    """A snapshot of 300 images in several shards."""
    write_images(tmp_path / "photos", 300)
    return ingest(f"folder:{tmp_path / 'photos'}")


@pytest.fixture
def export_to() -> ExportTo:
    """``export_to(out, format, snapshot)`` exports a snapshot to a directory or store,
    in parts of one shard.
    """

    def export_to(
        out: Path | Store, form: str, manifest: Manifest, release: str = "", processes: int = 1, part_shards: int = 1
    ) -> Parts:
        out = open_store(out.as_uri()) if isinstance(out, Path) else out
        parts = plan_export(described(form, manifest, release), manifest, out, part_shards * SHARD_BYTES)
        run_parts(parts, Processes(processes, open_worker), lambda done, total: None)
        return parts

    return export_to
