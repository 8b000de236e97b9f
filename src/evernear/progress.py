"""What every pipeline step shares: a clock for its own work, its progress, and a failure of one sentence.

A step writes events as JSON lines to the file that `EVENTS_VARIABLE` names, if it names one; a local run follows
that file to show progress. In a cluster the same lines are the step's log.
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

from pydantic import BaseModel, ConfigDict

from evernear.errors import EvernearError, StoreError, no_space

EVENTS_VARIABLE = "_EVERNEAR_EVENTS"


class Event(BaseModel):
    """One line of a run's event file."""

    model_config = ConfigDict(frozen=True)

    at: datetime
    step: str
    kind: Literal["started", "progress", "finished", "failed"]
    message: str = ""
    own_work_s: float = 0.0
    exit_code: int = 0


class Step:
    """A running step; `say` tells a person how far it is, ``summary`` what it came to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.summary = ""
        self._started_s = time.monotonic()

    def say(self, message: str) -> None:
        """Tell how far the step is, in a few words."""
        self.emit("progress", message)

    def emit(self, kind: Literal["started", "progress", "finished", "failed"], message: str, code: int = 0) -> None:
        """Append one event to the run's event file and to the step's log."""
        event = Event(
            at=datetime.now(UTC),
            step=self.name,
            kind=kind,
            message=message,
            own_work_s=time.monotonic() - self._started_s,
            exit_code=code,
        )
        print(f"[{self.name}] {kind}: {message}", flush=True)
        if path := os.environ.get(EVENTS_VARIABLE):
            with suppress(OSError), Path(path).open("a") as file:  # a full disk: the step's own sentence matters more
                file.write(event.model_dump_json() + "\n")


@contextmanager
def step(name: str) -> Generator[Step]:
    """Run the body as the pipeline step ``name``.

    An `EvernearError` ends the process with its sentence and its exit code; anything else is a fault of ours and
    keeps its traceback.
    """
    running = Step(name)
    running.emit("started", "")
    try:
        yield running
    except EvernearError as error:
        running.emit("failed", str(error), error.exit_code)
        print(f"evernear: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        sentence = no_space(error, error.filename or os.environ.get("TMPDIR", "/tmp"))  # noqa: S108 - only named
        if sentence is None:
            _emit_fault(running, error)
            raise
        running.emit("failed", sentence, StoreError.exit_code)
        print(f"evernear: {sentence}", file=sys.stderr)
        sys.exit(StoreError.exit_code)
    except Exception as error:
        _emit_fault(running, error)
        raise
    running.emit("finished", running.summary)
    gc.freeze()  # the interpreter's last collections would walk through all of torch, half a second in each step


def _emit_fault(running: Step, error: Exception) -> None:
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    running.emit("failed", f"evernear itself failed: {type(error).__name__}: {error} ({place}); see the log.", 1)


def failures() -> list[str]:
    """What the failed steps of this run said, where the run keeps an event file (a local one does)."""
    path = os.environ.get(EVENTS_VARIABLE)
    events = read_events(Path(path))[0] if path else []
    return [f"{event.step}: {event.message}" for event in events if event.kind == "failed"]


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Whole event lines of ``path`` from byte ``offset`` on, and the offset to read from next time."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [Event.model_validate(json.loads(line)) for line in whole.splitlines()], offset + len(whole)
