"""A timm model as a member of the embedding network."""

from typing import Any, Protocol, cast

import timm
import torch
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.data.preprocess import NetworkInput
from evernear.embedding.architecture import Architecture
from evernear.errors import TrainingError


class Backbone(Protocol):
    """The part of a timm model that evernear uses."""

    head_hidden_size: int


class TimmMember(nn.Module):
    """Maps normalized pixels to unit vectors with a timm backbone.

    Pooled features are projected to the embedding, as in the compact network. The projection is an
    affine map if the backbone is frozen, or if the training of a pretrained one starts from a head.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        dim = architecture.embedding_dim // architecture.members
        fixed = config_of(architecture.backbone).fixed_input_size
        self.resize = Resize(architecture.shape, architecture.input, fixed) if architecture.input else nn.Identity()
        self.backbone = create_backbone(architecture)
        features = feature_dim(self.backbone)
        if architecture.frozen:
            self.project, self.standardize = nn.Identity(), Whitening(features, dim)
        elif architecture.pretrained:
            self.project, self.standardize = nn.Linear(features, dim), nn.Identity()
        else:
            self.project, self.standardize = nn.Linear(features, dim, bias=False), nn.BatchNorm1d(dim)

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.backbone(self.resize(pixels))
        return F.normalize(self.standardize(self.project(features).to(torch.float32)))


class Whitening(nn.Module):
    """An affine map of features (N, F), fitted by `evernear.embedding.backbone.whiten`. The map of
    a trained head includes its projection."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("matrix", torch.eye(features, dim))
        self.mean: Tensor
        self.matrix: Tensor

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.mean) @ self.matrix


class Resize(nn.Module):
    """Crops the center of normalized pixels (N, C, H, W), and resizes it to the pretraining size.

    In training, nothing is cropped, because augmentation crops. The training size may be smaller.
    """

    def __init__(self, shape: tuple[int, int, int], size: NetworkInput, fixed: bool) -> None:
        super().__init__()
        self.height, self.width = size.crop_height_px, size.crop_width_px
        self.top, self.left = (shape[0] - self.height) // 2, (shape[1] - self.width) // 2
        self.size = [size.height_px, size.width_px]
        self.fixed, self.training_size = fixed, self.size
        self.mode = str(size.interpolation)

    def set_training_size(self, factor: float) -> None:
        """``factor`` is relative to the input size. A fixed input size ignores it."""
        if not self.fixed:
            self.training_size = [min(side, max(32, round(side * factor))) for side in self.size]

    def forward(self, pixels: Tensor) -> Tensor:
        if self.training:
            return F.interpolate(pixels, self.training_size, mode=self.mode, align_corners=False, antialias=True)
        center = pixels[:, :, self.top : self.top + self.height, self.left : self.left + self.width]
        return F.interpolate(center, self.size, mode=self.mode, align_corners=False, antialias=True)


def whitening_of(network: nn.Module) -> Whitening:
    """The affine map of a frozen network."""
    return cast(Whitening, cast(Any, network).members[0].standardize)


def feature_dim(backbone: nn.Module) -> int:
    """Number of pooled features."""
    return cast(Backbone, backbone).head_hidden_size


def config_of(name: str) -> PretrainedCfg:
    config = get_pretrained_cfg(name)
    if config is None:
        raise TrainingError(f"timm defines no input size for {name} (train.backbone); choose another backbone.")
    return config


def create_backbone(architecture: Architecture, **options: Any) -> nn.Module:
    """The timm model, without a classifier."""
    height, width, channels = architecture.shape
    if architecture.input is not None:
        height, width = architecture.input.height_px, architecture.input.width_px
    if config_of(architecture.backbone).fixed_input_size:
        options["img_size"] = (height, width)
    return timm.create_model(architecture.backbone, num_classes=0, in_chans=channels, scriptable=True, **options)
