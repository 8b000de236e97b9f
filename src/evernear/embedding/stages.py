"""Choose the learning rate of each stage of a pretrained network, and the stages to freeze."""

import math
from typing import Any, cast

from timm.models import group_parameters
from torch import nn

from evernear.embedding.timm_member import Resize, TimmMember

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
    matcher = cast(Any, backbone).group_matcher(coarse=True)
    return cast(dict[str, int], group_parameters(backbone, matcher, reverse=True))
