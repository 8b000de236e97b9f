"""What people asked the bot for, in the store: written down before Slack is told that it arrived.

::

    triggers/slack/requests/<id>.json    one request; every change is a compare-and-swap

The id is made of what was asked, so that the same click delivered twice, or made twice, is one request; the id of a
request for a run is also the run's idempotency key at KFP (see `Request.key`).

::

    retrain:                new -> asked -> accepted -> running -> done
                                     |-> declined, expired -> done
    the others:             accepted -> done
    what could not be done: -> failed
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import AwareDatetime, Field

from evernear.disk import sha256_bytes
from evernear.frozen import Frozen
from evernear.store import Store
from evernear.triggers.records import Record, Records

REQUESTS = "triggers/slack/requests/"
KEPT_DAYS = 7
"""For so long a finished request is known, so that a late copy of it is; Slack's last retry comes after an hour."""

TEXT_MAX = 2000
"""Characters of a command; a longer one is refused."""

PIPELINE = "continuous-training"
Kind = Literal["retrain", "stop", "promote", "roll_back", "help"]


class Person(Frozen):
    """Somebody in Slack, or without an id somebody else, as the watcher."""

    id: str
    name: str = ""

    def __str__(self) -> str:
        if not self.id:
            return self.name
        return f"{self.name} ({self.id} in Slack)" if self.name else f"{self.id} in Slack"


class Request(Record):
    """What somebody asked for, and how far it is."""

    kind: Kind
    state: Literal["new", "asked", "accepted", "running", "declined", "expired", "done", "failed"] = "accepted"
    created: AwareDatetime
    asked_by: Person
    channel: str
    trigger: str = ""
    """Slack's id of the click or command; its copies have the same."""
    attempt: int = 0
    """How often it was asked for again after it had failed."""
    thread: str = ""
    """The ts of the message under which the answer belongs; empty: none."""

    text: str = ""
    """Of a retrain: what was typed after the command. Of a stop without ``run``: how its id begins."""
    pipeline: str = PIPELINE
    parameters: dict[str, Any] = Field(default={})
    answered_by: Person | None = None
    answered: AwareDatetime | None = None

    release: str = ""
    """Of a promote or roll_back: the release to promote, or to be rid of."""
    move: int = 0
    """The number of the champion's move that was the last when the button was shown; it still has to be."""

    run: str = ""
    message: str = ""
    """Where the bot asked and tells how the run is: ``channel/ts``."""
    progress: str = ""
    verdict: str = ""

    @property
    def key(self) -> str:
        """The idempotency key of the run: the same for the same, unless that failed and is wanted again."""
        return f"{self.id}-{self.attempt}" if self.attempt else self.id

    @property
    def is_final(self) -> bool:
        """Whether nothing is left to do."""
        return self.state in ("done", "failed")

    @property
    def by(self) -> Person:
        """Who has to answer for it: who clicked, else who asked."""
        return self.answered_by or self.asked_by

    @property
    def started_by(self) -> str:
        """Who or what starts the run, for the champion's history."""
        if self.asked_by.id or self.by == self.asked_by:
            return str(self.by)
        return f"{self.asked_by}, accepted by {self.by}"


class Inbox(Records[Request]):
    """The requests of one store. Every method may raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, REQUESTS, Request)

    def open(self) -> Iterator[Request]:
        """Those with something left to do."""
        return (request for request in self.list() if not request.is_final)

    def tidy(self, now: datetime) -> None:
        """Forget what was finished long ago."""
        for request in self.list():
            if request.is_final and now - request.created > timedelta(days=KEPT_DAYS):
                self.remove(request)


def id_of(kind: Kind, *what: object) -> str:
    """The id of a request of ``kind`` about ``what``: the same for the same."""
    return f"{kind}-{sha256_bytes(repr(what).encode())[:20]}"
