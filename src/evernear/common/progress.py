"""The context manager of pipeline steps: reports progress, records the state, handles errors.

A step appends events as JSON lines to the file that `EVENTS_VARIABLE` names, which a local run
reads to show progress. In a cluster, they are messages in the step's log. The run's record
(`evernear.common.run_record`) has the step's last state.
"""

import gc
import math
import os
import resource
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime

from evernear.common.disk import write_atomically
from evernear.common.extras import missing_library
from evernear.common.frozen import Frozen
from evernear.common.lease import wait_for_release
from evernear.common.masking import mask, mask_streams
from evernear.common.output import print_line, printable
from evernear.common.processes import cpu_limit, memory_limit_bytes, shadowed_modules
from evernear.common.run_record import RunRecord, StepProgress, StepRecord
from evernear.common.store.current import writable_store
from evernear.common.store.patience import patient
from evernear.errors import EvernearError, StoreError, disk_full_message

REPORT_INTERVAL_S = 5.0
FIRST_RECORD_S = 1.0
"""Early, so that a short run also says how long it takes."""
REPORTS = 50
"""Maximum number of reports of the remaining time in a long step, each a line in its log."""
EVENTS_VARIABLE = "_EVERNEAR_EVENTS"
COMMAND_VARIABLE = "_EVERNEAR_COMMAND"
"""The `RunCommand` of a local run, as JSON. Not set in a cluster."""
DIRECTORY_FORMAT = "%Y%m%d-%H%M%S.%f"
"""Name of a run directory: the run's start time in UTC."""
ORDER_FILE = "run.order"
"""File in the working directory with the names of run directories, one per line, in start order."""
TERMINATION_MESSAGE = Path("/dev/termination-log")
TERMINATION_MESSAGE_MAX_CHARACTERS = 1000
"""The kubelet reads 4,096 bytes, and a UTF-8 character takes up to four."""


class Event(Frozen):
    """One line of a run's event file."""

    at: datetime
    step: str
    kind: Literal["started", "progress", "note", "finished", "failed"]
    message: str = ""
    duration_s: float = 0.0
    """Excludes the startup of the step's process."""
    exit_code: int = 0


class Step:
    """A running step. The ``with`` body assigns a short result to ``summary``."""

    def __init__(self, name: str, run: str, store_uri: str) -> None:
        self.name = name
        self.summary = ""
        self._run = run
        self._store_uri = store_uri
        self._record: RunRecord | None = None
        self._opened = False
        self._progress: StepProgress | None = None
        self._writer = _Writer(self._save_progress)
        self._started = datetime.now(UTC)
        self._started_s = time.monotonic()

    def report(self, message: str) -> None:
        self.emit("progress", message)
        counted = self._progress or StepProgress(at=self._started, message="")
        self.progressed(counted.model_copy(update={"at": datetime.now(UTC), "message": printable(message)}))

    def note(self, message: str) -> None:
        """Say something that a person should read, such as a recommendation, on its own line."""
        self.emit("note", message)

    def progressed(self, progress: StepProgress) -> None:
        """Record progress, at most once per `REPORT_INTERVAL_S`. Never waits."""
        self._progress = progress
        self._writer.write_soon()

    def emit(
        self, kind: Literal["started", "progress", "note", "finished", "failed"], message: str, code: int = 0
    ) -> None:
        """Write to the event file, the log and, except for progress and notes, the record."""
        message = printable(message)
        event = Event(
            at=datetime.now(UTC),
            step=self.name,
            kind=kind,
            message=message,
            duration_s=time.monotonic() - self._started_s,
            exit_code=code,
        )
        print_line(f"[{self.name}] {kind}: {message}")
        if path := os.environ.get(EVENTS_VARIABLE):
            with suppress(OSError), Path(path).open("a") as file:  # a full disk must not hide the step's own error
                file.write(event.model_dump_json() + "\n")
        self._save(event)
        if kind == "failed":
            _write_termination_message(message)

    def _save(self, event: Event) -> None:
        """Ignores store errors, because the step may have no other need for the store."""
        if event.kind in ("progress", "note"):
            return
        self._writer.stop()  # a record of progress must not replace the record of the end
        step = StepRecord.of_this_process(event.step, self._started)
        if event.kind != "started":
            ending = {"state": event.kind, "message": event.message, "exit_code": event.exit_code, "ended": event.at}
            step = step.model_copy(update={**ending, **_resources()})
        with suppress(EvernearError):
            if not self._opened:  # once, because each attempt to reach a store takes a while
                self._opened = True
                self._record = RunRecord(writable_store(self._store_uri), self._run)
            if self._record is not None:
                self._record.save_step(step)
                if event.kind == "started":  # the event is recorded first, so that the step or the prune sees the other
                    wait_for_release(self._record.store, self.report)

    def _save_progress(self) -> None:
        if self._record is not None:
            step = StepRecord.of_this_process(self.name, self._started)
            self._record.save_step(step.model_copy(update={"progress": self._progress}))


