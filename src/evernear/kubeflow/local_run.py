"""Run a pipeline on this machine: start the process, follow its events, and read the outcome."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil

from evernear.common.disk import disk_errors, file_lock, scratch, scratch_name, write_atomically
from evernear.common.environment import with_absolute_locations
from evernear.common.extras import require_libraries
from evernear.common.frozen import Frozen
from evernear.common.masking import copy_masked
from evernear.common.outputs import MARKER, marker
from evernear.common.processes import describe_ending, shadowed_modules
from evernear.common.progress import (
    COMMAND_VARIABLE,
    DIRECTORY_FORMAT,
    EVENTS_VARIABLE,
    Event,
    RunCommand,
    progress,
    prune_runs,
    read_events,
    run_directories,
)
from evernear.common.store import Store
from evernear.common.store.current import current_store
from evernear.errors import EvernearError, SettingsError, StoreError, UserInterruptError, disk_full_message
from evernear.release.promotions import whoami
from evernear.release.registry import Registry
from evernear.reporting.notify import NextStep, RunOutcome
from evernear.serving.endpoints import home_of
from evernear.serving.torchserve import reserved_ports
from evernear.settings import RunSettings, Settings
from evernear.settings.sources import Tree, flat

POLL_S = 0.1
PAGE_FILE = "run.html"
_EVENTS = "events.jsonl"
LAST_OUTPUT_BYTES = 8192
_UNENDED = "before it ended: it was interrupted or killed. The next run continues it."
LOG_TIMEOUT_S = 10.0
"""Seconds to wait for the complete log after all steps. A leftover process may keep it open."""
CLEAN_UP_S = 10.0
"""Seconds that interrupted steps have to clean up before they are killed."""
EVENTS_MIN_FREE_BYTES = 64 * 1024
"""With less free disk space, a failed step may be unable to write its error to the event file."""
STARTED_BY_VARIABLE = "_EVERNEAR_STARTED_BY"
"""Variable with the user for whom another process, such as the console, starts a run."""
Pipeline = Literal["continuous_training", "reindex"]


class RunResult(Frozen):
    """A run's result, as ``evernear run --json`` prints it."""

    release: str | None
    promoted: bool
    state: str
    summary: str
    reasons: tuple[str, ...]
    metrics: dict[str, float]
    paths: dict[str, str]
    steps_s: dict[str, float]
    wall_s: float
    page: str = ""
    """Path of the run page, a self-contained HTML file."""
    candidate: str | None = None
    """Version of the release that the run archived."""
    gate_settings: tuple[str, ...] = ()
    """``key=value`` settings with which the gate would have promoted a held candidate."""
    next_steps: tuple[NextStep, ...] = ()


def run_pipeline(
    settings: Settings,
    show: Callable[[Event], None],
    pipeline: Pipeline = "continuous_training",
    command: RunCommand | None = None,
    once: Tree | None = None,
) -> RunResult:
    """Run ``pipeline``, and call ``show`` with each event as it happens. ``once`` has the fields of
    `OneRun` that are true of this run alone. The run page uses ``command``, the ``evernear``
    command, for its next steps. After Ctrl-C, the next run resumes from this one's checkpoints. The
    error of a failed step has the step's exit code."""
    require_libraries("kfp", "torch", "faiss")
    arguments = pipeline_arguments(settings, once or {})
    require_utf8(settings.workdir, arguments)
    store = current_store(settings.store_uri)
    with (
        _lock(settings.workdir),
        _reserved(settings),
        scratch(_temporary_directory(settings.workdir)) as temporary,
    ):
        started_s = time.monotonic()
        directory = settings.workdir.resolve() / "runs" / datetime.now(UTC).strftime(DIRECTORY_FORMAT)
        with disk_errors(directory):
            directory.mkdir(parents=True)
        prune_runs(settings.workdir, directory, settings.keep_runs)
        try:
            failures, steps_s = _follow(arguments, pipeline, directory, temporary, show, command or RunCommand())
        except KeyboardInterrupt:
            raise UserInterruptError(_interrupted(read_events(directory / _EVENTS)[0], store)) from None
        wall_s = time.monotonic() - started_s
        for page in directory.glob("*/notify/page.html"):
            shutil.copyfile(page, directory / PAGE_FILE)
        if failures:
            more = f" The run page shows more: {directory / PAGE_FILE}" if (directory / PAGE_FILE).exists() else ""
            failed = EvernearError(f"{failures[0].message}{more}")
            failed.exit_code = failures[0].exit_code
            raise failed
        return _result(directory, steps_s, wall_s)


