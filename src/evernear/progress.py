"""What every pipeline step shares: a clock for its own work, its progress, and an error of one sentence.

A step writes events as JSON lines to the file that `EVENTS_VARIABLE` names, if it names one; a local run follows
that file to show progress. In a cluster the same lines are the step's log. Its last state goes into the run's record
in the store (`evernear.run_record`).
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from evernear.errors import EvernearError, StoreError, no_space
from evernear.frozen import Frozen
from evernear.output import print_line, printable
from evernear.run_record import RunRecord, StepRecord
from evernear.store import open_store

EVENTS_VARIABLE = "_EVERNEAR_EVENTS"
TERMINATION_MESSAGE = Path("/dev/termination-log")
TERMINATION_MESSAGE_MAX_CHARACTERS = 1000
"""The kubelet reads 4,096 bytes; UTF-8 has up to four to a character."""


class Event(Frozen):
    """One line of a run's event file."""

    at: datetime
    step: str
    kind: Literal["started", "progress", "finished", "failed"]
    message: str = ""
    own_work_s: float = 0.0
    exit_code: int = 0


class Step:
    """A running step; `say` tells a person how far it is, ``summary`` what it came to."""

    def __init__(self, name: str, recorder: "_Recorder") -> None:
        self.name = name
        self.summary = ""
        self._recorder = recorder
        self._started_s = time.monotonic()

    def say(self, message: str) -> None:
        """Tell how far the step is, in a few words."""
        self.emit("progress", message)

    def emit(self, kind: Literal["started", "progress", "finished", "failed"], message: str, code: int = 0) -> None:
        """Append one event to the run's event file, to the step's log and, but for progress, to the run's record."""
        message = printable(message)
        event = Event(
            at=datetime.now(UTC),
            step=self.name,
            kind=kind,
            message=message,
            own_work_s=time.monotonic() - self._started_s,
            exit_code=code,
        )
        print_line(f"[{self.name}] {kind}: {message}")
        if path := os.environ.get(EVENTS_VARIABLE):
            with suppress(OSError), Path(path).open("a") as file:  # a full disk: the step's own sentence matters more
                file.write(event.model_dump_json() + "\n")
        self._recorder.save(event)


@contextmanager
def step(name: str, run: str, store_uri: str) -> Generator[Step]:
    """Run the body as the step ``name`` of ``run``, and record its state in the store.

    An `EvernearError` ends the process with its sentence and its exit code; anything else is a bug and keeps its
    traceback.
    """
    running = Step(name, _Recorder(run, store_uri))
    running.emit("started", "")
    try:
        yield running
    except EvernearError as error:
        running.emit("failed", str(error), error.exit_code)
        print_line(f"evernear: {error}", sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        sentence = no_space(error, error.filename or os.environ.get("TMPDIR", "/tmp"))  # noqa: S108 - only named
        if sentence is None:
            _emit_bug(running, error)
            raise
        running.emit("failed", sentence, StoreError.exit_code)
        print_line(f"evernear: {sentence}", sys.stderr)
        sys.exit(StoreError.exit_code)
    except Exception as error:
        _emit_bug(running, error)
        raise
    running.emit("finished", running.summary)
    gc.freeze()  # the interpreter's last collections would walk through all of torch, half a second in each step


def _emit_bug(running: Step, error: Exception) -> None:
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    running.emit("failed", f"evernear itself failed: {type(error).__name__}: {error} ({place}); see the log.", 1)


class _Recorder:
    """Records the states of one step. A store that cannot be written must not fail a step that does not need it."""

    def __init__(self, run: str, store_uri: str) -> None:
        self._run = run
        self._store_uri = store_uri
        self._record: RunRecord | None = None
        self._started = datetime.now(UTC)

    def save(self, event: Event) -> None:
        if event.kind == "progress":
            return
        step = StepRecord(
            step=event.step,
            state="running" if event.kind == "started" else event.kind,
            message=event.message,
            exit_code=event.exit_code,
            started=self._started,
            ended=None if event.kind == "started" else event.at,
        )
        with suppress(EvernearError):
            if event.kind == "started":
                self._record = RunRecord(open_store(self._store_uri), self._run)
            if self._record is not None:
                self._record.save_step(step)
        if event.kind == "failed":
            _explain_to_kubernetes(event.message)


def _explain_to_kubernetes(message: str) -> None:
    """Leave the error where the kubelet looks for it, so that the pod, and Argo's node, show it."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        with suppress(OSError):
            TERMINATION_MESSAGE.write_text(message[:TERMINATION_MESSAGE_MAX_CHARACTERS])


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Whole event lines of ``path`` from byte ``offset`` on, and the offset to read from next time."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [Event.model_validate(json.loads(line)) for line in whole.splitlines()], offset + len(whole)
