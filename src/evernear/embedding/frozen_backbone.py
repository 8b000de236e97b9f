"""A frozen backbone and a head on its features.

They are separate modules of the exported TorchScript file. The features do not depend on the head,
so every head on the same backbone can reuse those of earlier runs.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.embedding.architecture import Architecture
from evernear.embedding.identity import network_identity
from evernear.embedding.network import EmbeddingNetwork
from evernear.embedding.timm_member import TimmMember, whitening_of


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
    """Maps features (N, F) to unit vectors (N, D), centered like
    `evernear.embedding.export.CenteredNetwork`."""

    def __init__(self, network: EmbeddingNetwork) -> None:
        super().__init__()
        self.standardize = whitening_of(network)
        self.register_buffer("center", torch.zeros(()))
        self.center: Tensor

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(F.normalize(self.standardize(features)) - self.center)


class FrozenNetwork(nn.Module):
    """The exported form of both, read by `evernear.embedding.export.load_parts`."""

    def __init__(self, backbone: FrozenBackbone, head: FrozenHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Embed ``images`` (N, C, H, W), uint8 or float in 0..255, as unit vectors (N, D)."""
        return self.head(self.backbone(images))


def backbone_identity(network: EmbeddingNetwork, architecture: Architecture) -> str:
    """Key of the features, which depend on weights, input size, normalization and code."""
    described = architecture.model_dump_json(include={"shape", "backbone", "input"})
    return network_identity(FrozenBackbone(network), described)
