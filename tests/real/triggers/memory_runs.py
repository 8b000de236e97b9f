"""A pipeline server in memory, with the interface of `evernear.kubeflow.client.KfpRuns`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from evernear.common.store import Store
from evernear.errors import PipelineServerError
from evernear.kubeflow.runs import Parameter, Run, State


class RunsInMemory:
    """Its pipelines take ``parameters``; a new run is in ``state``."""

    def __init__(self, parameters: Sequence[Parameter], created: datetime, state: State) -> None:
        self._parameters, self._created, self._state = parameters, created, state
        self.started: dict[str, Run] = {}
        """By key."""
        self.stopped: list[str] = []
        self.is_down = False
        self.lost_answers = 0
        """Number of starts whose response is lost."""

    @property
    def runs(self) -> Sequence[Run]:
        """Oldest first."""
        return [*self.started.values()]

    def parameters(self, pipeline: str) -> Sequence[Parameter]:
        self._reach()
        return self._parameters

    def start(self, pipeline: str, parameters: Mapping[str, Any], key: str, store: Store | None = None) -> Run:
        self._reach()
        if key not in self.started:
            number = len(self.started) + 1
            self.started[key] = Run(
                id=f"{number:08d}-0000-4000-8000-000000000000",
                name=f"{pipeline} {number}",
                pipeline=pipeline,
                pipeline_version="c0ffee1",
                state=self._state,
                created=self._created,
                parameters=dict(parameters),
                key=key,
                url=f"https://kubeflow.example/#/runs/details/{number}",
            )
            if self.lost_answers:
                self.lost_answers -= 1
                raise PipelineServerError("KFP broke off.")
        return self.started[key]

    def show(self, run_id: str) -> Run:
        self._reach()
        return next(run for run in self.runs if run.id == run_id)

    def list(self, pipeline: str | None = None, limit: int = 10, since: datetime | None = None) -> Sequence[Run]:
        self._reach()
        return [run for run in reversed(self.runs) if pipeline in (None, run.pipeline)][:limit]

    def stop(self, run_id: str) -> None:
        self._reach()
        self.stopped.append(run_id)

    def end(self, run_id: str, state: State = State.SUCCEEDED) -> None:
        run = self.show(run_id)
        self.started[run.key] = run.model_copy(update={"state": state})

    def _reach(self) -> None:
        if self.is_down:
            raise PipelineServerError("Kubeflow Pipelines at http://kfp.example cannot be reached.")
