"""Propose a decision, or start its run, only once.

A cause has at most one open proposal. The proposal grows with the cause, and stays open as long as
the cause lasts. A declined cause leads to a new proposal only if the cause has become worse, or if
a different release is live.

The requests in the store are the watcher's only memory. The id of the next request is derived from
the earlier requests. If two watchers run concurrently, one of them creates the request, and the
other gets a conflict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from evernear.common.store import Store
from evernear.errors import ConflictError
from evernear.kubeflow.runs import combine, from_settings
from evernear.reporting.notify import load_outcome
from evernear.settings import Settings
from evernear.triggers.requests import POLICY, TRAINING, WATCHER, Request, RequestStore
from evernear.triggers.watch.decide import DRIFT, Cause, WatchDecision
from evernear.triggers.watch.observe import Observation

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

_CLOCK_TOLERANCE = timedelta(hours=1)
"""Largest tolerated difference between the clocks of several watchers."""
_TESTED = {DRIFT}
"""Causes that a statistical test detects. A check may miss such a cause although the cause
lasts."""
_PIPELINES = {"retrain": TRAINING, "reindex": "reindex"}


@dataclass(frozen=True)
class Outcome:
    """The request that resulted from a decision, or the reason why no request was made."""

    request: Request | None = None
    reason: str = ""


class ProposalService:
    """Executes decisions about one store. ``runs`` is None if no pipeline server is configured."""

    def __init__(self, settings: Settings, store: Store, runs: "KfpRuns | None") -> None:
        self._settings = settings
        self._store = store
        self._runs = runs
        self._requests = RequestStore(store)
        self._cooldown = timedelta(seconds=settings.watch.cooldown_s)

    def act(self, decision: WatchDecision, observation: Observation, watcher_id: str, now: datetime) -> Outcome:
        """Propose the decision or start its run, unless there is a reason not to.

        ``watcher_id`` identifies the store.

        Raises:
            StoreError: the store is unavailable.
            PipelineServerError: the pipeline server is unavailable, so it is unknown
                whether runs are active. An accepted request stays accepted, and the
                next check starts its run.
        """
        # The id is computed before the requests are read, so that a proposal that a different
        # watcher adds in the meantime has the same id.
        request_id = _next_id(self._requests.ids(), watcher_id)
        requests = [request for request in self._requests.list() if request.is_proposal]
        requests = [self._expire(request, decision, observation, now) for request in requests]
        requests = [self._start(request) for request in requests]
        if decision.action == "nothing":
            return Outcome()
        pipeline = _PIPELINES[decision.action]
        if pending := [request for request in requests if request.state == "pending"]:
            return Outcome(reason=self._update(pending[-1], decision, observation, now))
        reason = self._held_back(decision, pipeline, requests, observation, now)
        if reason:
            return Outcome(reason=reason)
        by_policy = self._settings.watch.policy == "start" and not decision.for_a_person
        request = Request(
            id=request_id,
            state="accepted" if by_policy else "pending",
            created=now,
            asked_by=WATCHER,
            answered_by=POLICY if by_policy else None,
            answered=now if by_policy else None,
            pipeline=pipeline,
            parameters={"source": observation.source} if observation.source else {},
            champion=observation.champion,
            **_content(decision, observation, now),
        )
        try:
            self._requests.add(request)
        except ConflictError:
            return Outcome(reason="Another watcher proposed it first.")
        return Outcome(self._start(request))

    def _expire(self, request: Request, decision: WatchDecision, observation: Observation, now: datetime) -> Request:
        """Mark a pending request as expired if its causes are gone, or if a release or a larger
        proposal replaces it."""
        if request.state != "pending":
            return request
        promoted = observation.champion_since is not None and request.created < observation.champion_since <= now
        superseded = decision.action == "retrain" and request.pipeline != TRAINING
        obsolete = not self._lasts(request, decision, now) and not observation.faults
        if not (promoted or superseded or obsolete or request.is_expired(now) or _is_ahead(request, now)):
            return request
        return self._change(request, state="expired")

    def _lasts(self, request: Request, decision: WatchDecision, now: datetime) -> bool:
        """Whether a cause of ``request`` still exists, which means that the cause was observed or
        that a test detected it recently.

        A test may miss a cause that it detected before.
        """
        if any(_covers(request, cause) for cause in decision.causes):
            return True
        return bool(_TESTED & set(request.causes)) and now - (request.seen or request.created) < self._cooldown

    def _update(self, request: Request, decision: WatchDecision, observation: Observation, now: datetime) -> str:
        """If the causes of a pending proposal have grown, update the proposal. Returns the reason
        why no second proposal is made."""
        if request.pipeline == _PIPELINES[decision.action]:
            if any(not _covers(request, c) or c.is_worse(decision.figures, request.figures) for c in decision.causes):
                self._change(request, grown=request.grown + 1, **_content(decision, observation, now))
                return f"Proposal {request.id} waits for an answer, and has grown."
            if _TESTED & {cause.name for cause in decision.causes}:
                self._change(request, seen=now)
        return f"Proposal {request.id} waits for an answer."

    def _held_back(
        self,
        decision: WatchDecision,
        pipeline: str,
        requests: Sequence[Request],
        observation: Observation,
        now: datetime,
    ) -> str:
        """The reason why nothing is proposed now, or an empty string if there is no reason."""
        if accepted := [request.id for request in requests if request.state == "accepted"]:
            return f"Proposal {accepted[-1]} is accepted, and its run is about to start."
        if self._runs:
            newest = [run for name in _PIPELINES.values() for run in self._runs.list(name)]
            if active := [run for run in newest if not run.state.is_final]:
                return f"Run {active[0].name} of {active[0].pipeline} is {active[0].state}."
        requests = [request for request in requests if not _is_ahead(request, now)]
        declined = [r for r in requests if r.state == "declined" and not _has_new_champion(r, observation)]
        answers = {cause.name: _declined(cause, decision, declined) for cause in decision.causes}
        causes = [cause for cause in decision.causes if answers[cause.name] is None]
        if not causes:
            proposals = sorted({request.id for request in answers.values() if request})
            return (
                f"Declined in proposal {' and '.join(proposals)}; proposed again when it is worse or another release is"
                " live."
            )
        earlier = [r for r in requests if r.pipeline == pipeline and any(_covers(r, cause) for cause in causes)]
        if not earlier or any(cause.is_worse(decision.figures, earlier[-1].figures) for cause in causes):
            return ""
        last = earlier[-1]
        until = (last.answered or last.created) + self._cooldown
        if now < until:
            return (
                f"Proposal {last.id} was {last.state}; it may be proposed again after {until:%Y-%m-%d %H:%M} UTC,"
                " or earlier if the figures grow."
            )
        return self._without_release(last, observation)

    def _without_release(self, request: Request, observation: Observation) -> str:
        """The reason not to repeat a run that did not lead to a release, or an empty string if
        there is no reason.

        A run that failed, was stopped or was killed would end in the same way until something
        changes.
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
        """Start the run that the policy accepted.

        The request's id is the idempotency key of the run, so that a repeated start finds the first
        run.
        """
        if self._runs is None or request.state != "accepted" or request.answered_by != POLICY:
            return request
        ours = from_settings(self._settings, self._runs.parameters(request.pipeline))
        # No person approved this run, so a person must decide on a release whose losses the gate
        # could not detect.
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