class _Writer:
    """Calls ``write`` in a thread, so that a slow store does not slow down a step."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def write_soon(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()
        self._wanted.set()

    def stop(self) -> None:
        """Wait for a write in progress, and discard later data."""
        self._stopped.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stopped.clear()
        self._wanted.clear()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopped.is_set():
                return
            with suppress(EvernearError):  # the step may not need the store otherwise
                self._write()
            self._stopped.wait(REPORT_INTERVAL_S)


@contextmanager
def step(name: str, run: str, store_uri: str) -> Generator[Step]:
    """Run the body as the step ``name``, and record its state in the store. An `EvernearError`, a
    full disk or a library that is not installed ends the process with a message and an exit code.
    Any other exception is a bug and propagates with its traceback."""
    mask_streams()
    running = Step(name, run, store_uri)
    with patient(running.report):
        running.emit("started", "")
        yield from _run(running)


def _run(running: Step) -> Generator[Step]:
    try:
        yield running
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also a panic in a Rust library, or a library that exits
        if (expected := _expected(error)) is None:
            _emit_bug(running, error)
            raise
        running.emit("failed", str(expected), expected.exit_code)
        print_line(f"evernear: {expected}", sys.stderr)
        sys.exit(expected.exit_code)
    running.emit("finished", running.summary)
    gc.freeze()  # the garbage collection at exit would traverse all of torch, which takes half a second per step


def _expected(error: BaseException) -> EvernearError | None:
    match error:
        case EvernearError():
            return error
        case ModuleNotFoundError():
            return missing_library(error)
        case OSError():
            place = error.filename or os.environ.get("TMPDIR", "/tmp")  # noqa: S108 - only named
            sentence = disk_full_message(error, place)
            return StoreError(sentence) if sentence else None
        case _:
            return None


def record_failure(name: str, run: str, store_uri: str, message: str, exit_code: int) -> None:
    """Record a failure that the step's own process could not record."""
    failed = Step(name, run, store_uri)
    failed.emit("failed", message, exit_code)


def _emit_bug(running: Step, error: BaseException) -> None:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    location = f"{Path(frame.filename).name}:{frame.lineno}"
    message = f"Unexpected {type(error).__name__}: {error} ({location}); see the log for the traceback."
    running.emit("failed", f"{message} {shadowed_modules()}".rstrip(), 1)


def _resources() -> dict[str, Any]:
    """Keyed by the field names of `StepRecord`."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    limits = {"cpu_limit": cpu_limit(), "memory_limit_bytes": memory_limit_bytes()}
    torch: Any = sys.modules.get("torch")  # a step without a network does not load it
    return {
        "peak_memory_bytes": unit_bytes * max(usage.ru_maxrss for usage in usages),
        "cpu_s": sum(usage.ru_utime + usage.ru_stime for usage in usages),
        "gpus": torch.cuda.device_count() if hasattr(torch, "cuda") else 0,
        **{name: limit for name, limit in limits.items() if limit < math.inf},
    }


def _write_termination_message(message: str) -> None:
    """In a pod, write the termination message, which Kubernetes and the Argo UI show."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        with suppress(OSError):
            TERMINATION_MESSAGE.write_text(message[:TERMINATION_MESSAGE_MAX_CHARACTERS])


ESTIMATED_AFTER = 0.01
"""Share of the work after which the remaining time is estimated: the first units are slow, and the
second of 600 steps once announced hours instead of seconds."""


