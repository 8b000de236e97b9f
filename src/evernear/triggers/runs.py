"""Pipeline runs as the triggers see them. `pipelines.client.KfpRuns` is what stands behind this in a cluster.

kfp is imported only under ``components/`` and ``pipelines/``, so here is just what the triggers need of it.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from pydantic import AwareDatetime, BaseModel, ConfigDict


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


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True)


class Step(_Told):
    """One task of a run."""

    name: str
    state: State
    started: AwareDatetime | None = None
    ended: AwareDatetime | None = None
    error: str = ""


class Run(_Told):
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
    """In the order they started; only `Runs.show` fills it."""


class Parameter(_Told):
    """An input of a pipeline."""

    name: str
    type: str
    """KFP's word for it: STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, STRUCT, LIST."""
    default: Any = None
    description: str = ""
    required: bool = False
    """There is no default: a run must be given a value."""


class Runs(Protocol):
    """The runs of one pipeline server.

    Every method raises `evernear.errors.PipelineServerError` where the server cannot be reached or refuses.
    """

    def parameters(self, pipeline: str) -> Sequence[Parameter]:
        """The parameters of the pipeline's pinned (newest published) version."""
        ...

    def start(self, pipeline: str, parameters: Mapping[str, Any], key: str) -> Run:
        """Start the pinned version of ``pipeline``; a second start with the same ``key`` returns the first's run.

        Raises:
            SettingsError: a parameter is unknown or of the wrong type.
        """
        ...

    def show(self, run_id: str) -> Run:
        """A run with its steps."""
        ...

    def list(self, pipeline: str | None = None, limit: int = 10, since: datetime | None = None) -> Sequence[Run]:
        """The newest runs first, without steps."""
        ...

    def stop(self, run_id: str) -> None:
        """Ask a run to end; one that has ended already is left alone."""
        ...
