"""Propose or start what was decided, once.

All that is remembered lies in the store as proposals. The id of the next one follows from those that are there, so of
two watchers that look at once one opens it and the other is told of a conflict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal

from evernear.errors import ConflictError
from evernear.reporting.notify import load_outcome
from evernear.settings import Settings
from evernear.store import Store
from evernear.triggers.parameters import from_settings
from evernear.triggers.proposals import Proposal, Proposals
from evernear.triggers.watch.decide import Decision
from evernear.triggers.watch.look import Sight

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

POLICY = "the watcher's policy"
"""Who accepts a proposal that nobody is asked about."""
_PIPELINES: dict[str, Literal["continuous-training", "reindex"]] = {
    "retrain": "continuous-training",
    "reindex": "reindex",
}


@dataclass(frozen=True)
class Done:
    """What became of a decision: the proposal that was opened, or what held it back."""

    proposal: Proposal | None = None
    said: str = ""


class Actor:
    """Acts on the decisions about one store. ``runs`` is None where there is no pipeline server to ask."""

    def __init__(self, settings: Settings, store: Store, runs: "KfpRuns | None") -> None:
        self._settings = settings
        self._store = store
        self._runs = runs
        self._proposals = Proposals(store)

    def act(self, decision: Decision, sight: Sight, watching_id: str, now: datetime) -> Done:
        """Open a proposal, or start the run, unless something speaks against it; ``watching_id`` is the store's.

        Raises:
            StoreError: the store cannot be reached. PipelineServerError: nor can the pipeline server, so it is not
                known whether a run is under way; a proposal that was accepted stays so, and the next look starts it.
        """
        proposals = [self._settle(proposal, decision, sight, now) for proposal in self._proposals.list()]
        proposals = [self._start(proposal) if _waits_for_run(proposal) else proposal for proposal in proposals]
        if decision.action == "nothing":
            return Done()
        pipeline = _PIPELINES[decision.action]
        held_back = self._held_back(decision, pipeline, proposals, sight, now)
        if held_back:
            return Done(said=held_back)
        proposal = Proposal(
            id=_next_id(proposals, watching_id),
            created=now,
            pipeline=pipeline,
            reasons=decision.reasons,
            figures=decision.figures,
        )
        if self._settings.watch.policy == "start" and not decision.for_a_person:
            accepted = {"state": "accepted", "answered_by": POLICY, "answered": now}
            proposal = Proposal.model_validate(proposal.model_dump() | accepted)
        try:
            self._proposals.open(proposal)
        except ConflictError:
            return Done(said="Another watcher was faster and has proposed it.")
        return Done(proposal=self._start(proposal) if _waits_for_run(proposal) else proposal)

    def _settle(self, proposal: Proposal, decision: Decision, sight: Sight, now: datetime) -> Proposal:
        """Let an open proposal expire that nobody answered in time, or whose reason is gone."""
        if proposal.state != "open":
            return proposal
        overtaken = sight.champion_since is not None and sight.champion_since > proposal.created
        gone = decision.action == "nothing" and not sight.faults
        late = now - proposal.created >= timedelta(seconds=self._settings.watch.cooldown_s)
        if not (overtaken or gone or late):
            return proposal
        try:
            return self._proposals.change(proposal, state="expired")
        except ConflictError:  # somebody answers it at this moment
            return self._proposals.show(proposal.id)

    def _held_back(
        self, decision: Decision, pipeline: str, proposals: Sequence[Proposal], sight: Sight, now: datetime
    ) -> str:
        """Why nothing is to be proposed now; empty where nothing speaks against it."""
        if waiting := [proposal.id for proposal in proposals if proposal.state == "open"]:
            return f"Proposal {waiting[-1]} waits for an answer."
        if starting := [proposal.id for proposal in proposals if proposal.state == "accepted" and not proposal.run]:
            return f"Proposal {starting[-1]} is accepted, and its run about to start."
        if self._runs:
            newest = [run for each in _PIPELINES.values() for run in self._runs.list(each)]
            if under_way := [run for run in newest if not run.state.is_final]:
                return f"Run {under_way[0].name} of {under_way[0].pipeline} is {under_way[0].state}."
        settled = [proposal for proposal in proposals if proposal.pipeline == pipeline]
        if not settled or decision.has_grown_since(settled[-1].figures, self._settings):
            return ""
        last = settled[-1]
        until = (last.answered or last.created) + timedelta(seconds=self._settings.watch.cooldown_s)
        if now < until:
            return (
                f"Proposal {last.id} was {last.state}; the same is proposed again from {until:%Y-%m-%d %H:%M} UTC on,"
                " or when it has grown."
            )
        if self._was_held(last, sight):
            return f"The run of proposal {last.id} was held by the gate; there is too little new since then."
        return ""

    def _was_held(self, proposal: Proposal, sight: Sight) -> bool:
        """Whether its run ended without a release, and nothing serves since that was not served then."""
        if proposal.run is None or (sight.champion_since and sight.champion_since > proposal.created):
            return False
        outcome = load_outcome(self._store, proposal.run)
        return outcome is not None and outcome.state == "held"

    def _start(self, proposal: Proposal) -> Proposal:
        """Start the run of an accepted proposal; its id is the key, so a start whose answer was lost is harmless."""
        if self._runs is None:
            return proposal
        parameters = from_settings(self._settings, self._runs.parameters(proposal.pipeline))
        parameters["started_by"] = f"the watcher, proposal {proposal.id}"
        run = self._runs.start(proposal.pipeline, parameters, proposal.id, self._store)
        try:
            return self._proposals.change(proposal, run=run.id)
        except ConflictError:  # another watcher started the same run
            return self._proposals.show(proposal.id)


def _waits_for_run(proposal: Proposal) -> bool:
    return proposal.state == "accepted" and proposal.run is None and proposal.answered_by == POLICY


def _next_id(proposals: Sequence[Proposal], watching_id: str) -> str:
    """The same for all watchers that see the same proposals, and no other store's."""
    numbers = [int(found[1]) for proposal in proposals if (found := re.fullmatch(r"(\d{6})-\w+", proposal.id))]
    return f"{max(numbers, default=0) + 1:06d}-{watching_id}"
