"""The source project's training, reimplemented from its description as the baseline.

Convolution 32, max-pooling, convolution 64, two fully connected layers of 128, batch normalization;
ArcFace with s = 32 and m = 0.5; SGD at 0.01 without momentum or schedule; batches of 64; images
read one by one through a DataLoader with two workers from .npy memory maps.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from evernear.data.shards import Dataset
from evernear.embedding.arcface import ArcFace

MEAN, STD = 0.1307, 0.3081


class Network(nn.Sequential):
    """Maps normalized float images (N, 1, 28, 28) to embeddings (N, 128)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 11 * 11, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.BatchNorm1d(128),
        )


class Images(TorchDataset[tuple[Tensor, int]]):
    """Single images from memory-mapped arrays."""

    def __init__(self, directory: Path) -> None:
        self.images = np.load(directory / "images.npy", mmap_mode="r")
        self.labels = np.load(directory / "labels.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return normalize(np.array(self.images[index])), int(self.labels[index])


def normalize(images: np.ndarray) -> Tensor:
    """uint8 (..., H, W, 1) as float (..., 1, H, W)."""
    return (torch.from_numpy(images).movedim(-1, -3).float() / 255 - MEAN) / STD


def write_arrays(dataset: Dataset, directory: Path) -> None:
    """The train split as the two arrays that the recipe reads."""
    directory.mkdir(parents=True, exist_ok=True)
    blocks = list(dataset.blocks("train"))
    np.save(directory / "images.npy", np.concatenate([block.images for block in blocks]))
    np.save(directory / "labels.npy", np.concatenate([block.labels for block in blocks]))


def epochs(directory: Path, classes: int, seed: int) -> Iterator[Network]:
    """Train indefinitely; yield the network after each epoch."""
    torch.manual_seed(seed)
    network, head = Network(), ArcFace(classes, 128, scale=32.0)
    optimizer = torch.optim.SGD([*network.parameters(), *head.parameters()], lr=0.01)
    loader = DataLoader(Images(directory), batch_size=64, shuffle=True, num_workers=2)
    while True:
        network.train()
        for images, labels in loader:
            loss = F.cross_entropy(head(network(images), labels, margin=0.5), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield network
