"""Run the parts of a step (`evernear.common.parts`).

An `Executor` runs parts, follows their progress, and returns when all parts have a result. The
executors are `Processes` on this machine and an Indexed Job (`evernear.kubeflow.indexed_job`). Both
executors call `run_part`.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.common.parts import OpenWorker, Parts, Worker
from evernear.common.processes import divide_between
from evernear.common.store import open_store
from evernear.errors import BusyError, ClusterError, EvernearError, MissingObjectError, StoreError

FINAL_EXIT_CODE = 42
"""Exit code of a process whose part failed permanently. No error class and no signal uses this exit
code."""
STEPS_IN_PARTS = ("ingest", "embed")
"""Steps of a run that save a `PartsRecord` as ``parts_<step>`` if their parts ran on several
nodes."""


def is_final(error: EvernearError) -> bool:
    """Whether the same error would occur again. Errors of a store, a server or a cluster may be
    temporary."""
    if isinstance(error, MissingObjectError):
        return True
    return not isinstance(error, (StoreError, BusyError, ClusterError))


def run_part(parts: Parts, number: int, worker: Worker) -> None:
    """Run a part with ``worker``, unless it already has a result. An error that would occur again
    is recorded."""
    if parts.result(number) is not None:
        return
    started_s = time.monotonic()
    try:
        parts.save_result(number, worker(number, parts.part(number)), time.monotonic() - started_s)
    except EvernearError as error:
        if is_final(error):
            parts.save_failure(number, error)
        raise


class PodUsage(NamedTuple):
    """The pods that ran parts."""

    nodes: int
    """Maximum number of pods that ran concurrently."""
    retries: int
    """Number of failed pods whose parts were run again."""
    cpus: float | None
    """CPU limit of a pod, or None if there is no limit."""
    memory_bytes: float | None


class PartsRecord(Frozen):
    """How the parts of a step ran on several nodes, for the run page."""

    nodes: int
    parts: int
    retries: int
    cpus: float | None
    """CPU limit of a pod, or None if there is no limit."""
    memory_bytes: float | None
    parts_s: float
    """Total time of all parts, excluding the startup of pods. One node would have taken about this
    time."""
    elapsed_s: float
    """Time since the parts were planned."""

    def summary(self) -> str:
        """The end of a sentence."""
        return f" on {quantity(self.nodes, 'node')} in {quantity(self.parts, 'part')}"


class Executor(Protocol):
    """Runs parts, follows their progress, and returns when all parts have a result."""

    def run(self, parts: Parts, numbers: Sequence[int], on_done: Callable[[int], None]) -> "PodUsage | None":
        """Run the parts ``numbers``. Calls ``on_done`` with the number of parts that finished since
        the last call. Returns the usage of pods, or None if no pods ran."""
        ...


@dataclass(frozen=True)
class Processes:
    """Runs parts in processes on this machine. If one process is sufficient, the parts run in the
    current process."""

    count: int
    open_worker: OpenWorker

    def run(self, parts: Parts, numbers: Sequence[int], on_done: Callable[[int], None]) -> None:
        """Run the parts ``numbers``, like `Executor.run`. Each process opens its worker once."""
        count = min(self.count, len(numbers))
        if count > 1:
            with divide_between(count):
                self._run_in_pool(count, parts, numbers, on_done)
        elif numbers:
            worker = self.open_worker(parts)
            for number in numbers:
                run_part(parts, number, worker)
                on_done(1)

    def _run_in_pool(self, count: int, parts: Parts, numbers: Sequence[int], on_done: Callable[[int], None]) -> None:
        start = partial(_start_process, parts.store.uri, parts.folder, self.open_worker)
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=start)
        try:
            waiting: set[Future[None]] = {pool.submit(_run_in_process, number) for number in numbers}
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                on_done(len(done))
        except BrokenProcessPool:
            raise EvernearError(
                f"One of {count} processes was killed, perhaps because memory ran out. Run again with fewer processes; "
                "finished parts stay."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


_run_in_this_process: Callable[[int], None] | None = None


def _start_process(uri: str, folder: str, open_worker: OpenWorker) -> None:
    """Open the worker in a process of the pool. The process ends when its parent ends. Ctrl-C ends
    the process immediately."""
    global _run_in_this_process
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    parts = Parts.find(open_store(uri), folder)
    if parts is None:
        raise MissingObjectError(f"{folder}/plan.json does not exist in {uri}.")
    opened: Worker | None = None

    # The worker is opened with the first part, because an error in an initializer would reach the
    # parent without its message.
    def run(number: int) -> None:
        nonlocal opened
        opened = opened or open_worker(parts)
        run_part(parts, number, opened)

    _run_in_this_process = run


def _run_in_process(number: int) -> None:
    if _run_in_this_process is None:
        raise RuntimeError("The process has not been started by Processes.")
    _run_in_this_process(number)


def run_parts(parts: Parts, executor: Executor, report: Callable[[int, int], None]) -> PodUsage | None:
    """Run every part without a result. ``report`` receives the number of finished parts and the
    total number of parts. Returns the usage of pods, or None if no pods ran."""
    missing, total = parts.missing(), parts.plan.parts
    parts.forget_failures()
    done = total - len(missing)
    report(done, total)

    def on_done(count: int) -> None:
        nonlocal done
        done += count
        report(done, total)

    return executor.run(parts, missing, on_done)
