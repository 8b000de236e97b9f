"""Features of a dataset's images from a frozen backbone, computed once and cached in the store.

Training, export, embedding, the probe and the evaluation share them, so the backbone processes each
image once, whether in this run or an earlier one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.common.processes import chosen_threads
from evernear.common.store import Store
from evernear.data.manifest import Split
from evernear.data.shards import Block, Dataset
from evernear.embedding.data_loader import ImageVectors, OnImages, ShardBlocks, TrainingImages
from evernear.embedding.embeddings import EmbeddingCache, Vectors
from evernear.embedding.engine import cache_key, compile_network
from evernear.embedding.network import Architecture, EmbeddingNetwork, Network, network_identity
from evernear.embedding.timm_member import TimmMember, feature_dim, whitening_of


class FrozenBackbone(nn.Module):
    """Maps images (N, C, H, W), uint8 or float in 0..255, to features (N, F)."""

    def __init__(self, network: EmbeddingNetwork) -> None:
        super().__init__()
        member = cast(TimmMember, network.members[0])
        self.register_buffer("mean", network.mean)
        self.register_buffer("std", network.std)
        self.mean: Tensor
        self.std: Tensor
        self.resize = member.resize
        self.backbone = member.backbone
        self.max_batch_size = network.max_batch_size

    def forward(self, images: Tensor) -> Tensor:
        """Features (N, F). A large batch is split to limit memory use."""
        return torch.cat([self.features(part) for part in images.split(self.max_batch_size)])

    def features(self, images: Tensor) -> Tensor:
        """`forward` without splitting the batch."""
        pixels = (images.to(torch.float32) / 255 - self.mean) / self.std
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return self.backbone(self.resize(pixels)).to(torch.float32)


class FrozenHead(nn.Module):
    """Maps features (N, F) to unit vectors (N, D)."""

    def __init__(self, network: EmbeddingNetwork) -> None:
        super().__init__()
        self.standardize = whitening_of(network)

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(self.standardize(features))


class FrozenNetwork(nn.Module):
    """The exported form of both, read by `evernear.embedding.export.load_parts`."""

    def __init__(self, backbone: FrozenBackbone, head: FrozenHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Embed ``images`` (N, C, H, W), uint8 or float in 0..255, as unit vectors (N, D)."""
        return self.head(self.backbone(images))


class WithFeatures(nn.Module):
    """Also returns the features, the input of the head."""

    def __init__(self, network: FrozenNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.network.backbone(images)
        return self.network.head(features), features


def backbone_identity(network: EmbeddingNetwork, architecture: Architecture) -> str:
    """Key of the features, which depend on weights, input size, normalization and code."""
    described = architecture.model_dump_json(include={"shape", "backbone", "input"})
    return network_identity(FrozenBackbone(network), described)


BATCH_SIZE = 32
"""The backbone splits a batch further to limit memory use."""


class View(NamedTuple):
    """A variant of each image, such as an augmentation, whose features are cached separately."""

    name: str
    """The folder in the cache: letters, digits and hyphens. Each augmentation needs its own."""
    images: Callable[[Block], NDArray[np.uint8]]
    """Maps a block to images of the same shape (N, H, W, C). The result must depend on each image
    alone, not on its block, so seed random augmentation with its digest."""


class FrozenFeatures:
    """Without a store, each call computes the features."""

    def __init__(
        self,
        network: EmbeddingNetwork,
        architecture: Architecture,
        store: Store | None = None,
        on_images: OnImages | None = None,
    ) -> None:
        self.dim = feature_dim(cast(TimmMember, network.members[0]).backbone)
        self.identity = backbone_identity(network, architecture)
        self._store, self._on_images = store, on_images
        self._network, self._shape = network, architecture.shape
        self._counted: set[tuple[Split, str]] = set()

    def blocks(self, dataset: Dataset, split: Split, view: View | None = None) -> Iterator[tuple[Block, Vectors]]:
        """Yield the blocks of ``split`` in the dataset's order, with features (N, F). ``on_images``
        is called only the first time that a view of ``split`` is read."""
        read = split, view.name if view else ""
        on_images = None if read in self._counted else self._on_images
        self._counted.add(read)
        shards = ((dataset.shard_blocks(shard, BATCH_SIZE), shard.count) for shard in dataset.shards(split))
        return self._vectors(view, on_images).of(shards)

    def of(self, shards: Iterable[ShardBlocks]) -> Iterator[tuple[Block, Vectors]]:
        """Yield each block with its features (N, F)."""
        return self._vectors(None, self._on_images).of(shards)

    def _vectors(self, view: View | None, on_images: OnImages | None) -> ImageVectors:
        key = cache_key(self.identity)
        cache = EmbeddingCache(self._store, f"{key}/{view.name}" if view else key, self.dim)
        return ImageVectors(cache, lambda: self._backbone, on_images, view.images if view else None)

    def array(self, dataset: Dataset, split: Split, view: View | None = None) -> Vectors:
        """The features (N, F) of ``split`` in the dataset's order, in memory."""
        vectors = np.empty((dataset.count(split), self.dim), np.float32)
        row = 0
        for _, features in self.blocks(dataset, split, view):
            vectors[row : row + len(features)] = features
            row += len(features)
        return vectors

    @torch.inference_mode()
    def batches(
        self, dataset: Dataset, split: Split, images: TrainingImages, view: View | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the features (N, F) and classes (N,) of ``split``, without excluded labels."""
        for block, features in self.blocks(dataset, split, view):
            classes = images.classes_of(block)
            if (included := classes >= 0).any():
                yield torch.from_numpy(features[included]), torch.from_numpy(classes[included])

    @cached_property
    def _backbone(self) -> Network:
        return compile_network(FrozenBackbone(self._network).eval(), self._shape, chosen_threads())

    def compute(self, dataset: Dataset, splits: Sequence[Split]) -> None:
        """Compute the features, so that later steps only read them. Without a store, do nothing."""
        for split in splits if self._store else ():
            for _ in self.blocks(dataset, split):
                pass


class HeadEmbedder(NamedTuple):
    """Embeds images with a head on their features, as the exported network does."""

    features: FrozenFeatures
    head: nn.Module

    @torch.inference_mode()
    def embed(self, shards: Iterable[ShardBlocks]) -> Iterator[tuple[Block, Vectors]]:
        """Yield each block with its embeddings (N, D), unit vectors of float32."""
        for block, features in self.features.of(shards):
            yield block, self.head(torch.from_numpy(features)).numpy()
