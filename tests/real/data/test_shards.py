import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.frozen import FORMAT
from evernear.common.store import open_store
from evernear.data import shards
from evernear.data.manifest import Manifest, save_manifest
from evernear.data.shards import Block, Dataset
from evernear.errors import DataError, IntegrityError
from tests.dataset_images import write_files
from tests.small_ingest import ingest_with, opened


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory, make_image) -> Manifest:
    """600 images in several shards per split, in a store that nobody changes."""
    directory = tmp_path_factory.mktemp("ingested")
    images = {f"{number % 3}/{number}.png": make_image(number, (30, 30)) for number in range(600)}
    root = write_files(directory / "set", images)
    manifest = ingest_with(f"folder:{root}", (directory / "store").as_uri(), test_fraction=0.2)
    assert sum(shard.split == "train" for shard in manifest.shards) > 3
    return manifest


@pytest.fixture
def dataset(tmp_path: Path, ingested: Manifest) -> Dataset:
    """A copy of the ingested dataset, in the store of the test."""
    original = open_store(ingested.store_uri)
    shutil.copytree(original.root, tmp_path / "store")
    copied = ingested.model_copy(update={"store_uri": (tmp_path / "store").as_uri()})
    save_manifest(copied, tmp_path / "artifact")
    return Dataset.open(tmp_path / "artifact")


def keys(blocks: list[Block]) -> list[bytes]:
    return [digest.tobytes() for block in blocks for digest in block.digests]


def test_blocks_are_ordered_for_every_block_size(dataset: Dataset) -> None:
    whole = list(dataset.blocks("train"))
    for size in (1, 7, 10_000):
        blocks = list(dataset.blocks("train", size))
        assert keys(blocks) == keys(whole)
        assert max(len(block) for block in blocks) <= size
        for field in ("images", "labels"):
            parts = [np.concatenate([getattr(b, field) for b in some]) for some in (blocks, whole)]
            assert (parts[0] == parts[1]).all()
    assert len(keys(whole)) == dataset.count("train")
    assert whole[0].images.shape[1:] == dataset.shape == (30, 30, 1)
    assert (whole[0].images.dtype, whole[0].labels.dtype) == (np.uint8, np.int64)


def test_epoch_contains_each_image_once(dataset: Dataset) -> None:
    total = dataset.count("train")
    batches = list(dataset.shuffled_batches("train", 32, seed=0, epoch=0))
    assert [len(batch) for batch in batches] == [32] * (total // 32)
    assert len(set(keys(batches))) == len(keys(batches)) == total // 32 * 32
    by_key = {k: (i, n) for b in dataset.blocks("train") for k, i, n in zip(keys([b]), b.images, b.labels, strict=True)}
    for batch in batches:
        for key, image, label in zip(keys([batch]), batch.images, batch.labels, strict=True):
            assert (by_key[key][0] == image).all()
            assert by_key[key][1] == label


def test_order_depends_only_on_seed_and_epoch(dataset: Dataset) -> None:
    def order(seed: int, epoch: int) -> list[bytes]:
        return keys(list(dataset.shuffled_batches("train", 32, seed, epoch)))

    assert order(3, 4) == order(3, 4)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # All images are used over several epochs, although each epoch omits some.
    assert len({key for epoch in range(9) for key in order(0, epoch)}) == dataset.count("train")


def test_shuffle_mixes_shards_with_a_small_buffer(dataset: Dataset, monkeypatch) -> None:
    place = {key: i for i, key in enumerate(keys(list(dataset.blocks("train"))))}
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 4000)
    monkeypatch.setattr(shards, "_BUFFER_BYTES", 64 * 936)
    batches = list(dataset.shuffled_batches("train", 8, seed=0, epoch=0))
    spans = [max(place[k] for k in keys([b])) - min(place[k] for k in keys([b])) for b in batches]
    assert np.mean(spans) > 0.5 * dataset.count("train")


