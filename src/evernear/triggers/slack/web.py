"""What the bot says to Slack: the few calls of the Web API that it needs, their failures sorted by what helps."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from slack_sdk.errors import SlackApiError, SlackRequestError
from slack_sdk.web import WebClient

from evernear.errors import SlackError

Block = dict[str, Any]
RETRY_AFTER_S = 30
"""Where Slack limits and does not say for how long."""

# What no repetition mends: the place is closed to the bot, or gone.
_CLOSED = frozenset({
    "cant_update_message",
    "channel_not_found",
    "edit_window_closed",
    "is_archived",
    "message_not_found",
    "msg_too_long",
    "invalid_blocks",
    "not_in_channel",
    "restricted_action",
    "thread_not_found",
    "user_not_in_channel",
})  # fmt: skip


_AILING = frozenset({"fatal_error", "internal_error", "request_timeout", "service_unavailable"})


class RateLimited(SlackError):
    """Slack wants to be left alone for ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unreached(SlackError):
    """Slack does not answer, or answers that it cannot at present."""


class Closed(SlackError):
    """The place cannot be written to: the bot is not in the channel, the message is gone."""


@dataclass(frozen=True)
class Message:
    """What is shown; ``text`` is for notifications and for readers who do not see blocks."""

    text: str
    blocks: tuple[Block, ...] = ()


class Web:
    """Slack's Web API.

    Every method raises `RateLimited`, `Unreached`, `Closed`, or another `SlackError` where Slack refuses.
    A place is ``channel/ts``, as in `evernear.triggers.proposals.Proposal.message`.
    """

    def __init__(self, client: WebClient) -> None:
        self._client = client

    def sign_in(self) -> None:
        """Ask whether the token is good."""
        with failures("auth.test"):
            self._client.auth_test()

    def post(self, channel: str, message: Message, thread: str = "") -> str:
        """Post ``message``, into the thread under ``thread`` (a ts) if one is given; returns its place."""
        with failures("chat.postMessage"):
            answer = self._client.chat_postMessage(
                channel=channel,
                text=message.text,
                blocks=message.blocks,
                thread_ts=thread or None,
                unfurl_links=False,
                unfurl_media=False,
            )
        return f"{answer['channel']}/{answer['ts']}"  # a user's id becomes that of the conversation with them

    def edit(self, place: str, message: Message) -> None:
        """Let the message at ``place`` show ``message``; one that is gone is left alone."""
        channel, _, ts = place.partition("/")
        try:
            with failures("chat.update"):
                self._client.chat_update(channel=channel, ts=ts, text=message.text, blocks=message.blocks)
        except Closed:
            pass

    def whisper(self, channel: str, user: str, message: Message) -> None:
        """Show ``message`` to one person only: in the channel, or where the bot is not in it, directly."""
        try:
            with failures("chat.postEphemeral"):
                self._client.chat_postEphemeral(channel=channel, user=user, text=message.text, blocks=message.blocks)
        except Closed:
            self.post(user, message)

    def upload(self, place: str, data: bytes, filename: str, title: str, alt_text: str) -> None:
        """Put a file into the thread of ``place``."""
        channel, _, ts = place.partition("/")
        with failures("files.upload"):
            self._client.files_upload_v2(
                channel=channel, thread_ts=ts, content=data, filename=filename, title=title, alt_txt=alt_text
            )

    def members(self, group: str) -> frozenset[str]:
        """The ids of the users in a user group."""
        with failures("usergroups.users.list"):
            users: list[str] = self._client.usergroups_users_list(usergroup=group)["users"] or []
            return frozenset(users)


@contextmanager
def failures(call: str) -> Generator[None]:
    """Let what the SDK raises in ``call`` be a `SlackError` that says what helps."""
    try:
        yield
    except SlackApiError as error:
        raise failure_of(call, error) from None
    except (OSError, HTTPException, SlackRequestError) as error:
        raise _unreached(call, str(error)) from None


def failure_of(call: str, error: SlackApiError) -> SlackError:
    """The error that says what a refusal of ``call`` means."""
    response: Any = error.response
    data: Any = getattr(response, "data", response)
    answer: dict[str, Any] = data if isinstance(data, dict) else {}  # a proxy's error page is no JSON
    status = getattr(response, "status_code", 0)
    word = str(answer.get("error") or f"status {status}")
    if status == 429 or word == "ratelimited":
        headers = {name.lower(): value for name, value in dict(getattr(response, "headers", {})).items()}
        wait = str(headers.get("retry-after", ""))
        return RateLimited(f"Slack limits {call}.", float(wait) if wait.isdigit() else RETRY_AFTER_S)
    if status >= 500 or word in _AILING:
        return _unreached(call, f"status {status}" if status >= 500 else word)
    if word in _CLOSED:
        return Closed(f"Slack refused {call}: {word}.")
    if word == "missing_scope":
        return SlackError(
            f"Slack refused {call}: the app lacks the scope {answer.get('needed', '')!r}; compare its manifest "
            "with deploy/slack/manifest.yaml and install it again."
        )
    if word in ("invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired"):
        return SlackError(f"Slack refused {call}: {word}; give the bot the token of the installed app.")
    return SlackError(f"Slack refused {call}: {word}.")


def _unreached(call: str, why: str) -> Unreached:
    return Unreached(f"Slack cannot be reached ({call}: {why}); see https://slack-status.com.")
