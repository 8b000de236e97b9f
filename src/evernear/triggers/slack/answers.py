"""Answers to ``/evernear``: looked up, shown to who asked, and not kept."""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from evernear.errors import StoreError
from evernear.release.registry import Registry
from evernear.store import Store
from evernear.triggers.proposals import Proposals
from evernear.triggers.slack import messages
from evernear.triggers.slack.inbox import Inbox
from evernear.triggers.slack.web import Message
from evernear.triggers.watch.switch import Switch

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns


class Answers:
    """What can be asked. Every answer may raise `StoreError` or `PipelineServerError`."""

    def __init__(self, store: Store, runs: "KfpRuns", clock: Callable[[], datetime]) -> None:
        self._registry = Registry(store)
        self._inbox = Inbox(store)
        self._proposals = Proposals(store)
        self._switch = Switch(store)
        self._runs = runs
        self._clock = clock

    def status(self) -> Message:
        """What serves, what runs, what waits for an answer."""
        busy = [run for run in self._runs.list(limit=50) if not run.state.is_final]
        asked = sum(request.state == "asked" for request in self._inbox.open())
        proposed = sum(proposal.state == "open" for proposal in self._proposals.list())
        return messages.status(self._registry.champion(), busy, asked + proposed, self._watcher(), self._clock())

    def runs(self) -> Message:
        """The newest runs."""
        return messages.runs(self._runs.list(limit=10), self._clock())

    def champion(self) -> Message:
        """The release that serves, and how it came to."""
        found = self._registry.champion()
        return messages.champion(found, self._registry.get(found.version, include_pruned=True) if found else None)

    def rollback(self) -> Message:
        """A question with a button.

        Raises:
            StoreError: there is nothing to roll back to.
        """
        found = self._registry.champion()
        if found is None:
            raise StoreError("There is nothing to roll back to: no release has been promoted yet.")
        found.rollback_target()
        return messages.roll_back_question(found)

    def schedule(self) -> Message:
        """Whether the watcher looks by itself, and what it found last."""
        return messages.line(f"The watcher is {self._watcher()}")

    def turn(self, on: bool, by: str) -> Message:
        """Switch the watcher's schedule."""
        self._switch.turn(on, by)
        return self.schedule()

    def _watcher(self) -> str:
        watching = self._switch.read()
        switched = f" by {watching.by}" if watching.by else ""
        found = f" Last look {watching.last.at:%Y-%m-%d %H:%M} UTC: {watching.last.action}." if watching.last else ""
        return f"{'on' if watching.on else 'off'}{switched} since {watching.since:%Y-%m-%d %H:%M} UTC.{found}"
