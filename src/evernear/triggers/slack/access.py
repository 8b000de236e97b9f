"""Permissions: the allow-lists of `evernear.settings.SlackSettings`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from slack_bolt import BoltContext

from evernear.errors import EvernearError, SlackError
from evernear.settings import SlackSettings
from evernear.triggers.requests import Person
from evernear.triggers.slack.client import SlackClient

Permission = Literal["start", "stop", "promote", "roll_back", "schedule"]
_VERBS: dict[Permission, str] = {
    "start": "start runs",
    "stop": "stop runs",
    "promote": "promote a release that the gate held",
    "roll_back": "roll back",
    "schedule": "pause or resume the watcher",
}
_GROUP_CACHE_TIME = timedelta(minutes=1)


class RequestRefusedError(EvernearError):
    """The bot rejected a command or a click. The error message is shown to the user."""


@dataclass(frozen=True)
class Caller:
    """The user who typed a command or clicked a button, and the channel."""

    person: Person
    channel: str
    is_of_workspace: bool
    """False for members of other organizations in a shared channel."""

    @staticmethod
    def of(context: BoltContext, body: Mapping[str, Any]) -> "Caller":
        """Identify the caller of a command, a click or an event.

        Bolt has already resolved the workspace to which the bot's token belongs.
        """
        user: Any = body.get("user") or {}
        own = context.authorize_result
        team = user.get("team_id") or context.actor_team_id
        enterprise = context.actor_enterprise_id
        same = own is not None and (
            team == own.team_id or (own.enterprise_id is not None and enterprise == own.enterprise_id)
        )
        name = str(body.get("user_name") or user.get("username") or user.get("name") or "")
        return Caller(Person(id=context.user_id or "", name=name[:80]), context.channel_id or "", same)


class Access:
    """The allow-lists, and the members of the user groups in them."""

    def __init__(self, settings: SlackSettings, slack: SlackClient, clock: Callable[[], datetime]) -> None:
        self._lists: dict[Permission, tuple[str, ...]] = {
            "start": settings.may_start,
            "stop": settings.may_stop,
            "promote": settings.may_promote,
            "roll_back": settings.may_roll_back,
            "schedule": settings.may_schedule,
        }
        self._slack = slack
        self._clock = clock
        self._groups: dict[str, tuple[datetime, frozenset[str]]] = {}

    def is_granted(self, permission: Permission) -> bool:
        """Whether anyone is authorized. The button is hidden otherwise."""
        return bool(self._lists[permission])

    def require(self, permission: Permission, caller: Caller) -> None:
        """Check that ``caller`` has ``permission``.

        Raises:
            RequestRefusedError: ``caller`` does not have the permission.
        """
        setting, allowed = f"slack.may_{permission}", self._lists[permission]
        if not caller.is_of_workspace:
            raise RequestRefusedError("Sorry, only members of this workspace may do that.")
        if not allowed:
            raise RequestRefusedError(
                f"Sorry, no one may {_VERBS[permission]} from Slack yet. The operator of evernear can add your id, "
                f"{caller.person.id}, a user group's or this channel's, {caller.channel}, to {setting}."
            )
        # User groups are checked last, because each group requires a call to Slack.
        for allowed_id in sorted(allowed, key=_is_group):
            if allowed_id in (caller.person.id, caller.channel) or (
                _is_group(allowed_id) and caller.person.id in self._members(allowed_id)
            ):
                return
        raise RequestRefusedError(
            f"Sorry, you may not {_VERBS[permission]}. The operator of evernear can add your id, {caller.person.id}, "
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


def _is_group(allowed_id: str) -> bool:
    return allowed_id.startswith("S")
