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
"""The Python types of parameter values, by KFP type."""


class State(StrEnum):
    """KFP's runtime states, in lower case."""

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
        return self in (State.SUCCEEDED, State.SKIPPED, State.FAILED, State.CANCELED)


class KfpStep(Frozen):
    name: str
    state: State
    started: AwareDatetime | None = None
    ended: AwareDatetime | None = None
    error: str = ""


class Run(Frozen):
    id: str
    """KFP's run ID, also the name of its `evernear.common.run_record.RunRecord`."""
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
    """The run's page in the KFP UI, or an empty string if the UI's URL is unknown."""
    steps: tuple[KfpStep, ...] = ()
    """In start order. Only `evernear.kubeflow.client.KfpRuns.show` sets them."""


class Parameter(Frozen):
    name: str
    type: str
    """STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, STRUCT or LIST."""
    default: Any = None
    description: str = ""
    required: bool = False

    def accepts(self, value: object) -> bool:
        return isinstance(value, KINDS.get(self.type, ())) and (self.type == "BOOLEAN" or not isinstance(value, bool))
