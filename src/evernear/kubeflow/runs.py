"""Runs of a Kubeflow Pipelines server, as plain data."""

from enum import StrEnum
from typing import Any

from pydantic import AwareDatetime

from evernear.frozen import Frozen


class State(StrEnum):
    """Of a run or of one of its steps; KFP's runtime states, in small letters."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELING = "canceling"
    CANCELED = "canceled"
    PAUSED = "paused"

    @property
    def is_final(self) -> bool:
        """Whether nothing will follow."""
        return self in (State.SUCCEEDED, State.SKIPPED, State.FAILED, State.CANCELED)


class Step(Frozen):
    """One task of a run."""

    name: str
    state: State
    started: AwareDatetime | None = None
    ended: AwareDatetime | None = None
    error: str = ""


class Run(Frozen):
    """One run of a pipeline."""

    id: str
    """KFP's run id; also the folder of its outcome in the store, see `evernear.reporting.notify`."""
    name: str
    pipeline: str
    pipeline_version: str
    state: State
    created: AwareDatetime
    ended: AwareDatetime | None = None
    parameters: dict[str, Any] = {}
    key: str = ""
    """The idempotency key that it was started with."""
    error: str = ""
    url: str = ""
    """The run's page in the KFP UI; empty where that is not known."""
    steps: tuple[Step, ...] = ()
    """In the order they started; only `evernear.kubeflow.client.KfpRuns.show` fills it."""


class Parameter(Frozen):
    """An input of a pipeline."""

    name: str
    type: str
    """KFP's word for it: STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, STRUCT, LIST."""
    default: Any = None
    description: str = ""
    required: bool = False
    """There is no default: a run must be given a value."""
