"""Permissions: the lists of `evernear.settings.permissions.PermissionSettings`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from slack_bolt import BoltContext

from evernear.errors import EvernearError, SlackError
from evernear.settings.permissions import PermissionSettings, Right
from evernear.triggers.requests import Person
from evernear.triggers.slack.client import SlackClient

_VERBS: dict[Right, str] = {
    "label": "name images",
    "start": "start runs, stop runs or pause the watcher",
    "promote": "promote a release or roll back",
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
    """The lists, and the members of the user groups in them."""

    def __init__(self, settings: PermissionSettings, slack: SlackClient, clock: Callable[[], datetime]) -> None:
        self._settings = settings
        self._slack = slack
        self._clock = clock
        self._groups: dict[str, tuple[datetime, frozenset[str]]] = {}

    def is_granted(self, right: Right) -> bool:
        """Whether anyone is authorized. The button is hidden otherwise."""
        return bool(self._permitted(right))

    def require(self, right: Right, caller: Caller) -> None:
        """Check that ``caller`` has the ``right``.

        Raises:
            RequestRefusedError: ``caller`` does not have it.
        """
        setting, allowed = f"permissions.{right}", self._permitted(right)
        if not caller.is_of_workspace:
            raise RequestRefusedError("Sorry, only members of this workspace may do that.")
        if not allowed:
            raise RequestRefusedError(
                f"Sorry, no one may {_VERBS[right]} from Slack yet. The operator of evernear can add your id, "
                f"{caller.person.id}, a user group's or this channel's, {caller.channel}, to {setting}."
            )
        # User groups are checked last, because each group requires a call to Slack.
        for allowed_id in sorted(allowed, key=_is_group):
            if allowed_id in (caller.person.id, caller.channel) or (
                _is_group(allowed_id) and caller.person.id in self._members(allowed_id)
            ):
                return
        raise RequestRefusedError(
            f"Sorry, you may not {_VERBS[right]}. The operator of evernear can add your id, {caller.person.id}, "
            f"to {setting}."
        )

    def _permitted(self, right: Right) -> tuple[str, ...]:
        entries: tuple[str, ...] = getattr(self._settings, right)
        return entries

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