def _content(decision: WatchDecision, observation: Observation, now: datetime) -> dict[str, Any]:
    """The fields that are updated when a request grows."""
    return {
        "causes": tuple(cause.name for cause in decision.causes),
        "reasons": decision.reasons,
        "figures": decision.figures,
        "listing": observation.changes.listing if observation.changes else "",
        "seen": now,
    }


def _covers(request: Request, cause: Cause) -> bool:
    """Whether ``request`` names ``cause``."""
    return cause.name in request.causes


def _declined(cause: Cause, decision: WatchDecision, declined: Sequence[Request]) -> Request | None:
    """The request in which ``cause`` was declined at about the same size, or None."""
    for request in reversed(declined):
        if _covers(request, cause) and not cause.is_worse(decision.figures, request.figures):
            return request
    return None


def _has_new_champion(request: Request, observation: Observation) -> bool:
    """Whether the live release has changed since the request was made."""
    return observation.champion != request.champion


def _is_ahead(request: Request, now: datetime) -> bool:
    """Whether the date of the request or of its answer comes from a wrong clock."""
    return max(request.created, request.answered or request.created) > now + _CLOCK_TOLERANCE


def _next_id(ids: Sequence[str], watcher_id: str) -> str:
    """The id of the next request. The id depends only on the earlier requests and the store.

    Concurrent watchers of one store therefore compute the same id.
    """
    numbers = [int(match[1]) for request_id in ids if (match := re.fullmatch(r"(\d{6})-\w+", request_id))]
    return f"{max(numbers, default=0) + 1:06d}-{watcher_id}"
