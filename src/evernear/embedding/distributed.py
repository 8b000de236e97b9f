"""Run a function in several processes that communicate through `torch.distributed`.

`torchrun` does the same and restarts failed processes, which a JobSet does for several nodes. It is
not used, because its agent starts each process in a new session, which neither Ctrl-C nor a signal
to the process group reaches.
"""

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented under this name
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException, spawn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from evernear.common.masking import mask_streams
from evernear.common.processes import divide_between
from evernear.errors import EvernearError, SettingsError, TrainingError

Message = TypeVar("Message")
Value = TypeVar("Value")
POLL_S = 0.1
LOOPBACK = "127.0.0.1"
RENDEZVOUS_TIMEOUT = timedelta(minutes=30)
"""Time for the processes of all nodes to join. The nodes' pods may start one after another."""


@dataclass(frozen=True)
class Node:
    """This node's position in a training run, and the rendezvous address of all nodes."""

    rank: int = 0
    count: int = 1
    address: str = LOOPBACK
    """Host name of the first node."""
    port: int = 0
    """Port of the rendezvous on the first node. A single node chooses a free port."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Node":
        """The node that Kubeflow Trainer describes in torchrun's environment variables."""
        try:
            return cls(
                rank=int(environment["PET_NODE_RANK"]),
                count=int(environment["PET_NNODES"]),
                address=environment["PET_MASTER_ADDR"],
                port=int(environment["PET_MASTER_PORT"]),
            )
        except (KeyError, ValueError) as error:
            raise SettingsError(
                f"This process is not a node of a TrainJob: the environment variables PET_* are incomplete ({error})."
            ) from None


ONE_NODE = Node()


def run_processes(
    function: Callable[[Callable[[Message], None]], None],
    processes: int,
    backend: str,
    on_message: Callable[[Message], None],
    node: Node = ONE_NODE,
) -> None:
    """Call ``function(send)`` in new processes, which join the process group of all nodes.

    What a process passes to ``send`` is passed to ``on_message`` here. ``function`` and what it
    sends must be picklable. No process outlives this call or the calling process. If ``processes``
    is 1, ``function`` runs in the calling process.

    If a process raises an `EvernearError`, it is raised here and the others are killed. Any other
    error, or a killed process, is a `TrainingError` with exit code 1, because a restart may
    succeed.
    """
    messages: SimpleQueue[Message | EvernearError] = multiprocessing.get_context("spawn").SimpleQueue()
    rendezvous = _serve_rendezvous(node) if node.rank == 0 else None  # the server runs as long as this object exists
    if rendezvous is not None:
        node = replace(node, port=rendezvous.port, address=LOOPBACK)
    if processes == 1:
        with _process_group(backend, node, 0, 1):
            function(on_message)
        return
    with divide_between(processes):
        context = spawn(_run_process, (function, processes, backend, node, messages), processes, join=False)
    assert context is not None  # noqa: S101 - because of join=False
    try:
        while not context.join(timeout=POLL_S):
            _receive_messages(messages, on_message)
        _receive_messages(messages, on_message)
    except ProcessException as error:
        _receive_messages(messages, on_message)
        if isinstance(error, ProcessRaisedException):
            sys.stderr.write(f"{error.msg}\n")  # the traceback
            raise _restartable(f"Training process {error.error_index} of {processes} failed; see the log.") from error
        raise _restartable(f"Training failed: {error.msg} (of {processes} processes).") from error
    finally:
        for process in context.processes:
            assert process is not None  # noqa: S101 - started above
            process.kill()
            process.join()


def _serve_rendezvous(node: Node) -> TCPStore:
    """Listen on the loopback interface, or on all interfaces if there are other nodes."""
    if node.count > 1:
        return TCPStore(LOOPBACK, node.port, is_master=True, wait_for_workers=False)
    listener = socket.create_server((LOOPBACK, 0))
    port: int = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def rank_and_world_size() -> tuple[int, int]:
    """0 and 1 outside of a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_reduce_sum(values: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def all_gather(values: Tensor) -> Tensor:
    """The ``values`` (N,) of all processes in rank order. N must be the same in all."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def broadcast_from_rank_0(value: Value) -> Value:
    if not dist.is_initialized():
        return value
    objects = [value]
    dist.broadcast_object_list(objects)
    return objects[0]


def _restartable(message: str) -> TrainingError:
    error = TrainingError(message)
    error.exit_code = EvernearError.exit_code
    return error


def _receive_messages(messages: "SimpleQueue[Message | EvernearError]", on_message: Callable[[Message], None]) -> None:
    while not messages.empty():
        message = messages.get()
        if isinstance(message, EvernearError):
            raise message
        on_message(message)


def _run_process(
    rank: int,
    function: Callable[[Callable[[Message], None]], None],
    processes: int,
    backend: str,
    node: Node,
    messages: "SimpleQueue[Message | EvernearError]",
) -> None:
    mask_streams()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with _process_group(backend, node, rank, processes):
        try:
            function(messages.put)
        except EvernearError as error:
            messages.put(error)
            sys.exit(error.exit_code)


@contextmanager
def _process_group(backend: str, node: Node, rank: int, processes: int) -> Generator[None]:
    """Join the group as process ``rank`` of the ``processes`` on this node."""
    rendezvous = TCPStore(node.address, node.port, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    dist.init_process_group(
        backend, store=rendezvous, rank=node.rank * processes + rank, world_size=node.count * processes
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _exit_with_parent() -> None:
    """Exit with the parent even on systems without Linux's parent-death signal."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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
        return all_reduce_sum(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_reduce_sum(gradients[0].clone())


def _all_reduce_sum(values: Tensor) -> Tensor:
    return cast(Tensor, _AllReduceSum.apply(values))