@pytest.mark.parametrize("page_bytes", [1, 4096])
def test_batches_of_all_ranks_are_the_batches_of_one(dataset: Dataset, monkeypatch, page_bytes: int) -> None:
    monkeypatch.setattr(shards, "_PAGE_BYTES", page_bytes)
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 4000)
    monkeypatch.setattr(shards, "_BUFFER_BYTES", 64 * 936)
    ranks = [list(dataset.shuffled_batches("train", 4, 0, 0, rank, 3)) for rank in range(3)]
    alone = list(dataset.shuffled_batches("train", 12, 0, 0))
    assert len(alone) == dataset.count("train") // 12
    for batch, *parts in zip(alone, *ranks, strict=True):
        assert keys(parts) == keys([batch])
        assert (np.concatenate([part.images for part in parts]) == batch.images).all()
        assert np.concatenate([part.labels for part in parts]).tolist() == batch.labels.tolist()


@pytest.mark.parametrize("block_size", [7, 10_000])
def test_ranks_share_the_blocks(dataset: Dataset, block_size: int) -> None:
    ranks = [list(dataset.blocks("train", block_size, rank, 3)) for rank in range(3)]
    assert sorted(key for blocks in ranks for key in keys(blocks)) == sorted(keys(list(dataset.blocks("train"))))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


def test_split_smaller_than_a_batch_is_one_batch(dataset: Dataset) -> None:
    (batch,) = dataset.shuffled_batches("query", 10_000, 0, 0)
    assert len(batch) == dataset.count("query")


def test_too_few_images_for_the_processes_are_reported(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="too few for 1000 processes"):
        next(dataset.shuffled_batches("query", 4, 0, 0, 0, 1000))


def test_mean_and_deviation_are_per_channel(tmp_path: Path, run_ingest, make_image) -> None:
    images = {f"{number % 2}/{number}.png": make_image(number, mode="RGB") for number in range(40)}
    dataset = opened(run_ingest(write_files(tmp_path / "set", images)))
    pixels = np.concatenate([block.images for block in dataset.blocks("train")]) / 255
    mean, std = dataset.mean_std()
    assert mean == pytest.approx(tuple(pixels.mean(axis=(0, 1, 2))))
    assert std == pytest.approx(tuple(pixels.std(axis=(0, 1, 2))))


def test_constant_channel_has_zero_deviation(tmp_path: Path, run_ingest) -> None:
    for number in range(40):
        path = tmp_path / "set" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (11, 7), (number, 251, 252)).save(path)
    mean, std = opened(run_ingest(tmp_path / "set")).mean_std()
    assert mean[1:] == pytest.approx((251 / 255, 252 / 255))
    assert std[1:] == pytest.approx((0, 0), abs=1e-6)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_shard_is_named(dataset: Dataset, tmp_path: Path, damage: str) -> None:
    shard = next(shard for shard in dataset.manifest.shards if shard.split == "test")
    path = tmp_path / "store" / "datasets" / "set" / "shards" / f"{shard.sha256}.npy"
    data = bytearray(path.read_bytes())
    match damage:
        case "flipped":
            data[-1] ^= 1
            path.write_bytes(data)
        case "cut":
            path.write_bytes(data[:-1])
        case _:
            path.unlink()
    with pytest.raises(IntegrityError, match=shard.sha256):
        list(dataset.blocks("test"))


def test_manifest_of_other_shards_is_rejected(dataset: Dataset) -> None:
    manifest = dataset.manifest
    altered = tuple(shard.model_copy(update={"count": shard.count + 1}) for shard in manifest.shards)
    lying = opened(manifest.model_copy(update={"shards": altered}))
    with pytest.raises(IntegrityError, match="does not contain"):
        list(lying.blocks("train"))


