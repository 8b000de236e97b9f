"""Propose or start what was decided, once.

The watcher's only memory is its requests in the store. The id of the next one is derived from them. Of two
concurrent watchers, one creates it and the other gets a conflict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from evernear.common.store import Store
from evernear.errors import ConflictError
from evernear.kubeflow.parameters import combine, from_settings
from evernear.reporting.notify import load_outcome
from evernear.settings import Settings
from evernear.triggers.requests import POLICY, TRAINING, WATCHER, Request, RequestStore
from evernear.triggers.watch.decide import WatchDecision
from evernear.triggers.watch.observe import Observation

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

_CLOCK_TOLERANCE = timedelta(hours=1)
"""Largest difference between the clocks of several watchers."""
_PIPELINES = {"retrain": TRAINING, "reindex": "reindex"}


@dataclass(frozen=True)
class Outcome:
    """The request that resulted from a decision, or the reason why there is none."""

    request: Request | None = None
    reason: str = ""


class ProposalService:
    """Carries out decisions about one store. ``runs`` is None without a pipeline server."""

    def __init__(self, settings: Settings, store: Store, runs: "KfpRuns | None") -> None:
        self._settings = settings
        self._store = store
        self._runs = runs
        self._requests = RequestStore(store)
        self._cooldown = timedelta(seconds=settings.watch.cooldown_s)

    def act(self, decision: WatchDecision, observation: Observation, watcher_id: str, now: datetime) -> Outcome:
        """Propose the decision or start its run, unless something prevents it; ``watcher_id`` is the store's.

        Raises:
            StoreError: the store is unavailable.
            PipelineServerError: the pipeline server is unavailable, so that active runs are unknown. An accepted
                request stays accepted, and the next check starts its run.
        """
        # Before the requests are read, so that a proposal that another watcher adds in the meantime has the same id.
        request_id = _next_id(self._requests.ids(), watcher_id)
        requests = [request for request in self._requests.list() if request.is_proposal]
        requests = [self._expire(request, decision, observation, now) for request in requests]
        requests = [self._start(request) for request in requests]
        if decision.action == "nothing":
            return Outcome()
        pipeline = _PIPELINES[decision.action]
        reason = self._held_back(decision, pipeline, requests, observation, now)
        if reason:
            return Outcome(reason=reason)
        by_policy = self._settings.watch.policy == "start" and not decision.for_a_person
        request = Request(
            id=request_id,
            state="accepted" if by_policy else "pending",
            created=now,
            expires=now + self._cooldown,
            asked_by=WATCHER,
            answered_by=POLICY if by_policy else None,
            answered=now if by_policy else None,
            pipeline=pipeline,
            parameters={"source": observation.source} if observation.source else {},
            reasons=decision.reasons,
            figures=decision.figures,
            champion=observation.champion or "",
            listing=observation.changes.listing if observation.changes else "",
        )
        try:
            self._requests.add(request)
        except ConflictError:
            return Outcome(reason="Another watcher proposed it first.")
        return Outcome(self._start(request))

    def _expire(self, request: Request, decision: WatchDecision, observation: Observation, now: datetime) -> Request:
        """Expire a pending request that no one answered in time, or whose reason no longer holds."""
        if request.state != "pending":
            return request
        promoted = observation.champion_since is not None and request.created < observation.champion_since <= now
        obsolete = decision.action == "nothing" and not observation.faults
        if not (promoted or obsolete or request.is_expired(now) or _is_ahead(request, now)):
            return request
        return self._change(request, state="expired")

    def _held_back(
        self,
        decision: WatchDecision,
        pipeline: str,
        requests: Sequence[Request],
        observation: Observation,
        now: datetime,
    ) -> str:
        """The reason why nothing is proposed now; empty if there is none."""
        if pending := [request.id for request in requests if request.state == "pending"]:
            return f"Proposal {pending[-1]} waits for an answer."
        if accepted := [request.id for request in requests if request.state == "accepted"]:
            return f"Proposal {accepted[-1]} is accepted, and its run is about to start."
        if self._runs:
            newest = [run for name in _PIPELINES.values() for run in self._runs.list(name)]
            if active := [run for run in newest if not run.state.is_final]:
                return f"Run {active[0].name} of {active[0].pipeline} is {active[0].state}."
        last = next((request for request in reversed(requests) if request.pipeline == pipeline), None)
        if last is None or _is_ahead(last, now) or decision.has_grown_since(last.figures, self._settings):
            return ""
        until = (last.answered or last.created) + self._cooldown
        if now < until:
            return (
                f"Proposal {last.id} was {last.state}; it may be proposed again after {until:%Y-%m-%d %H:%M} UTC,"
                " or earlier if the figures grow."
            )
        return self._without_release(last, observation)

    def _without_release(self, request: Request, observation: Observation) -> str:
        """The reason not to repeat a run that led to no release, however it ended; empty if there is none.

        A failed, stopped or killed run would end in the same way until something changes.
        """
        if not request.run or _has_new_champion(request, observation):
            return ""
        outcome = load_outcome(self._store, request.run)
        if outcome is not None and outcome.state == "held":
            return f"The gate held the run of proposal {request.id}, and too few new images have been added since."
        if observation.changes and observation.changes.listing != request.listing:
            return ""
        ending = {"failed": "failed", "stopped": "was stopped", "rolled back": "was rolled back"}
        ended = ending.get(outcome.state, "led to no release") if outcome else "led to no release"
        return (
            f"The run of proposal {request.id} {ended}, and nothing has changed in the source since. Mend the cause,"
            " then start the run yourself."
        )

    def _start(self, request: Request) -> Request:
        """Start the run that the policy accepted. Its id is the key, so that a repeated start finds the first run."""
        if self._runs is None or request.state != "accepted" or request.answered_by != POLICY:
            return request
        ours = from_settings(self._settings, self._runs.parameters(request.pipeline))
        # Nobody decided on this run, so a person decides on a release whose losses the gate could not detect.
        unattended = {"settings": {"gate": {"on_undetected_loss": "hold"}}}
        started_by = {"started_by": f"the watcher, proposal {request.id}"}
        parameters = combine(unattended, ours, started_by, request.parameters)
        run = self._runs.start(request.pipeline, parameters, request.key, self._store)
        return self._change(request, state="started", run=run.id)

    def _change(self, request: Request, **fields: object) -> Request:
        try:
            return self._requests.change(request, **fields)
        except ConflictError:  # an answer or another watcher changed it first
            return self._requests.find(request.id) or request


def _has_new_champion(request: Request, observation: Observation) -> bool:
    """Whether another release is live than at the time of the request."""
    if request.champion is not None:
        return observation.champion != (request.champion or None)
    return observation.champion_since is not None and observation.champion_since > request.created


def _is_ahead(request: Request, now: datetime) -> bool:
    """Whether a wrong clock dated the request or its answer."""
    return max(request.created, request.answered or request.created) > now + _CLOCK_TOLERANCE


def _next_id(ids: Sequence[str], watcher_id: str) -> str:
    """The same for all watchers that see the same requests, and different for other stores."""
    numbers = [int(match[1]) for request_id in ids if (match := re.fullmatch(r"(\d{6})-\w+", request_id))]
    return f"{max(numbers, default=0) + 1:06d}-{watcher_id}"
