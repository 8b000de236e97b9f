import numpy as np
import pytest

from evernear.common.store import open_store
from evernear.data.shards import Dataset
from evernear.evaluation import evaluate
from evernear.evaluation.evaluate import count_leakage
from tests.releases import System


def with_test_images_in(dataset: Dataset, split: str) -> Dataset:
    """The same dataset with its test shards added to ``split``."""
    manifest = dataset.manifest
    leaked = tuple(shard.model_copy(update={"split": split}) for shard in manifest.shards if shard.split == "test")
    return Dataset(manifest.model_copy(update={"shards": (*manifest.shards, *leaked)}), open_store(manifest.store_uri))


def test_ingested_dataset_has_no_leakage(system: System):
    assert count_leakage(system.dataset, system.dataset) == {"train": 0, "gallery": 0, "query": 0}


@pytest.mark.parametrize("split", ["train", "gallery", "query"])
@pytest.mark.parametrize("block_size", [1_000_000, 50])
def test_injected_test_images_are_detected(system: System, monkeypatch, split, block_size):
    monkeypatch.setattr(evaluate, "BLOCK_SIZE", block_size)
    counts = count_leakage(system.dataset, with_test_images_in(system.dataset, split))
    assert counts == {"train": 0, "gallery": 0, "query": 0} | {split: system.dataset.count("test")}


def test_single_leaked_image_in_a_later_snapshot_is_detected(system: System, monkeypatch):
    """An image that trained an earlier release can become a test image only if the splits
    change."""
    train = next(iter(system.dataset.blocks("train"))).digests
    blocks = Dataset.shard_blocks

    def moved(self: Dataset, shard, block_size=4096):
        for block in blocks(self, shard, block_size):
            if shard.split == "test" and self is later:
                block.digests[-1] = train[17]
            yield block

    later = Dataset(system.dataset.manifest, open_store(system.dataset.manifest.store_uri))
    monkeypatch.setattr(Dataset, "shard_blocks", moved)
    assert count_leakage(later, system.dataset) == {"train": 1, "gallery": 0, "query": 0}
    assert np.any(train[17])
