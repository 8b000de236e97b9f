"""A client for the calls that the bot makes to Slack's Web API. Errors that need different remedies
have different classes."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from slack_sdk.errors import SlackApiError, SlackRequestError
from slack_sdk.web import WebClient

from evernear.errors import SlackError

Block = dict[str, Any]
DEFAULT_RETRY_AFTER_S = 30
"""Seconds to wait if a rate limit response has no ``Retry-After`` header."""

# Errors for which a retry does not help, for example because the bot has no access to the channel,
# or because the message no longer exists.
_NOT_WRITABLE = frozenset({
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
_UNAVAILABLE = frozenset({"fatal_error", "internal_error", "request_timeout", "service_unavailable"})


@dataclass(frozen=True)
class Message:
    """A message with blocks, and with ``text`` for notifications and for clients that do not render
    blocks."""

    text: str
    blocks: tuple[Block, ...] = ()


class SlackClient:
    """Slack's Web API.

    Every method may raise `SlackError`. An address (``channel/ts``) identifies a message.
    """

    def __init__(self, client: WebClient) -> None:
        self._client = client

    def sign_in(self) -> None:
        """Verify the token."""
        with translated_errors("auth.test"):
            self._client.auth_test()

    def post(self, channel: str, message: Message, thread: str = "") -> str:
        """Post ``message`` and return its address. If ``thread``, the timestamp of a message, is
        set, reply in that thread."""
        with translated_errors("chat.postMessage"):
            response = self._client.chat_postMessage(
                channel=channel,
                text=message.text,
                blocks=message.blocks,
                thread_ts=thread or None,
                unfurl_links=False,
                unfurl_media=False,
            )
        return f"{response['channel']}/{response['ts']}"  # for a user id, Slack returns the id of the conversation

    def edit(self, address: str, message: Message) -> None:
        """Replace the message at ``address``. A deleted message is ignored."""
        channel, _, ts = address.partition("/")
        try:
            with translated_errors("chat.update"):
                self._client.chat_update(channel=channel, ts=ts, text=message.text, blocks=message.blocks)
        except SlackError as error:
            if error.reason != "not_writable":
                raise

    def post_ephemeral(self, channel: str, user: str, message: Message) -> None:
        """Show ``message`` to one user in the channel.

        If the bot is not a member of the channel, send a direct message.
        """
        try:
            with translated_errors("chat.postEphemeral"):
                self._client.chat_postEphemeral(channel=channel, user=user, text=message.text, blocks=message.blocks)
        except SlackError as error:
            if error.reason != "not_writable":
                raise
            self.post(user, message)

    def upload(self, address: str, data: bytes, filename: str, title: str, alt_text: str) -> None:
        """Upload a file to the thread of the message at ``address``."""
        channel, _, ts = address.partition("/")
        with translated_errors("files.upload"):
            self._client.files_upload_v2(
                channel=channel, thread_ts=ts, content=data, filename=filename, title=title, alt_txt=alt_text
            )

    def members(self, group: str) -> frozenset[str]:
        """The user ids of all members of a user group."""
        with translated_errors("usergroups.users.list"):
            users: list[str] = self._client.usergroups_users_list(usergroup=group)["users"] or []
            return frozenset(users)


@contextmanager
def translated_errors(call: str) -> Generator[None]:
    """Convert SDK errors in ``call`` to `SlackError`."""
    try:
        yield
    except SlackApiError as error:
        raise translate(call, error) from None
    except (OSError, HTTPException, SlackRequestError) as error:
        raise _unavailable(call, str(error)) from None


def translate(call: str, error: SlackApiError) -> SlackError:
    """The error to raise if Slack rejects ``call``."""
    response: Any = error.response
    data: Any = getattr(response, "data", response)
    body: dict[str, Any] = data if isinstance(data, dict) else {}  # a proxy's error page is not JSON
    status = getattr(response, "status_code", 0)
    code = str(body.get("error") or f"status {status}")
    if status == 429 or code == "ratelimited":
        headers = {name.lower(): value for name, value in dict(getattr(response, "headers", {})).items()}
        wait_s = str(headers.get("retry-after", ""))
        wait = float(wait_s) if wait_s.isdigit() else DEFAULT_RETRY_AFTER_S
        return SlackError(f"Slack limits the rate of {call}.", retry_after_s=wait)
    if status >= 500 or code in _UNAVAILABLE:
        return _unavailable(call, f"status {status}" if status >= 500 else code)
    if code in _NOT_WRITABLE:
        return SlackError(f"Slack refused {call}: {code}.", "not_writable")
    if code == "missing_scope":
        return SlackError(
            f"Slack refused {call}: the app lacks the scope {body.get('needed', '')!r}; compare its manifest "
            "with deploy/slack/manifest.yaml and install it again."
        )
    if code in ("invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired"):
        return SlackError(f"Slack refused {call}: {code}; configure the bot token of the installed app.")
    return SlackError(f"Slack refused {call}: {code}.")


def _unavailable(call: str, reason: str) -> SlackError:
    return SlackError(f"Slack is unavailable ({call}: {reason}); see https://slack-status.com.", "unavailable")
