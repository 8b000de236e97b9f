"""The record of a pipeline run in the object store.

Kubeflow Pipelines does not save the error message of a failed task, does not report who
stopped a run, and passes no artifacts to the exit step. Each step therefore records its
own state::

    runs/<run>/steps/<step>.json    the last state of a step, with its progress or its error
    runs/<run>/stop.json            the person who stopped the run, and the time
    runs/<run>/<name>.json          data of a step for the exit step, such as the verdict
    runs/<run>/run.html             the run page (`evernear.reporting.page`)
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel

from evernear.common.frozen import Frozen
from evernear.common.masking import mask
from evernear.common.store import Store
from evernear.errors import IntegrityError

RUNS = "runs/"
STARTING = "starting"
"""The folder under `RUNS` with the locks of runs that are being started. It is not a run."""
EXIT_STEP = "notify"
"""The last step of every run, including failed runs."""
OUTCOME = "outcome"
"""The name of the last document that a run records (`evernear.reporting.notify`)."""
ABANDONED_AFTER = timedelta(days=7)
"""Time without a write to the store after which a run on a different machine counts as killed."""
RUNNER_VARIABLE = "_EVERNEAR_RUNNER"
"""The ID of the process that runs the steps of a local run. This variable is not set for steps in a
cluster."""
Document = TypeVar("Document", bound=Frozen)


class StepProgress(Frozen):
    """The progress of a running step."""

    at: AwareDatetime
    message: str
    done: int | None = None
    """Number of completed units of work, such as images, or None if the step does not count
    them."""
    total: int | None = None
    left_s: float | None = None
    """Estimated time left, or None if it is unknown."""


class StepRecord(Frozen):
    """The last recorded state of one step. A retry overwrites the state of the previous attempt."""

    step: str
    state: Literal["running", "finished", "failed"]
    message: str = ""
    """The summary of a finished step, or the error of a failed step."""
    exit_code: int = 0
    started: AwareDatetime
    ended: AwareDatetime | None = None
    peak_memory_bytes: int = 0
    """The peak resident set size of the step's process or of a child process. 0 while the step
    runs."""
    cpu_s: float = 0.0
    """CPU time of the step's process and its children. 0 while the step runs."""
    cpu_limit: float | None = None
    """CPU limit of the step's container, or None if no limit is set."""
    memory_limit_bytes: float | None = None
    """Memory limit of the step's container, or None if no limit is set."""
    gpus: int = 0
    """Number of GPUs that the step could use. 0 if the step did not load PyTorch."""
    host: str = ""
    """The value that `this_host` returned in the step."""
    process: int | None = None
    """The ID of the step's process on its host."""
    runner: int | None = None
    """The ID of the process that runs the steps of a local run, on the same host."""
    progress: StepProgress | None = None
    """The most recent progress that a running step recorded, up to a few seconds ago.

    None before the first progress report and after the end of the step.
    """

    @classmethod
    def of_this_process(cls, step: str, started: datetime) -> "StepRecord":
        """The record of a step that this process runs."""
        runner = os.environ.get(RUNNER_VARIABLE)
        return cls(
            step=step,
            state="running",
            started=started,
            host=this_host(),
            process=os.getpid(),
            runner=int(runner) if runner else None,
        )


class StopRecord(Frozen):
    """A request to stop a run."""

    by: str
    at: AwareDatetime


def this_host() -> str:
    """The name of this host, and on Linux also the number of this process's PID namespace."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def may_be_active(steps: Sequence[StepRecord], *, is_recent: bool) -> bool:
    """Whether a run with these steps is or may be in progress.

    For steps on a different machine, the result is ``is_recent``.
    """
    if not steps or (steps[-1].step == EXIT_STEP and steps[-1].state != "running"):
        return False  # earlier steps whose state is "running" were killed
    if any(step.host != this_host() for step in steps):
        return is_recent
    return any(
        _is_alive(step.runner, step) or (step.state == "running" and _is_alive(step.process, step)) for step in steps
    )


def _is_alive(process: int | None, step: StepRecord) -> bool:
    """Whether ``process`` is running on this machine and belongs to ``step``. A process that
    started after ``step`` has reused the process ID."""
    import psutil  # steps do not need it

    with suppress(psutil.NoSuchProcess):
        return process is not None and psutil.Process(process).create_time() < step.started.timestamp() + 1
    return False


class RunRecord:
    """The record of one run.

    Every method raises `StoreError` if the store fails, and `IntegrityError` if an object is
    damaged.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.store = store

    def save_step(self, record: StepRecord) -> None:
        """Record the state of a step."""
        self.store.put(self._key(f"steps/{record.step}"), record.to_json())

    def steps(self) -> tuple[StepRecord, ...]:
        """The recorded steps, in start order."""
        keys = [info.key for info in self.store.list(f"{RUNS}{self.run}/steps/")]
        records = [StepRecord.from_json(self.store.get(key), key) for key in keys]
        return tuple(sorted(records, key=lambda record: record.started))

    def save_stop(self, by: str, at: datetime) -> None:
        """Record a request to stop the run. Call this before stopping it."""
        self.store.put(self._key("stop"), StopRecord(by=by, at=at).to_json())

    def save(self, **documents: Mapping[str, Any] | BaseModel | None) -> None:
        """Record JSON documents by name. Documents that are None are skipped.

        Secrets are masked, because everyone who has read access to the store can read the document.
        """
        for name, document in documents.items():
            if document is not None:
                tree = document.model_dump(mode="json") if isinstance(document, BaseModel) else document
                self.store.put(self._key(name), mask(json.dumps(tree, indent=2)).encode())

    def load(self, name: str) -> dict[str, Any]:
        """The JSON document ``name``, or an empty dict if it was not recorded."""
        key = self._key(name)
        entry = self.store.find(key)
        try:
            return json.loads(entry[0]) if entry else {}
        except ValueError:
            raise IntegrityError(f"{key} in {self.store.uri} is empty or no JSON document; delete it.") from None

    def find(self, name: str, model: type[Document]) -> Document | None:
        """The document ``name`` as a ``model``, or None if it was not recorded."""
        key = self._key(name)
        entry = self.store.find(key)
        return model.from_json(entry[0], key) if entry else None

    def put(self, name: str, data: bytes) -> None:
        """Record a file."""
        self.store.put(f"{RUNS}{self.run}/{name}", data)

    def get(self, name: str) -> bytes | None:
        """The file ``name``, or None if it was not recorded."""
        entry = self.store.find(f"{RUNS}{self.run}/{name}")
        return entry[0] if entry else None

    def _key(self, name: str) -> str:
        return f"{RUNS}{self.run}/{name}.json"
