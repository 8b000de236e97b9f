"""Embedding in parts: the same embeddings in any number of parts' runs, in any order and after any
kill."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from evernear.common.parts import Parts, run_in_processes, run_parts
from evernear.common.store import Store, open_store
from evernear.common.store.base import put_folder
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import combine_embeddings, embed_dataset, network_folder, open_here, plan_embedding
from evernear.embedding.embeddings import Embeddings
from evernear.errors import IntegrityError
from evernear.kubeflow.part import main as run_pod
from evernear.settings import DataSettings
from tests.small_ingest import ingest_small


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Digits whose gallery has several shards."""
    directory = tmp_path_factory.mktemp("sharded")
    settings = DataSettings(source="digits", gallery_fraction=0.4, query_fraction=0.1)
    save_manifest(ingest_small(settings, (directory / "store").as_uri()), directory)
    return Dataset.open(directory)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "results").as_uri())


def plan(network_dir: Path, dataset: Dataset, store: Store) -> Parts:
    return plan_embedding(network_dir, dataset, store, "parts/run")


def rows(directory: Path) -> dict[str, list[bytes]]:
    """All that the index reads, by split."""
    opened = Embeddings.open(directory)
    splits = ("gallery", "query")
    return {
        split: [
            array.tobytes()
            for name in ("embeddings", "labels", "digests")
            for array in [np.concatenate([getattr(block, name) for block in opened.blocks(split)])]
        ]
        for split in splits
    }


def test_parts_are_shards_in_order_and_do_not_depend_on_who_runs_them(
    sharded: Dataset, network_dir: Path, store: Store, tmp_path: Path
) -> None:
    embed_dataset(network_dir, sharded, tmp_path / "whole")
    parts = plan(network_dir, sharded, store)
    assert parts.plan.parts == len(sharded.shards("gallery")) + len(sharded.shards("query")) >= 3
    assert parts.plan.units == sharded.count("gallery") + sharded.count("query")
    worker = open_here(network_dir, sharded, None, None, parts)
    tasks = [*parts.tasks(range(parts.plan.parts))]
    for number, value in [*reversed(tasks), tasks[0]]:  # another order, and one twice
        parts.save_result(number, worker(number, value))
    described = combine_embeddings(parts, network_dir, sharded, tmp_path / "parts", store.uri)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["embeddings.json"]
    assert described.count == parts.plan.units


def test_two_processes_write_what_one_writes(sharded: Dataset, network_dir: Path, store: Store, tmp_path: Path) -> None:
    described = []
    for count in (1, 2):
        results = open_store((tmp_path / str(count)).as_uri())
        parts = plan(network_dir, sharded, results)
        run_in_processes(parts, partial(open_here, network_dir, sharded, None, None), count, lambda *_: None)
        described.append(combine_embeddings(parts, network_dir, sharded, tmp_path / f"out-{count}", ""))
    assert described[0] == described[1]


def test_same_call_continues_and_computes_no_part_twice(
    sharded: Dataset, network_dir: Path, store: Store, tmp_path: Path
) -> None:
    parts, seen = plan(network_dir, sharded, store), list[int]()
    open_worker = partial(open_here, network_dir, sharded, None, seen.append)
    run_parts(parts, open_worker, index=1, workers=parts.plan.parts)
    assert 0 < sum(seen) < parts.plan.units
    again = plan(network_dir, sharded, store)
    assert again.plan == parts.plan
    run_parts(again, open_worker)
    assert sum(seen) == parts.plan.units
    other = plan_embedding(network_dir, sharded, store, "parts/run", frozenset({"3"}))
    assert other.folder != parts.folder  # more images join the gallery


def test_pod_embeds_with_the_network_and_the_dataset_of_the_store(
    sharded: Dataset, network_dir: Path, bucket: str, tmp_path: Path
) -> None:
    store = open_store(f"s3://{bucket}/store")
    manifest = ingest_small(DataSettings(source="digits", gallery_fraction=0.4, query_fraction=0.1), store.uri)
    dataset = Dataset(manifest, store)
    parts = plan(network_dir, dataset, store)
    put_folder(store, network_folder(parts), network_dir)
    for index in range(2):
        assert parts.missing()
        assert run_pod(store.uri, parts.folder, 2, index) == 0
    combine_embeddings(parts, network_dir, dataset, tmp_path / "pods", store.uri)
    embed_dataset(network_dir, sharded, tmp_path / "here")
    assert rows(tmp_path / "pods") == rows(tmp_path / "here")
    first = Embeddings.open(tmp_path / "pods").description.shards[0]
    store.put(first.file, b"damaged")
    with pytest.raises(IntegrityError, match=f"{first.file} is missing or has changed .* run the embed step again"):
        Embeddings.open(tmp_path / "pods")


def test_pod_without_its_snapshot_ends_for_good(sharded: Dataset, network_dir: Path, store: Store) -> None:
    parts = plan(network_dir, sharded, store)  # a store that does not have the dataset
    assert run_pod(store.uri, parts.folder, 1, 0) == 42
    assert "no longer has the snapshot" in parts.failure()
