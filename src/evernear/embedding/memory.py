"""Limit the batch size by the memory that a network's activations need."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

INFERENCE_BYTES = 64 * 2**20
"""Maximum size of the activations that exist at once during inference, per embedding thread.

A layer's input and output are at most half of it. glibc returns larger tensors to the system after
each layer (``M_MMAP_THRESHOLD``, mallopt(3)), and the page faults of the next layer can take longer
than its computation.
"""
TRAINING_BYTES = 2**30
"""Maximum size of the activations that a training step on a CPU stores for the backward pass."""
GPU_MEMORY_FRACTION = 0.5
"""The same on a GPU, as a fraction of its memory."""
INFERENCE_FACTOR = 2.0
"""Intermediate results and memory-format copies, relative to a layer's input and output."""
TRAINING_FACTOR = 2.0
"""Gradients of activations and what layers store besides their output, relative to its size."""


def inference_batch_size(network: nn.Module, image: Tensor) -> int:
    """The largest batch to process without gradients. ``image`` (1, C, H, W) is an example."""
    largest = max(_layer_bytes(network, image, lambda inputs, output: inputs + output), default=1)
    return max(1, int(INFERENCE_BYTES / (largest * INFERENCE_FACTOR)))


def training_batch_size(network: nn.Module, image: Tensor, device: torch.device) -> int:
    """The largest batch to process with gradients. ``image`` (1, C, H, W) is an example."""
    limit = TRAINING_BYTES
    if device.type == "cuda":
        limit = int(torch.cuda.get_device_properties(device).total_memory * GPU_MEMORY_FRACTION)
    total = sum(_layer_bytes(network, image, lambda _, output: output))
    return max(2, int(limit / max(1, total * TRAINING_FACTOR)))


@torch.no_grad()
def _layer_bytes(network: nn.Module, image: Tensor, measure: Callable[[int, int], int]) -> list[int]:
    """``measure(input bytes, output bytes)`` of each layer when ``network`` processes one image."""
    measured: list[int] = []

    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        measured.append(measure(sum(map(_bytes, inputs)), _bytes(output)))

    layers = [module for module in network.modules() if not any(module.children())]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    was_training = network.training
    try:
        network.eval()(image)
    finally:
        network.train(was_training)
        for handle in handles:
            handle.remove()
    return measured


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
