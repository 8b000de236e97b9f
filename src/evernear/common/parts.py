"""The parts of a step, which any process may run any number of times.

::

    <folder>/parts.json        the plan, written last and once
    <folder>/<sha256>.jsonl    the list of the parts: one line each, the input of the worker
    <folder>/results/000000    time and result of a part; a part with a result is skipped
    <folder>/failed.txt        why a part failed, if the same error would occur again

Worker *i* of *n* runs the parts ``i::n``. The division into parts depends on a listing and a fixed
part size. The division and the results do not depend on *n*. The workers are this process,
processes on this machine, or the pods of an Indexed Job (`evernear.kubeflow.indexed_job`).
"""

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import AwareDatetime, Field

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.frozen import Document, Frozen, require_format, stamp
from evernear.common.masking import mask
from evernear.common.output import print_line, quantity
from evernear.common.processes import divide_between
from evernear.common.store import Store, open_store
from evernear.common.store.patience import patient
from evernear.errors import (
    BusyError,
    ClusterError,
    ConflictError,
    EvernearError,
    FormatError,
    MissingObjectError,
    StoreError,
)

PARTS = "parts/"
"""Prefix in the store for the parts of steps: ``parts/<run>/<step>-<identity>/``."""
REQUESTS_IN_FLIGHT = 16
"""Maximum number of small objects that are read concurrently."""
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
Task = tuple[int, bytes]
"""The number and the value of a part."""
OnParts = Callable[[int, int], None]
"""Receives the number of finished parts and the total number of parts."""


class Plan(Document):
    """What the parts of a step share, and their list."""

    kind: str
    """The worker that runs the parts (`evernear.kubeflow.part`)."""
    shared: dict[str, Any]
    """Data that all parts share, such as the source and the release. A different plan needs a
    different folder."""
    parts: int = Field(ge=0)
    sha256: str
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


