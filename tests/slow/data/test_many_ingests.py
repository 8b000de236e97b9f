"""A dataset that grew in many small steps is stored like one that was ingested at once."""

from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.data.manifest import Manifest
from evernear.maintenance.prune import prune_store
from tests.dataset_images import write_files
from tests.fast.data.conftest import contents, make_image
from tests.small_ingest import ingest_with

__all__ = ["contents", "make_image"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def stored(manifest: Manifest) -> tuple[int, int]:
    """The shards of a snapshot, and all files of its dataset once the store is pruned."""
    store = open_store(manifest.store_uri)
    prune_store(store, keep=1)
    return len(manifest.shards), len([*store.list(f"datasets/{manifest.name}/")])


def test_hundred_ingests_leave_the_files_of_one(tmp_path: Path, make_image, contents, monkeypatch) -> None:
    monkeypatch.setattr("evernear.data.tables.PARTITION_ROWS", 200)
    root, source = tmp_path / "tree", f"folder:{tmp_path / 'tree'}"
    store, whole = ((tmp_path / name).as_uri() for name in ("store", "whole"))

    def add(numbers: range) -> None:
        write_files(root, {f"{number % 7}/{number}.png": make_image(number, (20, 20)) for number in numbers})

    add(range(1000))
    ingest_with(source, store)
    for step in range(1000, 2000, 10):
        add(range(step, step + 10))
        last = ingest_with(source, store)
    once = ingest_with(source, whole)
    assert contents(last).label == contents(once).label
    (shards, files), (shards_of_one, files_of_one) = stored(last), stored(once)
    assert shards_of_one > 10
    assert shards <= 1.2 * shards_of_one
    assert files <= 1.2 * files_of_one
