"""The parts of a step. A part is a value in a store. Any process may run a part any number of
times.

::

    <folder>/plan.json                    the plan, written last and once
    <folder>/<plan>/parts/000000.json     one part: the input of the worker
    <folder>/<plan>/results/000000        time and result of a part; a part with a result is skipped
    <folder>/<plan>/failed/000000.json    why a part failed, if the same error would occur again

The division into parts depends on a listing and a fixed part size. The division and the results do
not depend on the number of processes. `Processes` on this machine or the pods of an
Indexed Job (`evernear.kubeflow.indexed_job`) run them.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import uuid4

from pydantic import AwareDatetime, Field

from evernear.common.frozen import Frozen
from evernear.common.masking import mask
from evernear.common.output import quantity
from evernear.common.processes import divide_between
from evernear.common.store import Store, open_store
from evernear.errors import BusyError, ClusterError, ConflictError, EvernearError, MissingObjectError, StoreError

PARTS = "parts/"
"""Prefix in the store for the parts of steps: ``parts/<run>/<step>-<identity>/``."""
PART_SIZE_BYTES = 2**30
"""Size of a part of embed: images in the form of the dataset, by whole shards. A part
takes some minutes, so that the start of a pod hardly matters."""
REQUESTS_IN_FLIGHT = 16
"""Maximum number of small objects that are read or written concurrently."""
FINAL_EXIT_CODE = 42
"""Exit code of a process whose part failed permanently, unlike that of any error or signal."""
STEPS_IN_PARTS = ("ingest", "embed")
"""Steps of a run that save a `PartsRecord` as ``parts_<step>`` if their parts ran on several
nodes."""
Item = TypeVar("Item")
Value = TypeVar("Value")
Worker = Callable[[int, bytes], bytes]
"""Runs a part and returns its result. The arguments are the part's number and value.

The worker always returns the same result for the same part.
"""
OpenWorker = Callable[["Parts"], Worker]
"""Opens objects that all parts share, such as a network, and returns the worker.

The function is defined at module level, so that other processes can import it.
"""


class Plan(Frozen):
    """The parts of a step, and the data that they share."""

    id: str
    kind: str
    """The worker that runs the parts (`evernear.kubeflow.part`)."""
    shared: dict[str, Any]
    """Data that all parts share, such as the source and the release. A different plan needs a
    different folder."""
    parts: int = Field(ge=0)
    units: int = Field(ge=0)
    """Total number of images, or of other units of work, in all parts."""
    notes: tuple[str, ...] = ()
    """Sentences about files that the listing left out."""
    planned: AwareDatetime


class Part(Frozen):
    """Base class of part values. ``units`` is the size of the part, which is used to estimate the
    rate and the remaining time."""

    units: int = Field(ge=0)


class PartResult(NamedTuple):
    """The worker's return value for a part, and the duration of the part."""

    value: bytes
    time_s: float


class PartFailure(Frozen):
    """The reason why a part failed permanently."""

    part: int = Field(ge=0)
    message: str


@dataclass(frozen=True)
class Parts:
    """The parts of a step in ``folder`` of ``store``."""

    store: Store
    folder: str
    plan: Plan

    @staticmethod
    def find(store: Store, folder: str) -> "Parts | None":
        """The parts that were planned in ``folder``, or None if no plan exists yet."""
        stored = store.find(f"{folder}/plan.json")
        if stored is None:
            return None
        return Parts(store, folder, Plan.from_json(stored[0], f"{folder}/plan.json in {store.uri}"))

    @staticmethod
    def make(
        store: Store,
        folder: str,
        kind: str,
        shared: dict[str, Any],
        parts: Iterable[Part],
        notes: Callable[[], tuple[str, ...]] = tuple,
    ) -> "Parts":
        """Write ``parts``, then the plan. ``notes`` is called after the last part. If a different
        process wrote its plan first, that plan is returned and the parts from this call are
        deleted."""
        plan_id, count, units = uuid4().hex[:12], 0, 0

        def write(numbered: tuple[int, Part]) -> int:
            number, part = numbered
            store.put(_key(folder, plan_id, "parts", number), part.model_dump_json().encode())
            return part.units

        for part_units in concurrently(write, enumerate(parts)):
            count, units = count + 1, units + part_units
        plan = Plan(
            id=plan_id, kind=kind, shared=shared, parts=count, units=units, notes=notes(), planned=datetime.now(UTC)
        )
        try:
            store.put_if(f"{folder}/plan.json", plan.to_json(), None)
        except ConflictError:
            with suppress(StoreError):  # the pipeline's credentials may not permit deletion
                for number in range(count):
                    store.delete(_key(folder, plan_id, "parts", number))
            first = Parts.find(store, folder)
            if first is None:
                raise
            return first
        return Parts(store, folder, plan)

    def missing(self) -> list[int]:
        """The numbers of the parts without a result."""
        done = set(self._numbers("results"))
        return [number for number in range(self.plan.parts) if number not in done]

    def part(self, number: int) -> bytes:
        return self.store.get(self._key("parts", number))

    def result(self, number: int) -> bytes | None:
        """The result of a part, or None if the part has no result."""
        stored = self.store.find(self._key("results", number))
        return _parse_result(stored[0]).value if stored else None

    def results(self) -> Iterator[PartResult]:
        """The results of all parts, in order."""

        def read(number: int) -> PartResult:
            return _parse_result(self.store.get(self._key("results", number)))

        return concurrently(read, range(self.plan.parts))

    def save_result(self, number: int, result: bytes, time_s: float = 0.0) -> None:
        """Write the result of a part, unless a different process has already written a result."""
        head = json.dumps({"time_s": round(time_s, 3)}).encode()
        try:
            self.store.put_if(self._key("results", number), head + b"\n" + result, None)
        except ConflictError:
            return

    def failure(self) -> PartFailure | None:
        """The first permanent failure of a part, or None."""
        for number in self._numbers("failed"):
            key = self._key("failed", number)
            if data := self.store.get(key):
                return PartFailure.from_json(data, key)
        return None

    def save_failure(self, number: int, error: EvernearError) -> None:
        failure = PartFailure(part=number, message=mask(str(error)))
        self.store.put(self._key("failed", number), failure.to_json())

    def forget_failures(self) -> None:
        """Let failed parts run again. The records of failures are emptied and not deleted, because
        the pipeline's credentials may not permit deletion."""
        for number in [*self._numbers("failed")]:
            self.store.put(self._key("failed", number), b"")

    def _numbers(self, kind: str) -> Iterator[int]:
        for info in self.store.list(f"{self.folder}/{self.plan.id}/{kind}/"):
            yield int(PurePosixPath(info.key).stem)

    def _key(self, kind: str, number: int) -> str:
        return _key(self.folder, self.plan.id, kind, number)


def _key(folder: str, plan_id: str, kind: str, number: int) -> str:
    return f"{folder}/{plan_id}/{kind}/{number:06}{'' if kind == 'results' else '.json'}"


def _parse_result(data: bytes) -> PartResult:
    """Parse a stored result. The first line is JSON that contains the duration. The remaining data
    is the worker's return value."""
    head, _, value = data.partition(b"\n")
    return PartResult(value, json.loads(head)["time_s"])


def concurrently(
    function: Callable[[Item], Value], items: Iterable[Item], ahead: int = REQUESTS_IN_FLIGHT
) -> Iterator[Value]:
    """Yield the results of ``function`` in the order of the items. ``function`` is called
    concurrently, at most ``ahead`` items ahead of the consumer."""
    with ThreadPoolExecutor(ahead, "parts") as pool:
        pending: deque[Future[Value]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


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
