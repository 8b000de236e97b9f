"""Batch normalization over the images of all training processes."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from evernear.embedding import distributed


class GlobalBatchNorm(TorchFunctionMode):
    """A context in which `torch.nn.functional.batch_norm` uses the statistics of all processes.

    `torch.nn.SyncBatchNorm` supports only GPUs, and replaces layers, so timm's normalization layers
    would lose their activation. With one process, results do not change, but each function call is
    intercepted.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.batch_norm and dist.is_initialized() and dist.get_world_size() > 1:
            return _batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    values: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm` of ``values`` (N, C, ...) with the statistics of all
    processes.

    All must have the same number of values. The variance is the mean of the squared deviations,
    which is more accurate than the mean square minus the squared mean.
    """
    if not training:
        return F.batch_norm(values, running_mean, running_var, weight, bias, False, momentum, eps)
    processes = dist.get_world_size()
    axes = [axis for axis in range(values.ndim) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(values.ndim)]
    deviations = values.to(torch.float32)
    mean = _all_reduce_sum(deviations.mean(axes)) / processes
    deviations = deviations - mean.reshape(shape)
    variance = _all_reduce_sum(deviations.square().mean(axes)) / processes
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            count = values.numel() // values.shape[1] * processes
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(variance * (count / (count - 1)), momentum)
    factor = torch.rsqrt(variance + eps) if weight is None else weight * torch.rsqrt(variance + eps)
    normalized = deviations * factor.reshape(shape)
    return (normalized if bias is None else normalized + bias.reshape(shape)).to(values.dtype)


class _AllReduceSum(torch.autograd.Function):
    """The sum of all processes' values. Its gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return distributed.all_reduce_sum(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return distributed.all_reduce_sum(gradients[0].clone())


def _all_reduce_sum(values: Tensor) -> Tensor:
    return cast(Tensor, _AllReduceSum.apply(values))
