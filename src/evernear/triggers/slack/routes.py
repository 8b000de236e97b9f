"""The registry of slash commands and buttons.

To add a command, decorate a function with a decorator from this module. `handlers` checks the
permission, and `/evernear help` lists the command. The modules `commands`, `prompts`, `runs` and
`promotions` register their commands and buttons on import.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evernear.common import audit
from evernear.common.audit import AuditEvent, request_id
from evernear.errors import ConflictError
from evernear.settings.permissions import Right
from evernear.triggers.requests import Kind, Request
from evernear.triggers.slack.access import Caller, RequestRefusedError
from evernear.triggers.slack.client import Message
from evernear.triggers.slack.services import Services

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """One command, click or mention."""

    services: Services
    caller: Caller
    trigger: str
    """Slack's id of the call. Duplicate deliveries have the same id."""
    text: str = ""
    """The arguments of the command, or the value of the button."""
    thread: str = ""
    """Timestamp of the message to reply to."""

    def require(self, permission: Right, what: str) -> None:
        """Check that the caller has ``permission`` for ``what``. A refusal is audited.

        Raises:
            RequestRefusedError: the caller does not have ``permission``.
        """
        try:
            self.services.access.require(permission, self.caller)
        except RequestRefusedError as error:
            _log.warning("refused: %s needs the permission %s for %s.", self.caller.person, permission, what)
            self.audit(what, "refused", detail=str(error))
            raise

    def record(self, kind: Kind, record_id: str, **fields: Any) -> None:
        """Store a request for the worker. A duplicate delivery changes nothing.

        If an earlier attempt at the request failed and this call is not a duplicate, the request is
        accepted again.
        """
        services = self.services
        request = Request.model_validate(
            {"id": record_id, "kind": kind, "created": services.clock(), "asked_by": self.caller.person}
            | {"channel": self.caller.channel, "thread": self.thread, "trigger": self.trigger}
            | fields
        )
        try:
            services.requests.add(request)
        except ConflictError:
            failed = services.requests.find(record_id)
            if failed and failed.state == "failed" and failed.trigger != request.trigger:
                again = request.model_dump(exclude={"id", "attempt"})
                services.requests.change(failed, **again, attempt=failed.attempt + 1)
        services.wake()

    def audit(self, what: str, result: audit.Result, request: str = "", detail: str = "") -> None:
        """Record an action that needs no request, or the rejection of a request."""
        event = AuditEvent(
            request=request or request_id("help", self.trigger),
            at=self.services.clock(),
            who=str(self.caller.person),
            what=what,
            result=result,
            where=self.caller.channel,
            detail=detail,
        )
        audit.write(self.services.store, event)


Handler = Callable[[Call], Message | None]


@dataclass(frozen=True)
class Command:
    """A slash command."""

    name: str
    usage: str
    help: str
    permission: Right | None
    is_query: bool
    run: Handler


@dataclass(frozen=True)
class Button:
    """The handler for clicks on a button."""

    permission: Right | None
    run: Callable[[Call], None]


COMMANDS: dict[str, Command] = {}
BUTTONS: dict[str, Button] = {}


def command(
    name: str, help: str, *, usage: str = "", permission: Right | None = None, is_query: bool = False
) -> Callable[[Handler], Handler]:
    """Register a command that changes something, as in
    ``@command("/evernear stop", "ends a run", usage="RUN")``.

    The command runs before the acknowledgement. Slack waits 3 seconds for the acknowledgement. The
    command may record a request for the worker, but must not wait for KFP. If the command returns a
    message, the message is shown to the caller.
    """

    def register(run: Handler) -> Handler:
        COMMANDS[name] = Command(name, usage, help, permission, is_query, run)
        return run

    return register


def query(name: str, help: str, *, permission: Right | None = None) -> Callable[[Handler], Handler]:
    """Register a command that changes nothing.

    The command runs after the acknowledgement, so it may take longer.
    """
    return command(name, help, permission=permission, is_query=True)


def button(action: str, permission: Right | None = None) -> Callable[[Callable[[Call], None]], Callable[[Call], None]]:
    """Register the handler of all buttons with the action id ``action``.

    The handler runs before the acknowledgement.
    """

    def register(run: Callable[[Call], None]) -> Callable[[Call], None]:
        BUTTONS[action] = Button(permission, run)
        return run

    return register


def find(slash: str, text: str) -> tuple[Command, str] | None:
    """The typed command and its arguments. If several command names match, the longest name is
    used."""
    words = text.split()
    for count in range(min(2, len(words)), -1, -1):
        command = COMMANDS.get(" ".join([slash, *words[:count]]))
        if command is not None:
            is_complete = count == len(words) or bool(command.usage)
            return (command, text.split(maxsplit=count)[count] if count < len(words) else "") if is_complete else None
    return None
