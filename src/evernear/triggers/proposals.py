"""Proposals to train or to index again: written by the watcher, asked and answered in Slack, kept in the store.

::

    triggers/proposals/<id>.json    one proposal; every change is a compare-and-swap

The watcher opens one with its numbers; a person's answer (or the policy) closes it. Its id is the idempotency key
of the run that it starts, so that no crash and no double click starts two.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import AwareDatetime, Field

from evernear.store import Store
from evernear.triggers.records import Record, Records

PROPOSALS = "triggers/proposals/"


class Proposal(Record):
    """What the watcher found, and what became of it. Its ``id`` is unique, sortable by time, and the key of the
    run that it may start.
    """

    created: AwareDatetime
    pipeline: Literal["continuous-training", "reindex"]
    reasons: tuple[str, ...]
    """Sentences with the numbers, for a person."""
    figures: dict[str, float] = Field(default={})
    state: Literal["open", "accepted", "declined", "expired"] = "open"
    """``accepted`` is written before the run is started: whoever finds it without a ``run`` starts it, by its id."""
    answered_by: str = ""
    answered: AwareDatetime | None = None
    run: str | None = None
    message: str | None = None
    """Where it was asked: ``channel/ts`` of the Slack message."""
    told: bool = False
    """Whether that message says that it was declined or has expired."""


class Proposals:
    """The proposals of one store. Every method may raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._records = Records(store, PROPOSALS, Proposal)

    def open(self, proposal: Proposal) -> None:
        """Keep a new one.

        Raises:
            ConflictError: there is one of this id already.
        """
        self._records.add(proposal)

    def list(self) -> Iterator[Proposal]:
        """All, oldest first."""
        return self._records.list()

    def find(self, proposal_id: str) -> Proposal | None:
        """The one of this id, if there is one."""
        return self._records.find(proposal_id)

    def show(self, proposal_id: str) -> Proposal:
        """One of them.

        Raises:
            StoreError: there is none of this id.
        """
        found = self.find(proposal_id)
        if found is None:
            raise self._records.missing(proposal_id)
        return found

    def change(self, proposal: Proposal, **fields: object) -> Proposal:
        """``proposal`` with other fields, if nobody changed it since it was read.

        Raises:
            ConflictError: somebody did; read it again.
        """
        return self._records.change(proposal, **fields)
