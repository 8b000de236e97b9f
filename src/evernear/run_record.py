"""What a pipeline run records about itself in the object store, for whoever looks at it from outside.

Kubeflow Pipelines keeps no error message of a failed task, does not say who stopped a run, and hands no artifacts to
the exit step. So each step records its own state::

    runs/<run>/steps/<step>.json    the last state of a step, with its error
    runs/<run>/stop.json            who asked the run to stop
    runs/<run>/<name>.json          what a step leaves for the exit step, such as the verdict
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ValidationError

from evernear.errors import IntegrityError
from evernear.frozen import Frozen
from evernear.store import Store

Model = TypeVar("Model", bound=BaseModel)


class StepRecord(Frozen):
    """The last recorded state of one step. A retried step overwrites the state of the attempt before."""

    step: str
    state: Literal["running", "finished", "failed"]
    message: str = ""
    """The summary of a finished step, the error of a failed one."""
    exit_code: int = 0
    started: AwareDatetime
    ended: AwareDatetime | None = None


class StopRecord(Frozen):
    """A request to stop a run."""

    by: str
    at: AwareDatetime


class RunRecord:
    """The record of one run. Every method may raise `StoreError`, and `IntegrityError` for a damaged object."""

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.store = store

    def save_step(self, record: StepRecord) -> None:
        """Record the state of a step."""
        self.store.put(self._key(f"steps/{record.step}"), record.model_dump_json(indent=2).encode())

    def steps(self) -> tuple[StepRecord, ...]:
        """The recorded steps in the order they started."""
        found = [
            _parse(StepRecord, self.store.get(info.key), info.key)
            for info in self.store.list(f"runs/{self.run}/steps/")
        ]
        return tuple(sorted(found, key=lambda record: record.started))

    def save_stop(self, by: str, at: datetime) -> None:
        """Record who asks the run to stop, before it is asked."""
        self.store.put(self._key("stop"), StopRecord(by=by, at=at).model_dump_json().encode())

    def stop(self) -> StopRecord | None:
        """The request to stop the run, if there was one."""
        key = self._key("stop")
        found = self.store.find(key)
        return _parse(StopRecord, found[0], key) if found else None

    def save(self, **documents: Mapping[str, Any]) -> None:
        """Record JSON documents, each under its name."""
        for name, document in documents.items():
            self.store.put(self._key(name), json.dumps(document, indent=2).encode())

    def load(self, name: str) -> dict[str, Any]:
        """The JSON document ``name``; empty if it was not recorded."""
        found = self.store.find(self._key(name))
        return json.loads(found[0]) if found else {}

    def _key(self, name: str) -> str:
        return f"runs/{self.run}/{name}.json"


def _parse(model: type[Model], data: bytes, key: str) -> Model:
    try:
        return model.model_validate_json(data)
    except ValidationError:
        raise IntegrityError(f"{key} is damaged.") from None
