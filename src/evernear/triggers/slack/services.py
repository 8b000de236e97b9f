"""What the handlers and the worker share: the bot's stores and connections, its permissions, and
the call that a handler answers."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from slack_bolt import BoltContext

from evernear.common import audit
from evernear.common.audit import AuditEvent, request_id
from evernear.common.store import Store
from evernear.errors import ConflictError, EvernearError, SlackError
from evernear.release.registry import Registry
from evernear.settings import Settings
from evernear.settings.triggers import PermissionSettings, Right
from evernear.triggers.requests import Kind, Person, Request, RequestStore
from evernear.triggers.slack.blocks import line
from evernear.triggers.slack.client import SlackClient

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

Clock = Callable[[], datetime]
_VERBS: dict[Right, str] = {
    "label": "name images",
    "start": "start runs, stop runs or pause the watcher",
    "promote": "promote a release or roll back",
}
_GROUP_CACHE_TIME = timedelta(minutes=1)
_log = logging.getLogger(__name__)


class RequestRefusedError(EvernearError):
    """The bot rejected a command or a click. The error message is shown to the user."""


class Access:
    """The lists of `PermissionSettings`, and the members of the user groups in them. ``slack`` must
    not retry, because permissions are checked before the acknowledgement."""

    def __init__(self, settings: PermissionSettings, slack: SlackClient, clock: Clock) -> None:
        self._settings = settings
        self._slack = slack
        self._clock = clock
        self._groups: dict[str, tuple[datetime, frozenset[str]]] = {}

    def is_granted(self, right: Right) -> bool:
        """Whether anyone is authorized. The button is hidden otherwise."""
        return bool(getattr(self._settings, right))

    def require(self, right: Right, call: "Call") -> None:
        """Raises `RequestRefusedError` if the user does not have the ``right``."""
        setting, person = f"permissions.{right}", call.person
        allowed: tuple[str, ...] = getattr(self._settings, right)
        if not call.is_of_workspace:
            raise RequestRefusedError("Sorry, only members of this workspace may do that.")
        if not allowed:
            raise RequestRefusedError(
                f"Sorry, no one may {_VERBS[right]} from Slack yet. The operator of evernear can add your id, "
                f"{person.id}, a user group's or this channel's, {call.channel}, to {setting}."
            )
        groups = [each for each in allowed if each.startswith("S")]
        if not {person.id, call.channel} & {*allowed} and not any(person.id in self._members(each) for each in groups):
            raise RequestRefusedError(
                f"Sorry, you may not {_VERBS[right]}. The operator of evernear can add your id, {person.id}, "
                f"to {setting}."
            )

    def _members(self, group: str) -> frozenset[str]:
        cached = self._groups.get(group)
        if cached is None or self._clock() - cached[0] > _GROUP_CACHE_TIME:
            try:
                cached = (self._clock(), self._slack.members(group))
            except SlackError as error:
                raise RequestRefusedError(f"Sorry, I could not look up the members of {group}: {error}") from None
            self._groups[group] = cached
        return cached[1]


@dataclass
class Services:
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


@dataclass(frozen=True)
class Call:
    """One command, click or mention, and the user who made it."""

    services: Services
    person: Person
    channel: str
    is_of_workspace: bool
    """False for members of other organizations in a shared channel."""
    trigger: str
    """Slack's id of the call. Duplicate deliveries have the same id."""
    text: str = ""
    """The arguments of the command, or the value of the button."""
    thread: str = ""
    """Timestamp of the message to reply to."""

    @staticmethod
    def of(services: Services, context: BoltContext, body: Mapping[str, Any], text: str = "") -> "Call":
        """Bolt has already resolved the workspace to which the bot's token belongs."""
        user: Any = body.get("user") or {}
        own, team = context.authorize_result, user.get("team_id") or context.actor_team_id
        enterprise = context.actor_enterprise_id
        same = own is not None and (
            team == own.team_id or (own.enterprise_id is not None and enterprise == own.enterprise_id)
        )
        name = str(body.get("user_name") or user.get("username") or user.get("name") or "")
        person = Person(id=context.user_id or "", name=name[:80])
        trigger = str(body.get("trigger_id") or body.get("event_id") or "")
        return Call(services, person, context.channel_id or "", same, trigger, text, _thread(body))

    def require(self, permission: Right, what: str) -> None:
        """Check that the user has ``permission`` for ``what``. A refusal is audited.

        Raises:
            RequestRefusedError: the user does not have ``permission``.
        """
        try:
            self.services.access.require(permission, self)
        except RequestRefusedError as error:
            _log.warning("refused: %s needs the permission %s for %s.", self.person, permission, what)
            self.audit(what, "refused", detail=str(error))
            raise

    def record(self, kind: Kind, record_id: str, **fields: Any) -> None:
        """Store a request for the worker. A duplicate delivery changes nothing. If an earlier
        attempt at the request failed and this call is not a duplicate, the request is accepted
        again."""
        services = self.services
        request = Request.model_validate(
            {"id": record_id, "kind": kind, "created": services.clock(), "asked_by": self.person}
            | {"channel": self.channel, "thread": self.thread, "trigger": self.trigger}
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
        event = AuditEvent(
            request=request or request_id("help", self.trigger),
            at=self.services.clock(),
            who=str(self.person),
            what=what,
            result=result,
            where=self.channel,
            detail=detail,
        )
        audit.write(self.services.store, event)


def _thread(body: Mapping[str, Any]) -> str:
    """The thread of a mention, or of the message that contains a button. Empty for a command and an
    ephemeral message."""
    container: Mapping[str, Any] = body.get("container") or body.get("event") or {}
    if container.get("thread_ts"):
        return str(container["thread_ts"])
    return "" if container.get("is_ephemeral") else str(container.get("message_ts") or container.get("ts") or "")
