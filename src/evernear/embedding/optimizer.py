"""Device, precision, optimizer and average of the weights."""

import math
from collections.abc import Iterable
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evernear.embedding.arcface import TrainingModule
from evernear.embedding.network import Architecture, EmbeddingNetwork, training_batch_size
from evernear.embedding.recipe import Precision, Recipe

COEFFICIENTS = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
"""Of the Newton-Schulz iterations, from Cesista et al. 2025,
https://leloykun.github.io/ponder/muon-opt-coeffs/."""
MOMENTUM = 0.9
"""Momentum of Muon."""
ADAMW_RMS = 0.2
"""RMS of AdamW's updates relative to the learning rate (Liu et al. 2025, section 2.2)."""


class AdamW(torch.optim.AdamW):
    """Without the wrappers that exclude an optimizer from compilation, because they import
    torch._dynamo, SymPy and Triton, which takes a second and 140 MB."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)


class Muon(AdamW):
    """Updates weights by orthogonalized momentum (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/).

    The updates have the root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
    Training", arXiv:2502.16982), so both use the same learning rate and weight decay. AdamW updates
    groups whose ``orthogonal`` is false. It must be false unless weights have the shape (outputs,
    inputs, ...). A group's own learning rate overrides ``learning_rate``.

    Updates are computed in bfloat16 if training's ``precision`` is, otherwise in float32. timm's
    Muon always uses bfloat16, which takes 125 times as long on processors without bfloat16
    instructions.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], learning_rate: float, momentum: float, precision: torch.dtype
    ) -> None:
        super().__init__(groups, lr=learning_rate, fused=False)  # fused, it would unscale float16's gradients itself
        self._momentum = momentum
        self._dtype = torch.bfloat16 if precision == torch.bfloat16 else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            if group["orthogonal"]:
                for weight in group["params"]:
                    self._update(weight, group["lr"], group["weight_decay"])
                    weight.grad = None  # AdamW skips weights without a gradient
        super().step()

    def _update(self, weight: Tensor, learning_rate: float, weight_decay: float) -> None:
        if weight.grad is None:
            return
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)  # AdamW expects the step in every state
            state["exp_avg"] = torch.zeros_like(weight)
        average = state["exp_avg"].lerp_(weight.grad, 1 - self._momentum)
        nesterov = weight.grad.lerp(average, self._momentum)
        update = _orthogonalize(nesterov.flatten(1), self._dtype)
        scale = ADAMW_RMS * math.sqrt(max(update.shape))
        weight.mul_(1 - learning_rate * weight_decay)
        weight.add_(update.view_as(weight), alpha=-learning_rate * scale)


def _orthogonalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    from timm.optim.muon import zeropower_via_newtonschulz  # importing timm takes seconds

    return zeropower_via_newtonschulz(matrix, len(COEFFICIENTS), COEFFICIENTS, dtype=dtype).to(matrix.dtype)


def choose_device(rank: int) -> torch.device:
    """The GPU of the node's process ``rank``, or the CPU if it has none."""
    return torch.device("cuda", rank) if rank < torch.cuda.device_count() else torch.device("cpu")


def choose_precision(device: torch.device, network: nn.Module, chosen: Precision | None = None) -> torch.dtype:
    """By default, half precision if the device computes in it.

    On a CPU, networks with depthwise convolutions use float32, because the gradients of these take
    twice as long in bfloat16.
    """
    if chosen:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[chosen]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    cpu = torch.cpu.get_capabilities()
    depthwise = any(isinstance(part, nn.Conv2d) and 1 < part.groups == part.in_channels for part in network.modules())
    return torch.bfloat16 if (cpu.get("avx512_bf16") or cpu.get("amx_bf16")) and not depthwise else torch.float32


def choose_micro_batches(
    module: TrainingModule, architecture: Architecture, batch_size: int, device: torch.device
) -> int:
    """Micro-batches in a batch, whose gradients are accumulated to bound the memory. Each has at
    least two images, because batch normalization needs a variance."""
    height, width, channels = architecture.shape
    image = torch.zeros((1, channels, height, width), dtype=torch.uint8, device=device)
    count = math.ceil(batch_size / training_batch_size(module.network, image, device))
    return max(1, min(count, batch_size // 2))


def choose_optimizer(module: TrainingModule, recipe: Recipe, precision: torch.dtype) -> torch.optim.Optimizer:
    """Muon or AdamW, without weight decay for normalization layers and biases.

    Muon updates the weights of convolutions and linear layers, but not of depthwise convolutions,
    which have one input channel. A group's learning rate is the schedule's times its
    ``rate_factor``.
    """
    of_stages = _stage_factors(module) if recipe.weights and recipe.trained_layers != "head" else {}
    groups: dict[tuple[float, bool, bool], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = of_stages.get(name, 1.0) if ".backbone." in name else 1.0
        decayed = parameter.ndim > 1
        orthogonal = decayed and min(parameter.shape[:2]) > 1 and not name.startswith("heads.")
        groups.setdefault((factor, decayed, orthogonal), []).append(parameter)
    options = [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if decayed else 0.0,
            "rate_factor": factor,
            "orthogonal": orthogonal,
        }
        for (factor, decayed, orthogonal), parameters in groups.items()
    ]
    if recipe.muon:
        return Muon(options, recipe.learning_rate, MOMENTUM, precision)
    return AdamW(options, lr=recipe.learning_rate, fused=True)


def choose_average(module: TrainingModule, recipe: Recipe) -> AveragedModel | None:
    """A running average of the weights and batch normalization statistics, or None if the recipe
    averages none (Polyak and Juditsky 1992, "Acceleration of stochastic approximation by
    averaging")."""
    if recipe.ema_decay <= 0:
        return None
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema_decay), use_buffers=True)


def _stage_factors(module: TrainingModule) -> dict[str, float]:
    from evernear.embedding.timm_member import rate_factors  # timm takes seconds to import

    return {
        f"network.members.{number}.backbone.{name}": factor
        for number, member in enumerate(cast(EmbeddingNetwork, module.network).members)
        for name, factor in rate_factors(cast(nn.Module, member.backbone)).items()
    }
