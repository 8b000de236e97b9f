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

from evernear.common.run_record import RunRecord
from evernear.common.store import Store
from evernear.errors import ConflictError, StoreError
from evernear.kubeflow.runs import from_settings, outcome_of, to_start
from evernear.reporting.notify import load_outcome
from evernear.settings import Settings
from evernear.triggers.requests import POLICY, TRAINING, WATCHER, Request, RequestStore
from evernear.triggers.watch.decide import DRIFT, Cause, WatchDecision
from evernear.triggers.watch.observe import Observation

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

_CLOCK_TOLERANCE = timedelta(hours=1)
"""Largest tolerated difference between the clocks of several watchers."""
_PIPELINES = {"retrain": TRAINING, "reindex": "reindex"}
_ENDINGS = {"failed": "failed", "stopped": "was stopped", "rolled back": "was rolled back"}


@dataclass(frozen=True)
class Proposer:
    """Proposes one ``decision`` about one store. ``runs`` is None if no pipeline server is
    configured."""

    settings: Settings
    store: Store
    requests: RequestStore
    runs: "KfpRuns | None"
    decision: WatchDecision
    observation: Observation
    now: datetime

    def act(self, watcher_id: str) -> tuple[Request | None, str]:
        """Propose the decision or start its run. Returns the request, or the reason why none is
        made.

        ``watcher_id`` identifies the store.

        Raises:
            StoreError: the store is unavailable.
            PipelineServerError: the pipeline server is unavailable, so it is unknown
                whether runs are active. An accepted request stays accepted, and the
                next check starts its run.
        """
        # The id is computed before the requests are read, so that a proposal that a different
        # watcher adds in the meantime has the same id.
        request_id = _next_id(self.requests.ids(), watcher_id)
        requests = [self._expire(request) for request in self.requests.list() if request.is_proposal]
        requests = [self._start(request) for request in requests]
        if self.decision.action == "nothing":
            return None, ""
        if pending := [request for request in requests if request.state == "pending"]:
            return None, self._update(pending[-1])
        if reason := self._held_back(requests):
            return None, reason
        by_policy = self.settings.watch.policy == "start" and not self.decision.for_a_person
        request = Request(
            id=request_id,
            state="accepted" if by_policy else "pending",
            created=self.now,
            asked_by=WATCHER,
            answered_by=POLICY if by_policy else None,
            answered=self.now if by_policy else None,
            pipeline=self._pipeline,
            parameters={"source": self.observation.source} if self.observation.source else {},
            champion=self.observation.champion,
            **self._content(),
        )
        try:
            self.requests.add(request)
        except ConflictError:
            return None, "Another watcher proposed it first."
        return self._start(request), ""

    def _expire(self, request: Request) -> Request:
        """Mark a pending request as expired if its causes are gone, or if a release or a larger
        proposal replaces it."""
        if request.state != "pending":
            return request
        since = self.observation.champion_since
        promoted = since is not None and request.created < since <= self.now
        superseded = self.decision.action == "retrain" and request.pipeline != TRAINING
        obsolete = not self._lasts(request) and not self.observation.faults
        if promoted or superseded or obsolete or request.is_expired(self.now) or self._is_ahead(request):
            return self._change(request, state="expired")
        return request

    def _lasts(self, request: Request) -> bool:
        """Whether a cause of ``request`` was observed, or detected recently by a test, which may
        miss it in one check."""
        if any(_covers(request, cause) for cause in self.decision.causes):
            return True
        return DRIFT in request.causes and self.now - (request.seen or request.created) < self._cooldown

    def _update(self, request: Request) -> str:
        """Update a pending proposal whose causes have grown. Returns the reason why no second one
        is made."""
        causes, figures = self.decision.causes, self.decision.figures
        if request.pipeline == self._pipeline:
            if any(not _covers(request, cause) or cause.is_worse(figures, request.figures) for cause in causes):
                self._change(request, grown=request.grown + 1, **self._content())
                return f"Proposal {request.id} waits for an answer, and has grown."
            if any(cause.name == DRIFT for cause in causes):
                self._change(request, seen=self.now)
        return f"Proposal {request.id} waits for an answer."

    def _held_back(self, requests: Sequence[Request]) -> str:
        """The reason why nothing is proposed now, or an empty string."""
        if accepted := [request.id for request in requests if request.state == "accepted"]:
            return f"Proposal {accepted[-1]} is accepted, and its run is about to start."
        newest = [run for name in _PIPELINES.values() for run in (self.runs.list(name) if self.runs else ())]
        if active := next((run for run in newest if not run.state.is_final), None):
            return f"Run {active.name} of {active.pipeline} is {active.state}."
        figures = self.decision.figures
        requests = [request for request in requests if not self._is_ahead(request)]
        declined = [r for r in requests if r.state == "declined" and not self._has_new_champion(r)]
        answers = [
            (cause, [r.id for r in declined if _covers(r, cause) and not cause.is_worse(figures, r.figures)])
            for cause in self.decision.causes
        ]
        causes = [cause for cause, ids in answers if not ids]
        if not causes:
            proposals = " and ".join(sorted({ids[-1] for _, ids in answers}))
            return f"Declined in proposal {proposals}; proposed again when it is worse or another release is live."
        requests = [r for r in requests if r.pipeline == self._pipeline]
        earlier = [r for r in requests if any(_covers(r, cause) for cause in causes)]
        if not earlier or any(cause.is_worse(figures, earlier[-1].figures) for cause in causes):
            return ""
        last = earlier[-1]
        until = (last.answered or last.created) + self._cooldown
        if self.now < until:
            return (
                f"Proposal {last.id} was {last.state}; it may be proposed again after {until:%Y-%m-%d %H:%M} UTC,"
                " or earlier if the figures grow."
            )
        return self._without_release(last)

    def _without_release(self, request: Request) -> str:
        """The reason not to repeat a run that did not lead to a release, or an empty string.

        A run that failed, was stopped or was killed would end in the same way until something
        changes, unless its ingest only could not read a file or the store.
        """
        if not request.run or self._has_new_champion(request):
            return ""
        newest = self.runs.list(request.pipeline) if self.runs else ()
        run = next((run for run in newest if run.id == request.run), None)
        outcome = outcome_of(self.store, run) if run else load_outcome(self.store, request.run)
        if outcome is not None and outcome.state == "held":
            return f"The gate held the run of proposal {request.id}, and too few new images have been added since."
        if (changes := self.observation.changes) and changes.gallery.listing != request.listing:
            return ""
        steps = RunRecord(self.store, request.run).steps()
        if any((step.step, step.exit_code) == ("ingest", StoreError.exit_code) for step in steps):
            return ""
        ended = _ENDINGS.get(outcome.state if outcome else "", "led to no release")
        return (
            f"The run of proposal {request.id} {ended}, and nothing has changed in the source since. Mend the cause,"
            " then start the run yourself."
        )

    def _start(self, request: Request) -> Request:
        """Start the run that the policy accepted.

        The request's id is the idempotency key of the run, so that a repeated start finds the first
        run.
        """
        if self.runs is None or request.state != "accepted" or request.answered_by != POLICY:
            return request
        known = self.runs.parameters(request.pipeline)
        ours = from_settings(self.settings, known)
        # No person approved this run, so a person must decide on a release whose losses the gate
        # could not detect.
        unattended = {"settings": {"gate": {"on_undetected_loss": "hold"}}}
        started_by = f"the watcher, proposal {request.id}"
        parameters = to_start(request.pipeline, known, started_by, unattended, ours, request.parameters)
        run = self.runs.start(request.pipeline, parameters, request.key, self.store)
        return self._change(request, state="started", run=run.id)

    def _change(self, request: Request, **fields: object) -> Request:
        try:
            return self.requests.change(request, **fields)
        except ConflictError:  # an answer or another watcher changed it first
            return self.requests.find(request.id) or request

    def _content(self) -> dict[str, Any]:
        """The fields that are updated when a request grows."""
        return {
            "causes": tuple(cause.name for cause in self.decision.causes),
            "reasons": self.decision.reasons,
            "figures": self.decision.figures,
            "listing": self.observation.changes.gallery.listing if self.observation.changes else "",
            "seen": self.now,
        }

    @property
    def _pipeline(self) -> str:
        return _PIPELINES[self.decision.action]

    @property
    def _cooldown(self) -> timedelta:
        return timedelta(seconds=self.settings.watch.cooldown_s)

    def _has_new_champion(self, request: Request) -> bool:
        """Whether the live release has changed since the request was made."""
        return self.observation.champion != request.champion

    def _is_ahead(self, request: Request) -> bool:
        """Whether the date of the request or of its answer comes from a wrong clock."""
        return max(request.created, request.answered or request.created) > self.now + _CLOCK_TOLERANCE


def _covers(request: Request, cause: Cause) -> bool:
    """Whether ``request`` names ``cause``."""
    return cause.name in request.causes


def _next_id(ids: Sequence[str], watcher_id: str) -> str:
    """The id of the next request. The id depends only on the earlier requests and the store.

    Concurrent watchers of one store therefore compute the same id.
    """
    numbers = [int(match[1]) for request_id in ids if (match := re.fullmatch(r"(\d{6})-\w+", request_id))]
    return f"{max(numbers, default=0) + 1:06d}-{watcher_id}"
