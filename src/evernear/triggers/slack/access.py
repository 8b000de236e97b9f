"""Who may do what: the allow-lists of `evernear.settings.SlackSettings`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from slack_bolt import BoltContext

from evernear.errors import EvernearError, SlackError
from evernear.settings import SlackSettings
from evernear.triggers.slack.inbox import Person
from evernear.triggers.slack.web import Web

Action = Literal["start", "stop", "promote", "roll_back", "schedule"]
_WORDS: dict[Action, str] = {
    "start": "start runs",
    "stop": "stop runs",
    "promote": "promote a release that the gate held",
    "roll_back": "roll back",
    "schedule": "switch the watcher",
}
_GROUP_KNOWN_FOR = timedelta(minutes=1)


class Refused(EvernearError):
    """A person may not do that; the message is for them."""


@dataclass(frozen=True)
class Caller:
    """Who clicked or typed, and where."""

    person: Person
    channel: str
    is_of_workspace: bool
    """False for somebody of another organisation in a shared channel."""

    @staticmethod
    def of(context: BoltContext, body: Mapping[str, Any]) -> "Caller":
        """The person behind a command, a click or an event. Bolt has found out whose workspace the bot's token is."""
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
    """The allow-lists, and the members of the groups in them."""

    def __init__(self, settings: SlackSettings, web: Web, clock: Callable[[], datetime]) -> None:
        self._lists: dict[Action, tuple[str, ...]] = {
            "start": settings.may_start,
            "stop": settings.may_stop,
            "promote": settings.may_promote,
            "roll_back": settings.may_roll_back,
            "schedule": settings.may_schedule,
        }
        self._web = web
        self._clock = clock
        self._groups: dict[str, tuple[datetime, frozenset[str]]] = {}

    def is_open_to_anybody(self, action: Action) -> bool:
        """Whether somebody at all may do it, so that a button makes sense."""
        return bool(self._lists[action])

    def require(self, action: Action, caller: Caller) -> None:
        """Let ``caller`` do ``action``.

        Raises:
            Refused: they are not on the list.
        """
        setting, allowed = f"slack.may_{action}", self._lists[action]
        if not caller.is_of_workspace:
            raise Refused("Sorry, only members of this workspace may do that.")
        if not allowed:
            raise Refused(
                f"Sorry, nobody may {_WORDS[action]} from Slack yet. Whoever runs evernear can put your id, "
                f"{caller.person.id}, a user group's or this channel's, {caller.channel}, into {setting}."
            )
        # Groups are looked up last: that asks Slack.
        for allowed_id in sorted(allowed, key=_is_group):
            if allowed_id in (caller.person.id, caller.channel) or (
                _is_group(allowed_id) and caller.person.id in self._members(allowed_id)
            ):
                return
        raise Refused(
            f"Sorry, you may not {_WORDS[action]}. Whoever runs evernear can put your id, {caller.person.id}, "
            f"into {setting}."
        )

    def _members(self, group: str) -> frozenset[str]:
        known = self._groups.get(group)
        if known is None or self._clock() - known[0] > _GROUP_KNOWN_FOR:
            try:
                known = (self._clock(), self._web.members(group))
            except SlackError as error:
                raise Refused(f"Sorry, I could not look up who is in the user group {group}: {error}") from None
            self._groups[group] = known
        return known[1]


def _is_group(allowed_id: str) -> bool:
    return allowed_id.startswith("S")
