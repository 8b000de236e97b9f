"""The record of a pipeline run in the object store.

Kubeflow Pipelines keeps no error message of a failed task, does not report who stopped a run, and passes no artifacts
to the exit step. Each step therefore records its own state::

    runs/<run>/steps/<step>.json    the last state of a step, with its error
    runs/<run>/stop.json            who requested the run to stop, and when
    runs/<run>/<name>.json          data of a step for the exit step, such as the verdict
    runs/<run>/run.html             the run page; see `evernear.reporting.page`
"""

import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import AwareDatetime

from evernear.common.frozen import Frozen
from evernear.common.masking import mask
from evernear.common.store import Store
from evernear.errors import IntegrityError

RUNS = "runs/"
STARTING = "starting"
"""The folder of `RUNS` that has the locks of runs that are being started, and no run."""
EXIT_STEP = "notify"
"""The last step of every run, even of one that failed."""
RUNNER_VARIABLE = "_EVERNEAR_RUNNER"
"""The ID of the process that runs the steps of a local run; steps in a cluster do not have it."""
Document = TypeVar("Document", bound=Frozen)


class StepRecord(Frozen):
    """The last recorded state of one step. A retry overwrites the state of the previous attempt."""

    step: str
    state: Literal["running", "finished", "failed"]
    message: str = ""
    """The summary of a finished step, or the error of a failed one."""
    exit_code: int = 0
    started: AwareDatetime
    ended: AwareDatetime | None = None
    peak_memory_bytes: int = 0
    """The largest resident set of the step's process or of one of its children; 0 while the step runs."""
    cpu_s: float = 0.0
    """CPU time of the step's process and its children; 0 while the step runs."""
    cpu_limit: float | None = None
    """CPU limit of the step's container; None if it has none."""
    memory_limit_bytes: float | None = None
    """Memory limit of the step's container; None if it has none."""
    gpus: int = 0
    """GPUs that the step could use; 0 if it did not load PyTorch."""
    host: str = ""
    """`this_host` of the step."""
    process: int | None = None
    """The ID of the step's process on its host."""
    runner: int | None = None
    """The ID of the process that runs the steps of a local run, on the same host."""

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
    """The name of this host, and on Linux the number of the namespace in which process IDs are unique."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


class RunRecord:
    """The record of one run.

    Every method raises `StoreError` if the store fails, and `IntegrityError` for a damaged object.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.store = store

    def save_step(self, record: StepRecord) -> None:
        """Record the state of a step."""
        self.store.put(self._key(f"steps/{record.step}"), record.to_json())

    def steps(self) -> tuple[StepRecord, ...]:
        """The recorded steps in the order in which they started."""
        keys = [info.key for info in self.store.list(f"{RUNS}{self.run}/steps/")]
        records = [StepRecord.from_json(self.store.get(key), key) for key in keys]
        return tuple(sorted(records, key=lambda record: record.started))

    def save_stop(self, by: str, at: datetime) -> None:
        """Record a request to stop the run. Call this before stopping it."""
        self.store.put(self._key("stop"), StopRecord(by=by, at=at).to_json())

    def save(self, **documents: Mapping[str, Any]) -> None:
        """Record JSON documents by name, with secrets masked: whoever may read the store reads them."""
        for name, document in documents.items():
            self.store.put(self._key(name), mask(json.dumps(document, indent=2)).encode())

    def load(self, name: str) -> dict[str, Any]:
        """The JSON document ``name``; empty if it was not recorded."""
        key = self._key(name)
        entry = self.store.find(key)
        try:
            return json.loads(entry[0]) if entry else {}
        except ValueError:
            raise IntegrityError(f"{key} in {self.store.uri} is empty or no JSON document; delete it.") from None

    def find(self, name: str, model: type[Document]) -> Document | None:
        """The document ``name`` as a ``model``; None if it was not recorded."""
        key = self._key(name)
        entry = self.store.find(key)
        return model.from_json(entry[0], key) if entry else None

    def put(self, name: str, data: bytes) -> None:
        """Record a file."""
        self.store.put(f"{RUNS}{self.run}/{name}", data)

    def get(self, name: str) -> bytes | None:
        """The file ``name``; None if it was not recorded."""
        entry = self.store.find(f"{RUNS}{self.run}/{name}")
        return entry[0] if entry else None

    def _key(self, name: str) -> str:
        return f"{RUNS}{self.run}/{name}.json"
