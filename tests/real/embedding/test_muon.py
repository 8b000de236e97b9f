"""AdamW is torch's. Muon agrees with timm's in bfloat16, and with AdamW for other parameters."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from evernear.embedding.optimizer import AdamW, Muon

SHAPES = [(8, 4, 3, 3), (16, 8), (4, 16)]


def make_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in SHAPES]


def optimize(optimizer: torch.optim.Optimizer, parameters: list[Tensor], steps: int = 5, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def muon(parameters: list[Tensor], precision: torch.dtype, orthogonal: bool = True) -> Muon:
    group: dict[str, Any] = {"params": parameters, "weight_decay": 0.1, "orthogonal": orthogonal}
    return Muon([group], learning_rate=0.01, momentum=0.9, precision=precision)


def test_adamw_is_that_of_torch_also_after_it_was_saved() -> None:
    optimized: list[list[Tensor]] = []
    for optimizer in (AdamW, torch.optim.AdamW):
        weights = make_weights()
        first, second = optimizer(weights, lr=0.01, fused=True), optimizer(weights, lr=0.5, fused=True)
        optimize(first, weights)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        optimize(second, weights)
        optimized.append(weights)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*optimized, strict=True))


@pytest.mark.slow
def test_an_optimizer_starts_without_the_compiler() -> None:
    script = """
import sys
from tests.real.embedding.test_muon import *
weights = make_weights()
for optimizer in (AdamW(weights, fused=True), muon(weights, torch.float32, orthogonal=False)):
    optimize(optimizer, weights)
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
print({"torch._dynamo", "sympy", "triton"} & set(sys.modules))
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout == "set()\n"


def test_in_bfloat16_the_weights_are_those_of_timm() -> None:
    from timm.optim.muon import Muon as TimmMuon  # every pytest worker would wait seconds for timm

    ours, theirs = make_weights(), make_weights()
    optimize(muon(ours, torch.bfloat16), ours)
    optimize(TimmMuon(theirs, lr=0.01, weight_decay=0.1, momentum=0.9, nesterov=True), theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_in_other_precisions_an_update_is_nearly_orthogonal(precision: torch.dtype) -> None:
    before, after = make_weights(), make_weights()
    group = {"params": after, "weight_decay": 0.0, "orthogonal": True}
    optimize(Muon([group], learning_rate=0.01, momentum=0.9, precision=precision), after, steps=1)
    for old, new in zip(before, after, strict=True):
        update = (old - new).detach().flatten(1)
        assert update.dtype == torch.float32
        singular_values = torch.linalg.svdvals(update / (0.01 * 0.2 * max(update.shape) ** 0.5))
        assert 0.97 < singular_values.min() <= singular_values.max() < 1.04  # COEFFICIENTS reach 0.978 to 1.032


def test_adamw_updates_the_other_parameters() -> None:
    ours, theirs = make_weights(), make_weights()
    optimize(muon(ours, torch.float32, orthogonal=False), ours)
    optimize(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_restored_optimizer_continues_identically() -> None:
    parameters = make_weights()
    optimizer = muon(parameters, torch.float32)
    optimize(optimizer, parameters)
    copies = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    restored = muon(copies, torch.float32)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimize(optimizer, parameters, seed=2)
    optimize(restored, copies, seed=2)
    for one, other in zip(parameters, copies, strict=True):
        assert torch.equal(one, other)


def test_a_weight_without_a_gradient_does_not_change() -> None:
    parameters = make_weights()
    muon(parameters, torch.float32).step()
    for parameter, initial in zip(parameters, make_weights(), strict=True):
        assert torch.equal(parameter, initial)