def require_utf8(workdir: Path, arguments: Tree) -> None:
    """Require that JSON can pass all settings, such as the name of a folder, to the steps."""
    values = {"workdir": str(workdir.resolve()), **flat(arguments)}
    for name, value in values.items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            setting = name.removeprefix("settings.")
            raise SettingsError(
                f"{setting} = {value} is not UTF-8, so it cannot be passed to the pipeline's steps; rename it."
            ) from None


def _temporary_directory(workdir: Path) -> Path:
    """The steps' TMPDIR, deleted after the run because kfp and killed steps leave files there."""
    return Path(tempfile.gettempdir()) / scratch_name(workdir.resolve())


def _reserved(settings: Settings) -> AbstractContextManager[None]:
    if settings.target != "local":
        return nullcontext()
    return reserved_ports(settings.serving, home_of(settings.workdir))


@contextmanager
def _lock(workdir: Path) -> Generator[None]:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if full := disk_full_message(error, workdir):
            raise StoreError(full) from None
        raise SettingsError(f"Cannot create the working directory {workdir}: {error.strerror}.") from None
    pid_file = workdir / "run.pid"

    def busy() -> str:
        pid = pid_file.read_text() if pid_file.exists() else "unknown"
        return f"Another run (process {pid}) uses {workdir}; wait for it to end or choose another --workdir."

    with file_lock(workdir / "run.lock", 0, busy):
        write_atomically(workdir / MARKER, marker("a working directory"))
        write_atomically(pid_file, str(os.getpid()))
        try:
            yield
        finally:
            pid_file.unlink(missing_ok=True)


def _follow(
    arguments: Tree,
    pipeline: Pipeline,
    directory: Path,
    temporary: Path,
    show: Callable[[Event], None],
    command: RunCommand,
) -> tuple[list[Event], dict[str, float]]:
    """Run the pipeline process. Return the events of failed steps, and each step's duration. On
    Ctrl-C, all processes of the run end before `KeyboardInterrupt` is raised."""
    events_path = directory / _EVENTS
    failures: list[Event] = []
    steps_s: dict[str, float] = {}
    offset = 0
    with _pipeline_process(arguments, pipeline, directory, temporary, events_path, show, command) as process:
        while True:
            ended = process.poll() is not None  # checked before the read, so that the last events are read as well
            events, offset = read_events(events_path, offset)
            for event in events:
                show(event)
                if event.kind in ("finished", "failed"):
                    steps_s[event.step] = event.duration_s
                if event.kind == "failed":
                    failures.append(event)
            if ended:
                break
            time.sleep(POLL_S)
    if process.returncode != 0 and not failures:
        failures.append(_silent_failure(directory, process.returncode))
    return failures, steps_s


def _interrupted(events: Sequence[Event], store: Store) -> str:
    started = [event.step for event in events if event.kind == "started"]
    finished = [event.step for event in events if event.kind == "finished"]
    running = " and ".join(step for step in started if step not in finished)
    where = f"during {running}" if running else "between two steps" if started else "before the first step"
    live = "`evernear status` shows which release is live"
    if "deploy" not in started:
        with suppress(EvernearError):
            live = "the live release is unchanged" if Registry(store).champion() else "no release is live"
    return (
        f"Interrupted {where}: all processes of the run have ended, and {live}. Ingested images and finished epochs "
        "are saved; the same command resumes from there."
    )


def _silent_failure(directory: Path, status: int) -> Event:
    """The event for a run that ended with ``status`` although no step recorded an error."""
    log = directory / "log.txt"
    if shutil.disk_usage(directory).free < EVENTS_MIN_FREE_BYTES:
        message, code = f"The disk that holds {directory} is full; free some space and run again.", StoreError.exit_code
    else:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_OUTPUT_BYTES))
            output = file.read().decode(errors="replace")
        message = f"The pipeline {describe_ending(status, output)} See {log}. {shadowed_modules()}".rstrip()
        code = EvernearError.exit_code
    return Event(at=datetime.now(UTC), step="run", kind="failed", message=message, exit_code=code)


