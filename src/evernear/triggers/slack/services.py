"""The bot's dependencies, which the handlers and the worker share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from evernear.common import audit
from evernear.common.audit import AuditEvent
from evernear.common.store import Store
from evernear.release.registry import Registry
from evernear.settings import Settings
from evernear.triggers.requests import Request, RequestStore
from evernear.triggers.slack.access import Access
from evernear.triggers.slack.blocks import line
from evernear.triggers.slack.client import SlackClient

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

Clock = Callable[[], datetime]


@dataclass
class Services:
    """The connections and stores of one bot."""

    settings: Settings
    store: Store
    runs: "KfpRuns"
    slack: SlackClient
    access: Access
    clock: Clock
    wake: Callable[[], None]
    """Make the worker poll immediately."""
    requests: RequestStore = field(init=False)
    registry: Registry = field(init=False)

    def __post_init__(self) -> None:
        self.requests = RequestStore(self.store)
        self.registry = Registry(self.store)

    def finish(self, request: Request, state: Literal["ended", "failed"], **fields: object) -> None:
        """Write the final state of ``request``."""
        current = self.requests.find(request.id)
        if current is not None and current.is_open:
            self.requests.change(current, state=state, **fields)

    def notify(self, request: Request, text: str) -> None:
        """Notify the person responsible for ``request``, or the channel if no person is
        responsible."""
        if request.by.id:
            self.slack.post_ephemeral(request.channel, request.by.id, line(text))
        else:
            self.slack.post(request.channel or self.settings.slack.channel, line(text))

    def audit(self, request: Request, what: str, result: audit.Result, **details: Any) -> None:
        """Record an action for ``request``. ``details`` are fields of `AuditEvent`."""
        event = AuditEvent(
            request=request.id,
            at=request.answered or request.created,
            who=str(request.by),
            what=what,
            result=result,
            where=request.channel,
            release=request.release,
            **details,
        )
        audit.write(self.store, event)