@dataclass(frozen=True)
class Parts:
    """The parts of a step in ``folder`` of ``store``."""

    store: Store
    folder: str
    plan: Plan

    @staticmethod
    def find(store: Store, folder: str) -> "Parts | None":
        """The parts that were planned in ``folder``, or None if no plan exists yet."""
        stored = store.find(f"{folder}/parts.json")
        if stored is None:
            return None
        return Parts(store, folder, Plan.from_json(stored[0], f"{folder}/parts.json in {store.uri}"))

    @staticmethod
    def open(store: Store, folder: str) -> "Parts":
        parts = Parts.find(store, folder)
        if parts is None:
            raise MissingObjectError(f"{folder}/parts.json does not exist in {store.uri}.")
        return parts

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
        process wrote its plan first, that plan is returned."""
        count = units = 0
        with tempfile.TemporaryDirectory(prefix="evernear-parts-") as scratch:
            path = Path(scratch) / "parts.jsonl"
            with disk_errors(path), path.open("wb") as file:
                for part in parts:
                    file.write(part.model_dump_json().encode() + b"\n")
                    count, units = count + 1, units + part.units
            sha256 = sha256_file(path)
            store.put(f"{folder}/{sha256}.jsonl", path)
        plan = Plan(
            kind=kind,
            shared=shared,
            parts=count,
            sha256=sha256,
            units=units,
            notes=notes(),
            planned=datetime.now(UTC),
        )
        with suppress(ConflictError):
            store.put_if(f"{folder}/parts.json", plan.to_json(), None)
        return Parts.open(store, folder)

    def tasks(self, numbers: Sequence[int]) -> Iterator[Task]:
        """The parts ``numbers``, in order."""
        if not numbers:
            return
        wanted = set(numbers)
        with tempfile.TemporaryDirectory(prefix="evernear-parts-") as scratch:
            key, path = f"{self.folder}/{self.plan.sha256}.jsonl", Path(scratch) / "parts.jsonl"
            with self.store.fetch(key, path, self.plan.sha256).open("rb") as file:
                yield from ((number, value) for number, value in enumerate(file) if number in wanted)

    def missing(self) -> list[int]:
        """The numbers of the parts without a result."""
        done = set(self.done())
        return [number for number in range(self.plan.parts) if number not in done]

    def done(self) -> Iterator[int]:
        """The numbers of the parts with a result, in order."""
        for info in self.store.list(f"{self.folder}/results/"):
            yield int(info.key.rpartition("/")[2])

    def result(self, number: int) -> PartResult:
        """The result of a part. The first line of the object is JSON that contains the duration."""
        key = self._result(number)
        head, _, value = self.store.get(key).partition(b"\n")
        require_format(head, f"{self.store.uri}/{key}")
        return PartResult(value, json.loads(head)["time_s"])

    def results(self) -> Iterator[PartResult]:
        """The results of all parts, in order."""
        return concurrently(self.result, range(self.plan.parts))

    def save_result(self, number: int, result: bytes, time_s: float = 0.0) -> None:
        """Write the result of a part, unless a different process has already written a result."""
        head = json.dumps(stamp() | {"time_s": round(time_s, 3)}).encode()
        with suppress(ConflictError):
            self.store.put_if(self._result(number), head + b"\n" + result, None)

    def _result(self, number: int) -> str:
        return f"{self.folder}/results/{number:06}"

    def failure(self) -> str:
        """Why a part failed permanently, or an empty string."""
        stored = self.store.find(f"{self.folder}/failed.txt")
        return stored[0].decode() if stored else ""

    def save_failure(self, message: str) -> None:
        """An empty message lets failed parts run again, because the pipeline's credentials may not
        permit deletion."""
        self.store.put(f"{self.folder}/failed.txt", mask(message).encode())


def concurrently(
    function: Callable[[Item], Value], items: Iterable[Item], ahead: int = REQUESTS_IN_FLIGHT
) -> Iterator[Value]:
    """Yield the results of ``function`` in the order of the items. ``function`` is called
    concurrently, at most ``ahead`` items ahead of the consumer."""
    with ThreadPoolExecutor(ahead, "parts") as pool:
        yield from _in_order(pool, function, items, ahead)


def _in_order(pool: Executor, function: Callable[[Item], Value], items: Iterable[Item], ahead: int) -> Iterator[Value]:
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
    if isinstance(error, MissingObjectError | FormatError):
        return True
    return not isinstance(error, (StoreError, BusyError, ClusterError))


class PartsRecord(Document):
    """How the parts of a step ran on several nodes, for the run page."""

    nodes: int
    """Maximum number of pods that ran concurrently."""
    parts: int
    retries: int
    """Number of failed pods whose parts were run again."""
    cpus: float | None
    """The CPU limit of the pod, or None if it has none."""
    memory_bytes: float | None
    parts_s: float
    """Total time of all parts, excluding the startup of pods. One node would have taken about this
    time."""
    elapsed_s: float
    """Time since the parts were planned."""

    def summary(self) -> str:
        """The end of a sentence."""
        return f" on {quantity(self.nodes, 'node')} in {quantity(self.parts, 'part')}"


def run_parts(
    parts: Parts, open_worker: OpenWorker, on_parts: OnParts = lambda *_: None, index: int = 0, workers: int = 1
) -> None:
    """Run every part without a result in this process. With several workers, run only the parts of
    the worker ``index``."""
    missing = [number for number in parts.missing() if number % workers == index]
    run = _Run(parts, open_worker)
    _follow(parts, missing, map(run, parts.tasks(missing)), on_parts)


def run_in_processes(parts: Parts, open_worker: OpenWorker, processes: int, on_parts: OnParts) -> None:
    """Run every part without a result in processes on this machine. Each process opens its worker
    once."""
    missing = parts.missing()
    count = min(processes, len(missing))
    if count <= 1:
        run_parts(parts, open_worker, on_parts)
        return
    arguments = (parts.store.uri, parts.folder, open_worker)
    with divide_between(count):
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_process, arguments)
        try:
            finished = _in_order(pool, _run_in_process, parts.tasks(missing), 2 * count)
            _follow(parts, missing, finished, on_parts)
        except BrokenProcessPool:
            raise EvernearError(
                f"One of {count} processes was killed, perhaps because memory ran out. Run again with fewer processes; "
                "finished parts stay."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _follow(parts: Parts, missing: Sequence[int], finished: Iterator[None], on_parts: OnParts) -> None:
    done, total = parts.plan.parts - len(missing), parts.plan.parts
    on_parts(done, total)
    for count, _ in enumerate(finished, done + 1):
        on_parts(count, total)


@dataclass
class _Run:
    """Runs parts with a worker that is opened with the first part."""

    parts: Parts
    open_worker: OpenWorker
    worker: Worker | None = None

    def __call__(self, task: Task) -> None:
        self.worker = self.worker or self.open_worker(self.parts)
        started_s = time.monotonic()
        result = self.worker(*task)
        self.parts.save_result(task[0], result, time.monotonic() - started_s)


_run: _Run | None = None


def _start_process(uri: str, folder: str, open_worker: OpenWorker) -> None:
    """Prepare a process of the pool. The process ends when its parent ends. Ctrl-C ends the process
    immediately."""
    global _run
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _run = _Run(Parts.open(open_store(uri), folder), open_worker)


def _run_in_process(task: Task) -> None:
    if _run is None:
        raise RuntimeError("The process has not been started by run_in_processes.")
    with patient(print_line):
        _run(task)
