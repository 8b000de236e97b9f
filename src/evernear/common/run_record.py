"""The record of a pipeline run in the object store.

Kubeflow Pipelines keeps neither the error of a failed task nor who stopped a run, and passes no
artifacts to the exit step. Each step therefore records its own state::

    runs/<run>/steps/<step>.json    a step's last state, with its progress or its error
    runs/<run>/stop.json            who stopped the run, and when
    runs/<run>/<name>.json          data of a step for the exit step, such as the verdict
    runs/<run>/answers.parquet      the answer to each test image (`evaluation.answer_table`)
    runs/<run>/run.html             the run page (`evernear.reporting.page`)
    runs/<run>/left_out.csv         all files that ingest left out, each with the reason
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

from evernear.common.frozen import Document, Frozen, require_stamp, stamp
from evernear.common.masking import mask_values
from evernear.common.store import Store
from evernear.errors import IntegrityError

RUNS = "runs/"
LEFT_OUT_FILE = "left_out.csv"
STARTING = "starting"
"""The folder under `RUNS` with the locks of starting runs. It is not a run."""
EXIT_STEP = "notify"
"""The last step of every run, even a failed one."""
OUTCOME = "outcome"
"""The last document that a run records (`evernear.reporting.notify`)."""
ABANDONED_AFTER = timedelta(days=7)
"""After this time without a write to the store, a run on another machine counts as killed."""
RUNNER_VARIABLE = "_EVERNEAR_RUNNER"
"""ID of the process that runs the steps of a local run. Not set in a cluster."""
_Document = TypeVar("_Document", bound=Document)


class StepProgress(Frozen):
    at: AwareDatetime
    message: str
    done: int | None = None
    """Completed units, such as images, or None if the step does not count them."""
    total: int | None = None
    left_s: float | None = None


class StepRecord(Document):
    """A step's last recorded state. A retry overwrites that of the previous attempt."""

    step: str
    state: Literal["running", "finished", "failed"]
    message: str = ""
    exit_code: int = 0
    started: AwareDatetime
    ended: AwareDatetime | None = None
    peak_memory_bytes: int = 0
    """Peak resident set size of the step's process or of a child. 0 while the step runs."""
    cpu_s: float = 0.0
    """Includes the step's children. 0 while the step runs."""
    cpu_limit: float | None = None
    """Of the container, or None if no limit is set."""
    memory_limit_bytes: float | None = None
    """Of the container, or None if no limit is set."""
    gpus: int = 0
    """GPUs that the step could use. 0 if it did not load PyTorch."""
    host: str = ""
    """What `this_host` returned in the step."""
    process: int | None = None
    """The step's process ID on its host."""
    runner: int | None = None
    """ID of the process that runs the steps of a local run, on the same host."""
    progress: StepProgress | None = None
    """Up to a few seconds old. None before the first report and after the end."""

    @classmethod
    def of_this_process(cls, step: str, started: datetime) -> "StepRecord":
        runner = os.environ.get(RUNNER_VARIABLE)
        return cls(
            step=step,
            state="running",
            started=started,
            host=this_host(),
            process=os.getpid(),
            runner=int(runner) if runner else None,
        )


class StopRecord(Document):
    by: str
    at: AwareDatetime


def this_host() -> str:
    """The host's name, on Linux with the number of this process's PID namespace."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def may_be_active(steps: Sequence[StepRecord], *, is_recent: bool) -> bool:
    """Whether these steps may be in progress: ``is_recent`` if on another machine."""
    if not steps or (steps[-1].step == EXIT_STEP and steps[-1].state != "running"):
        return False  # earlier steps whose state is "running" were killed
    if any(step.host != this_host() for step in steps):
        return is_recent
    return any(
        _is_alive(step.runner, step) or (step.state == "running" and _is_alive(step.process, step)) for step in steps
    )


def _is_alive(process: int | None, step: StepRecord) -> bool:
    """A process that started after ``step`` has reused the process ID."""
    import psutil  # steps do not need it

    with suppress(psutil.NoSuchProcess):
        return process is not None and psutil.Process(process).create_time() < step.started.timestamp() + 1
    return False


class RunRecord:
    """Methods raise `StoreError` if the store fails, `IntegrityError` for a damaged object."""

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.store = store

    def save_step(self, record: StepRecord) -> None:
        self.store.put(self._key(f"steps/{record.step}"), record.to_json())

    def steps(self) -> tuple[StepRecord, ...]:
        keys = [info.key for info in self.store.list(f"{RUNS}{self.run}/steps/")]
        records = [StepRecord.from_json(self.store.get(key), f"{self.store.uri}/{key}") for key in keys]
        return tuple(sorted(records, key=lambda record: record.started))

    def save_stop(self, by: str, at: datetime) -> None:
        """Record a request to stop the run. Call this before stopping it."""
        self.store.put(self._key("stop"), StopRecord(by=by, at=at).to_json())

    def save(self, **documents: Mapping[str, Any] | BaseModel | None) -> None:
        """Record JSON documents by name, except those that are None. Secrets are masked, because
        everyone with read access to the store can read them."""
        for name, document in documents.items():
            if document is not None:
                tree = document.model_dump(mode="json") if isinstance(document, BaseModel) else document
                self.store.put(self._key(name), json.dumps(mask_values(stamp() | dict(tree)), indent=2).encode())

    def load(self, name: str) -> dict[str, Any]:
        """Empty if it was not recorded."""
        key = self._key(name)
        entry = self.store.find(key)
        if entry is None:
            return {}
        try:
            fields: dict[str, Any] = json.loads(entry[0])
        except ValueError:
            raise IntegrityError(f"{key} in {self.store.uri} is empty or no JSON document; delete it.") from None
        require_stamp(fields, f"{self.store.uri}/{key}")
        return {name: value for name, value in fields.items() if name not in stamp()}

    def find(self, name: str, model: type[_Document]) -> _Document | None:
        key = self._key(name)
        entry = self.store.find(key)
        return model.from_json(entry[0], f"{self.store.uri}/{key}") if entry else None

    def put(self, name: str, data: bytes | Path) -> None:
        self.store.put(f"{RUNS}{self.run}/{name}", data)

    def has(self, name: str) -> bool:
        key = f"{RUNS}{self.run}/{name}"
        return any(info.key == key for info in self.store.list(key))

    def get(self, name: str) -> bytes | None:
        entry = self.store.find(f"{RUNS}{self.run}/{name}")
        return entry[0] if entry else None

    def _key(self, name: str) -> str:
        return f"{RUNS}{self.run}/{name}.json"
