"""The embedding network: a small convolutional network for images of any size, grey or colour."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.frozen import Frozen

LAST_GRID = 3
"""Stages follow until the grid is at most so many cells a side: enough to keep where a feature was."""
LARGEST_FIRST_GRID = 96
"""Larger images are cut into patches until less than this is left, so that cost does not follow the
camera."""
WIDEST = 8
"""Channels double from stage to stage, up to so many times the first stage's."""


class Architecture(Frozen):
    """All that is needed to build a network again, without its weights."""

    shape: tuple[int, int, int]
    """Height, width and channels of an image."""
    mean: tuple[float, ...]
    """Mean of each channel over the training images, whose values are taken as 0..1."""
    std: tuple[float, ...]
    patch_px: int
    """Side of the squares of pixels that become channels before the first convolution."""
    width: int
    """Channels of the first convolution."""
    embedding_dim: int
    """Of the whole embedding; each member of an ensemble gives an equal part of it."""
    members: int = 1


class EmbeddingNetwork(nn.Module):
    """Images to unit vectors: ``(N, C, H, W)`` of uint8 in, ``(N, embedding_dim)`` of float32 out.

    Normalising by mean and standard deviation is the network's first layer, so it is fed pixels 0..255 and no
    caller can forget it. (Floats in 0..255, which augmentation makes, are taken too.)

    With several members it is a deep ensemble (Lakshminarayanan et al. 2017, arXiv:1612.01474): networks that
    differ in their first weights only, whose embeddings are laid end to end. Two images are then as similar as
    the members find them on average.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.register_buffer("mean", _per_channel(architecture.mean))
        self.register_buffer("std", _per_channel(architecture.std))
        self.mean: Tensor
        self.std: Tensor
        self.members = nn.ModuleList(_Member(architecture) for _ in range(architecture.members))
        self.length = math.sqrt(architecture.members)

    def forward(self, images: Tensor) -> Tensor:
        """Embed ``images`` (N, C, H, W), uint8 or float in 0..255, as unit vectors (N, embedding_dim)."""
        pixels = (images.to(torch.float32) / 255 - self.mean) / self.std
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return torch.cat([member(pixels) for member in self.members], dim=1) / self.length


class _Member(nn.Module):
    """One convolutional network: normalised pixels to unit vectors.

    A stage is two 3x3 convolutions and a 2x2 max-pooling, as in VGG (Simonyan and Zisserman 2014,
    arXiv:1409.1556), with batch normalisation; the first stage, which sees the most pixels, has one
    convolution. There are at least two stages, and as many as it takes to come down to `LAST_GRID`. Pooling
    comes before normalisation and ReLU, which then touch a quarter of the numbers.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        height, width, channels = architecture.shape
        patch = architecture.patch_px
        layers: list[nn.Module] = [_PadTo(patch), nn.PixelUnshuffle(patch)] if patch > 1 else []
        features, grid = channels * patch**2, (math.ceil(height / patch), math.ceil(width / patch))
        stage = 0
        while stage < 2 or max(grid) > LAST_GRID:
            wider = architecture.width * min(2**stage, WIDEST)
            halving = (2 if grid[0] > LAST_GRID else 1, 2 if grid[1] > LAST_GRID else 1)
            if stage > 0:
                layers.append(_convolution(features, wider))
                features = wider
            layers.append(_convolution(features, wider, halving))
            features, grid = wider, (grid[0] // halving[0], grid[1] // halving[1])
            stage += 1
        dim = architecture.embedding_dim // architecture.members
        self.features = nn.Sequential(*layers)
        self.project = nn.Linear(features * grid[0] * grid[1], dim, bias=False)
        self.standardise = nn.BatchNorm1d(dim)

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.features(pixels).flatten(1)
        return F.normalize(self.standardise(self.project(features).to(torch.float32)))


def build(architecture: Architecture) -> EmbeddingNetwork:
    """A network with fresh weights, laid out for convolutions in the channels-last order."""
    return EmbeddingNetwork(architecture).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)


def choose_patch(height: int, width: int) -> int:
    """Side of the patches for images of ``height`` x ``width`` pixels."""
    patch = 1
    while min(height, width) / patch >= LARGEST_FIRST_GRID:
        patch *= 2
    return patch


def _convolution(inputs: int, outputs: int, halving: tuple[int, int] = (1, 1)) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)]
    if halving != (1, 1):
        layers.append(nn.MaxPool2d(halving))
    return nn.Sequential(*layers, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class _PadTo(nn.Module):
    """Pad right and below with zeros, which is the mean colour, to a multiple of ``multiple`` pixels."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple = multiple

    def forward(self, pixels: Tensor) -> Tensor:
        right, below = -pixels.shape[3] % self.multiple, -pixels.shape[2] % self.multiple
        return F.pad(pixels, (0, right, 0, below))