@pytest.mark.parametrize("content", [None, "", "{}", f'{{"format": {FORMAT}}}'])
def test_directory_without_a_manifest_is_rejected(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(IntegrityError, match="manifest"):
        Dataset.open(tmp_path)


def in_s3(dataset: Dataset, bucket: str) -> Manifest:
    """Copy the snapshot to a bucket."""
    store = open_store(f"s3://{bucket}/store")
    local = open_store(dataset.manifest.store_uri)
    for shard in dataset.manifest.shards:
        key = f"datasets/set/shards/{shard.sha256}.npy"
        store.put(key, local.get(key))
    return dataset.manifest.model_copy(update={"store_uri": store.uri})


def test_remote_shards_are_cached(dataset: Dataset, tmp_path: Path, bucket: str, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_manifest(in_s3(dataset, bucket), tmp_path / "remote")
    remote = Dataset.open(tmp_path / "remote")
    assert remote.digest == dataset.digest
    assert keys(list(remote.blocks("test"))) == keys(list(dataset.blocks("test")))
    cached = {path.stem for path in (tmp_path / "cache" / "evernear" / "shards").iterdir()}
    assert cached == {shard.sha256 for shard in remote.manifest.shards if shard.split == "test"}
    damaged = tmp_path / "cache" / "evernear" / "shards" / f"{cached.pop()}.npy"
    damaged.write_bytes(b"damaged")
    assert keys(list(Dataset.open(tmp_path / "remote").blocks("test"))) == keys(list(dataset.blocks("test")))
    damaged.write_bytes(b"damaged")
    open_store(f"s3://{bucket}/store").put(f"datasets/set/shards/{damaged.name}", b"damaged, too")
    with pytest.raises(IntegrityError, match=f"{damaged.name} is damaged"):
        list(Dataset.open(tmp_path / "remote").blocks("test"))


@pytest.mark.parametrize("cached_shards", [0.5, 2, 5])
def test_no_shard_is_fetched_twice_in_an_epoch(dataset, tmp_path, bucket, monkeypatch, cached_shards) -> None:
    monkeypatch.setattr(shards, "_CACHE_BYTES", int(cached_shards * 2**16))
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 4000)
    manifest = in_s3(dataset, bucket)
    store = open_store(manifest.store_uri)
    remote = Dataset(manifest, store, tmp_path / "cache")
    fetched: Counter[str] = Counter()

    def fetch(key: str, path: Path, sha256: str | None = None) -> Path:
        fetched[key] += 1
        return type(store).fetch(store, key, path, sha256)

    monkeypatch.setattr(store, "fetch", fetch)
    train = [shard for shard in manifest.shards if shard.split == "train"]
    assert len(train) > 5
    groups: set[frozenset[bytes]] = set()
    for epoch in range(3):
        fetched.clear()
        batches = list(remote.shuffled_batches("train", 32, 0, epoch))
        assert keys(batches) == keys(list(dataset.shuffled_batches("train", 32, 0, epoch)))
        assert max(fetched.values()) == 1
        groups.add(frozenset(keys(batches[:2])))
    assert len(groups) == 3


def test_cache_is_bounded_and_evicts_the_least_recently_used(dataset, tmp_path, bucket, monkeypatch) -> None:
    manifest = in_s3(dataset, bucket)
    train = [shard for shard in manifest.shards if shard.split == "train"]
    monkeypatch.setattr(shards, "_CACHE_BYTES", 2 * 2**16)
    cache = tmp_path / "cache"
    remote = Dataset(manifest, open_store(manifest.store_uri), cache)
    expected = keys(list(dataset.blocks("train")))
    for _ in range(2):
        keys_read: list[bytes] = []
        for block in remote.blocks("train", 10):
            keys_read += keys([block])
            assert sum(path.stat().st_size for path in cache.iterdir()) <= 2 * 2**16
        assert keys_read == expected
    assert {path.stem for path in cache.glob("*.npy")} <= {shard.sha256 for shard in train[-2:]}
    batches = list(remote.shuffled_batches("train", 32, 0, 0))
    assert keys(batches) == keys(list(dataset.shuffled_batches("train", 32, 0, 0)))
