import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
"""Of the Newton-Schulz iterations, from Cesista et al. 2025,
https://leloykun.github.io/ponder/muon-opt-coeffs/."""
ADAMW_RMS = 0.2
"""RMS of AdamW's updates relative to the learning rate (Liu et al. 2025, section 2.2)."""


class Muon(torch.optim.AdamW):
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
