"""Run a function in several processes of this machine that communicate through `torch.distributed`.

`torchrun` starts processes in the same way, and adds restarts and rendezvous between nodes, which one node does not
need. Its agent also puts each process into a new session, where neither Ctrl-C nor a kill of the process group would
reach it.
"""

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented under this name
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException, spawn

from evernear.errors import EvernearError, TrainingError
from evernear.threads import divide_between

Message = TypeVar("Message")
Value = TypeVar("Value")
POLL_S = 0.1
LOOPBACK = "127.0.0.1"


def run(
    function: Callable[[Callable[[Message], None]], None],
    processes: int,
    backend: str,
    on_message: Callable[[Message], None],
) -> None:
    """Call ``function(send)`` in ``processes`` new processes that form one process group.

    Each object that a process passes to ``send`` is passed to ``on_message`` here. ``function`` and the objects must be
    picklable. No process outlives this call or the calling process.

    Raises:
        EvernearError: a process failed with it; the others are ended.
        TrainingError: a process failed in another way or was killed.
    """
    messages: SimpleQueue[Message | EvernearError] = multiprocessing.get_context("spawn").SimpleQueue()
    listener = socket.create_server((LOOPBACK, 0))
    port: int = listener.getsockname()[1]
    # Referenced until the end: the server of the rendezvous lives as long as this object.
    rendezvous = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with divide_between(processes):
        context = spawn(_call, (function, processes, backend, rendezvous.port, messages), processes, join=False)
    assert context is not None  # noqa: S101 - because of join=False
    try:
        while not context.join(timeout=POLL_S):
            _deliver(messages, on_message)
        _deliver(messages, on_message)
    except ProcessException as error:
        _deliver(messages, on_message)
        if isinstance(error, ProcessRaisedException):
            sys.stderr.write(f"{error.msg}\n")  # the traceback
            raise TrainingError(f"Training process {error.error_index} of {processes} failed; see the log.") from error
        raise TrainingError(f"Training failed: {error.msg} (of {processes} processes).") from error
    finally:
        for process in context.processes:
            assert process is not None  # noqa: S101 - started above
            process.kill()
            process.join()


def place() -> tuple[int, int]:
    """Rank and number of the processes of this process group; (0, 1) outside of one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(values: Tensor) -> Tensor:
    """The sum of all processes' ``values``."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather(values: Tensor) -> Tensor:
    """``values`` (N,) of all processes, in the order of their ranks; N is the same in each."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def from_rank_0(value: Value) -> Value:
    """The ``value`` of rank 0 in every process."""
    if not dist.is_initialized():
        return value
    objects = [value]
    dist.broadcast_object_list(objects)
    return objects[0]


def _deliver(messages: "SimpleQueue[Message | EvernearError]", on_message: Callable[[Message], None]) -> None:
    while not messages.empty():
        message = messages.get()
        if isinstance(message, EvernearError):
            raise message
        on_message(message)


def _call(
    rank: int,
    function: Callable[[Callable[[Message], None]], None],
    processes: int,
    backend: str,
    port: int,
    messages: "SimpleQueue[Message | EvernearError]",
) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    rendezvous = TCPStore(LOOPBACK, port, is_master=False)
    dist.init_process_group(backend, store=rendezvous, rank=rank, world_size=processes)
    try:
        function(messages.put)
    except EvernearError as error:
        messages.put(error)
        sys.exit(error.exit_code)
    finally:
        dist.destroy_process_group()


def _exit_with_parent() -> None:
    """End this process when its parent is gone, also on systems without the parent-death signal of Linux."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
