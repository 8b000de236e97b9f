"""The memory of activations is bounded in bytes, in training and without gradients."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from evernear.data.shards import Dataset
from evernear.embedding import network as network_module
from evernear.embedding.network import Architecture, EmbeddingNetwork, build_network
from evernear.embedding.train import train_network
from evernear.settings import TrainSettings


def architecture(side: int) -> Architecture:
    return Architecture(shape=(side, side, 3), mean=(0.5,) * 3, std=(0.2,) * 3, patch_px=1, width=4, embedding_dim=16)


def test_a_larger_batch_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "INFERENCE_BYTES", 2**20)
    network = build_network(architecture(32)).eval()
    assert 1 < network.max_batch_size < 50
    images = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8)
    sizes: list[int] = []
    network.members[0].register_forward_hook(lambda _m, inputs, _o: sizes.append(len(inputs[0])))
    embeddings = network(images)
    assert sum(sizes) == 50
    assert max(sizes) == network.max_batch_size
    torch.testing.assert_close(embeddings, torch.cat([network(image[None]) for image in images]), atol=1e-6, rtol=0)


def test_larger_images_are_processed_in_smaller_batches() -> None:
    cpu = torch.device("cpu")
    small, large = build_network(architecture(16)), build_network(architecture(32))
    examples = [torch.zeros((1, 3, side, side), dtype=torch.uint8) for side in (16, 32)]
    assert 3.5 < small.max_batch_size / large.max_batch_size < 4.5
    training = [network_module.training_batch_size(*case, cpu) for case in zip((small, large), examples, strict=True)]
    assert 3.5 < training[0] / training[1] < 4.5


def test_a_batch_beyond_the_limit_is_one_step_of_several_micro_batches(
    digits: Dataset, tiny: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "TRAINING_BYTES", 2**17)
    sizes: list[int] = []
    forward = EmbeddingNetwork.forward

    def recording_forward(self: EmbeddingNetwork, images: Tensor) -> Tensor:
        if self.training:
            sizes.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(EmbeddingNetwork, "forward", recording_forward)
    result = train_network(digits, tiny.model_copy(update={"epochs": 2}), tmp_path)
    assert max(sizes) <= 64
    assert sum(sizes) % tiny.batch_size == 0
    assert result.epochs[-1].train_loss < result.epochs[0].train_loss


@pytest.mark.slow
def test_training_on_photographs_stays_below_three_gigabytes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for number in range(200):
        folder = tmp_path / "images" / f"class-{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (224, 224, 3), np.uint8)).save(folder / f"{number}.png")
    script = f"""
import tempfile
from pathlib import Path
from evernear.data.ingest import ingest_source
from evernear.data.shards import Dataset
from evernear.embedding.export import export_network
from evernear.embedding.recipe import with_defaults
from evernear.embedding.train import train_network
from evernear.settings import DataSettings, TrainSettings
from evernear.common.store import open_store
manifest = ingest_source(DataSettings(source="folder:{tmp_path}/images", size_px=224), "file://{tmp_path}/store")
dataset = Dataset(manifest, open_store(manifest.store_uri))
recipe = with_defaults(TrainSettings(epochs=1, min_steps=2), dataset, precision="float32")
train_network(dataset, recipe, Path("{tmp_path}/trained"))
# Two steps leave the statistics of batch normalization so far off that rounding is magnified.
export_network(Path("{tmp_path}/trained"), dataset, Path("{tmp_path}/network"), tolerance=2.0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 3e9