class Countdown:
    """Reports the progress of work in equal units, and estimates the remaining time.

    The estimate is the completed units' mean duration times the remaining number. It leaves out the
    first unit, which warms up caches, and those completed before the first call, as in a resumed
    step. ``report`` receives lines for the log, ``record`` the same as numbers, more often.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        record: Callable[[StepProgress], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._record = record
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._next_report_s = 0.0
        self._next_record_s = 0.0

    def __call__(self, completed: int, total: int, message: str) -> None:
        """Report ``message`` and the remaining time if due. Call this after every unit or few."""
        now_s = self._clock()
        if self._first is None:
            self._first = (completed, now_s)
            self._next_report_s, self._next_record_s = now_s + REPORT_INTERVAL_S, now_s + FIRST_RECORD_S
        first, started_s = self._first
        if now_s < min(self._next_record_s, self._next_report_s) or completed <= first:
            return
        elapsed_s, left_s = now_s - started_s, None
        if completed - first >= ESTIMATED_AFTER * (total - first):
            left_s = elapsed_s / (completed - first) * (total - completed)
        if now_s >= self._next_report_s:
            pause_s = elapsed_s if left_s is None else (elapsed_s + left_s) / REPORTS
            self._next_report_s = now_s + max(REPORT_INTERVAL_S, pause_s)
            self._report(message if left_s is None else f"{message}, about {duration(left_s)} left")
        if now_s >= self._next_record_s:
            self._next_record_s = now_s + REPORT_INTERVAL_S
            at = datetime.now(UTC)
            self._record(StepProgress(at=at, message=message, done=completed, total=total, left_s=left_s))


class RunCommand(Frozen):
    """The arguments of the ``evernear`` command that started a run. Empty in a cluster."""

    typed: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    """Equivalent arguments for later commands, without what the working directory remembers."""

    @staticmethod
    def of_environment() -> "RunCommand":
        return RunCommand.model_validate_json(os.environ.get(COMMAND_VARIABLE, "{}"))


def typed_arguments() -> tuple[str, ...]:
    """The arguments of the ``evernear`` command that a user typed, also in the steps of its run."""
    return RunCommand.of_environment().typed or tuple(map(mask, sys.argv[1:]))


def duration(seconds: float) -> str:
    """``seconds`` in its two largest units, such as ``45 s``, ``3 min 20 s`` or ``1 h 5 min``."""
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s} s"
    minutes, seconds_left = divmod(total_s, 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left} s"
    return f"{minutes // 60} h {minutes % 60} min"


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Read complete lines from byte ``offset``. Returns the events and the next offset."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    return [Event.from_json(line, path) for line in complete.splitlines()], offset + len(complete)


class RunProgress(Frozen):
    directory: str
    process: int
    started: AwareDatetime
    step: str = ""
    """The step that reported last. Empty before the first report."""
    message: str = ""

    @property
    def where(self) -> str:
        return ": ".join(filter(None, [self.step, self.message])) or "starting"

    def __str__(self) -> str:
        return f"{self.where} (since {self.started:%Y-%m-%d %H:%M:%S} UTC, process {self.process}, {self.directory})"


def progress(workdir: Path) -> RunProgress | None:
    """The local run in progress, or None."""
    import psutil  # steps do not need it

    try:
        process = int((workdir / "run.pid").read_text())
        # A process that started after the PID file was written has reused a killed run's ID.
        if psutil.Process(process).create_time() > (workdir / "run.pid").stat().st_mtime:
            return None
        directory = run_directories(workdir)[-1]
        started = datetime.strptime(directory.name, DIRECTORY_FORMAT).replace(tzinfo=UTC)
    except (OSError, ValueError, IndexError, psutil.NoSuchProcess):
        return None
    events, _ = read_events(directory / "events.jsonl")
    last = {"step": events[-1].step, "message": events[-1].message} if events else {}
    return RunProgress(directory=str(directory), process=process, started=started, **last)


def run_directories(workdir: Path) -> list[Path]:
    """The run directories in ``workdir``, in start order. `ORDER_FILE` has the order, because a
    clock may be set back. Unlisted directories are sorted by the time in their names, and those
    with a future time count as the oldest."""
    try:
        listed = (workdir / ORDER_FILE).read_text().splitlines()
    except (OSError, ValueError):
        listed = []
    position = {name: number for number, name in enumerate(listed)}
    now = datetime.now(UTC)

    def age(directory: Path) -> tuple[int, bool, datetime]:
        started = _started(directory.name) or now
        return position.get(directory.name, -1), started <= now, started

    return sorted(filter(_is_run, (workdir.resolve() / "runs").iterdir()), key=age)


def prune_runs(workdir: Path, own: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` runs, and record the order of the others. ``own`` is the
    newest. The next run tries again to delete what this call could not."""
    earlier = [directory for directory in run_directories(workdir) if directory != own]
    surplus = max(0, len(earlier) + 1 - keep)
    for directory in earlier[:surplus]:
        shutil.rmtree(directory, ignore_errors=True)
    write_atomically(workdir / ORDER_FILE, "".join(f"{path.name}\n" for path in (*earlier[surplus:], own)))


def _is_run(path: Path) -> bool:
    """Whether `run_pipeline` created ``path``. Other directories are not deleted."""
    return _started(path.name) is not None and path.is_dir() and not path.is_symlink()


def _started(name: str) -> datetime | None:
    """The start time in a directory name, or None if it has another format."""
    try:
        return datetime.strptime(name, DIRECTORY_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None
