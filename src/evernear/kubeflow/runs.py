"""Data classes for the runs of a Kubeflow Pipelines server."""

from enum import StrEnum
from typing import Any

from pydantic import AwareDatetime

from evernear.common.frozen import Frozen

KINDS: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": (bool,),
    "LIST": (list, tuple),
    "STRUCT": (dict,),
}
"""The Python types of parameter values, keyed by KFP type."""


class State(StrEnum):
    """State of a run or step. The values are KFP's runtime states in lower case."""

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
        """Whether the state will not change again."""
        return self in (State.SUCCEEDED, State.SKIPPED, State.FAILED, State.CANCELED)


class KfpStep(Frozen):
    """One task of a run."""

    name: str
    state: State
    started: AwareDatetime | None = None
    ended: AwareDatetime | None = None
    error: str = ""


class Run(Frozen):
    """One run of a pipeline."""

    id: str
    """KFP's run ID, which is also the name of the run's record in the store (see
    `evernear.common.run_record`)."""
    name: str
    pipeline: str
    pipeline_version: str
    state: State
    created: AwareDatetime
    ended: AwareDatetime | None = None
    parameters: dict[str, Any] = {}
    key: str = ""
    """The idempotency key with which the run was started."""
    error: str = ""
    url: str = ""
    """The URL of the run's page in the KFP UI, or an empty string if the UI's URL is unknown."""
    steps: tuple[KfpStep, ...] = ()
    """Steps in start order. Only `evernear.kubeflow.client.KfpRuns.show` sets the steps."""


class Parameter(Frozen):
    """An input of a pipeline."""

    name: str
    type: str
    """KFP's type name: STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, STRUCT or LIST."""
    default: Any = None
    description: str = ""
    required: bool = False
    """Whether each run must set the parameter because the parameter has no default."""

    def accepts(self, value: object) -> bool:
        """Whether ``value`` has the type of the parameter."""
        return isinstance(value, KINDS.get(self.type, ())) and (self.type == "BOOLEAN" or not isinstance(value, bool))