@contextmanager
def _pipeline_process(
    arguments: Tree,
    pipeline: Pipeline,
    directory: Path,
    temporary: Path,
    events: Path,
    show: Callable[[Event], None],
    command: RunCommand,
) -> Generator[subprocess.Popen[bytes]]:
    # In an empty directory, so that no step depends on files that the image lacks.
    empty = temporary / "empty"
    with disk_errors(empty):
        empty.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "evernear.kubeflow.local_pipeline"],
        cwd=empty,
        env={
            **with_absolute_locations(os.environ),
            EVENTS_VARIABLE: str(events),
            COMMAND_VARIABLE: command.model_dump_json(),
            "TMPDIR": str(temporary),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - because of PIPE, for the type checker
    assert process.stdout is not None  # noqa: S101
    log = threading.Thread(target=copy_masked, args=(process.stdout, directory / "log.txt"), daemon=True)
    log.start()
    try:
        request = {"pipeline": pipeline, "pipeline_root": str(directory), "arguments": arguments}
        with suppress(BrokenPipeError):  # the process has already ended, and its status says how
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        yield process
    except KeyboardInterrupt:
        wait = f"waiting up to {CLEAN_UP_S:.0f} s for the steps to clean up; Ctrl-C again kills them"
        show(Event(at=datetime.now(UTC), step="interrupted", kind="progress", message=wait))
        _interrupt(process)
        raise
    finally:
        _end(process)
        log.join(LOG_TIMEOUT_S)


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt the steps, so that they undo a deployment and remove temporary files."""
    _, alive = psutil.wait_procs(_signal(process, signal.SIGINT), timeout=CLEAN_UP_S)
    _kill(alive)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill all processes that remain after the run ended or was interrupted."""
    _kill(_signal(process, signal.SIGKILL))
    process.wait()
    with suppress(BrokenPipeError):
        process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess] - it is PIPE


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> list[psutil.Process]:
    """Signal the run's process group. Return its processes, some of which may be in others."""
    try:
        steps = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        steps = []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    return steps


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def pipeline_arguments(settings: Settings, once: Tree) -> Tree:
    """KFP accepts no None."""
    sections = set(RunSettings.model_fields) - {"store", "target"}
    return {
        "store": settings.store_uri,
        "target": settings.target,
        "started_by": os.environ.get(STARTED_BY_VARIABLE) or whoami(),
        "settings": settings.model_dump(mode="json", include=sections, exclude_none=True)
        | {"workdir": str(settings.workdir.resolve()), **once},
    }


def last_outcome(workdir: Path) -> RunOutcome | None:
    """The outcome of the last run in ``workdir`` that is not in progress, or None before the
    first."""
    running = progress(workdir)
    directories = run_directories(workdir) if (workdir / "runs").is_dir() else []
    ended = [each for each in directories if running is None or str(each) != running.directory]
    if not ended:
        return None
    for path in ended[-1].glob("*/notify/outcome*"):
        return RunOutcome.load(path)
    return RunOutcome(run=ended[-1].name, state="stopped", reasons=(_UNENDED,))


def _result(directory: Path, steps_s: dict[str, float], wall_s: float) -> RunResult:
    paths = {
        f"{artifact.parent.name}.{artifact.name.partition('.')[0]}": str(artifact)
        for artifact in sorted(directory.glob("*/*/*"))
        if artifact.name != "executor_output.json"
    }
    outcome = RunOutcome.load(Path(paths["notify.outcome"]))
    return RunResult(
        release=outcome.release,
        promoted=outcome.state == "promoted",
        state=outcome.state,
        summary=outcome.without_reasons(),
        candidate=outcome.candidate,
        gate_settings=outcome.gate_settings,
        next_steps=outcome.next_steps(),
        page=str(directory / PAGE_FILE),
        reasons=outcome.reasons,
        metrics=outcome.metrics,
        paths={"log": str(directory / "log.txt"), **paths},
        steps_s=steps_s,
        wall_s=wall_s,
    )
