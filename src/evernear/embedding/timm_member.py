"""A timm model as a member of the embedding network."""

import math
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.data.preprocess import NetworkInput
from evernear.embedding.network import Architecture
from evernear.embedding.whitening import Whitening
from evernear.errors import TrainingError

if TYPE_CHECKING:
    from timm.models import PretrainedCfg  # functions import timm, which takes seconds


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
        self.is_crop = [self.height, self.width] == self.size
        self.mode = str(size.interpolation)
        # Antialiased interpolation takes as long as EfficientNet-Lite0, these products a tenth.
        self.register_buffer("rows", self._matrix(self.height, size.height_px), persistent=False)
        self.register_buffer("columns", self._matrix(self.width, size.width_px).T.contiguous(), persistent=False)
        self.rows: Tensor
        self.columns: Tensor

    def set_training_size(self, factor: float) -> None:
        """``factor`` is relative to the input size. A fixed input size ignores it."""
        if not self.fixed:
            self.training_size = [min(side, max(32, round(side * factor))) for side in self.size]

    def forward(self, pixels: Tensor) -> Tensor:
        if self.training:
            return F.interpolate(pixels, self.training_size, mode=self.mode, align_corners=False, antialias=True)
        center = pixels[:, :, self.top : self.top + self.height, self.left : self.left + self.width]
        return center if self.is_crop else self.rows @ center @ self.columns

    def _matrix(self, length: int, resized_length: int) -> Tensor:
        """The matrix (resized length, length) that resizes a column of pixels."""
        columns = torch.eye(length)[None, None]
        resized = F.interpolate(columns, [resized_length, length], mode=self.mode, align_corners=False, antialias=True)
        return resized[0, 0]


def whitening_of(network: nn.Module) -> Whitening:
    """The affine map of a frozen network."""
    return cast(Whitening, cast(Any, network).members[0].standardize)


def feature_dim(backbone: nn.Module) -> int:
    """Number of pooled features."""
    return cast(Backbone, backbone).head_hidden_size


def config_of(name: str) -> "PretrainedCfg":
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(name)
    if config is None:
        raise TrainingError(f"timm defines no input size for {name} (train.backbone); choose another backbone.")
    return config


def create_backbone(architecture: Architecture, **options: Any) -> nn.Module:
    """The timm model, without a classifier."""
    import timm

    height, width, channels = architecture.shape
    if architecture.input is not None:
        height, width = architecture.input.height_px, architecture.input.width_px
    if config_of(architecture.backbone).fixed_input_size:
        options["img_size"] = (height, width)
    return timm.create_model(architecture.backbone, num_classes=0, in_chans=channels, scriptable=True, **options)


RATE_DECAY = 0.8
"""Learning rate of a stage relative to the next one's. Early stages change the least (Howard and
Ruder 2018, "Universal Language Model Fine-tuning for Text Classification", section 3.2,
arXiv:1801.06146)."""
FROZEN_SHARE = 1 / 3
"""Share of the stages that ``train.layers = last`` freezes, counted from the first. These take most
of the training time, because they process the most pixels, and differ least between data sets."""


def prepare_epoch(module: nn.Module, size_factor: float, fixed_statistics: bool) -> None:
    """Prepare ``module``, in train mode, for images of ``size_factor`` times the input's side.

    With ``fixed_statistics``, batch normalization uses the pretraining statistics, to which the
    head was fitted. Those of small batches at other image sizes differ so much that most images
    would be misclassified before the first step (docs/decisions/0030-pretrained-weights.md). Frozen
    stages always use the pretraining statistics.
    """
    for part in module.modules():
        if isinstance(part, Resize):
            part.set_training_size(size_factor)
        elif fixed_statistics and isinstance(part, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
            part.eval()
    fix_frozen_statistics(module)


def rate_factors(backbone: nn.Module) -> dict[str, float]:
    """Learning rate of each parameter of a timm model, relative to the last stage's."""
    stages = _stages(backbone)
    last = max(stages.values(), default=0)
    return {name: RATE_DECAY ** (last - stage) for name, stage in stages.items()}


def freeze_first_stages(module: nn.Module) -> None:
    for member in module.modules():
        if isinstance(member, TimmMember):
            _freeze(member.backbone)


def _freeze(backbone: nn.Module) -> None:
    stages = _stages(backbone)
    frozen = math.ceil((max(stages.values(), default=0) + 1) * FROZEN_SHARE)
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_(stages[name] >= frozen)


def fix_frozen_statistics(network: nn.Module) -> None:
    """Keep the batch statistics of layers whose parameters are all frozen, by eval mode."""
    for module in network.modules():
        parameters = list(module.parameters(recurse=False))
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def _stages(backbone: nn.Module) -> dict[str, int]:
    """The stage number of each parameter. The stem is stage 0."""
    from timm.models import group_parameters

    matcher = cast(Any, backbone).group_matcher(coarse=True)
    return cast(dict[str, int], group_parameters(backbone, matcher, reverse=True))
