"""Slack's Web API. Errors that need different remedies have different reasons."""

from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

from slack_sdk.errors import SlackApiError, SlackRequestError
from slack_sdk.http_retry import RetryHandler, all_builtin_retry_handlers
from slack_sdk.http_retry.builtin_handlers import ServerErrorRetryHandler
from slack_sdk.web import SlackResponse, WebClient

from evernear.errors import SlackError
from evernear.triggers.slack.blocks import Message

TIMEOUT_S = 10

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
_TOKEN_REFUSED = frozenset({"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired"})


class SlackClient(WebClient):
    """Every call may raise `SlackError`. An address (``channel/ts``) identifies a message. With
    ``retries``, a call waits as long as ``Retry-After`` says, and is repeated once. Calls before an
    acknowledgement must not do so, because Slack waits only 3 seconds for it."""

    def __init__(self, token: str, api_url: str, *, retries: bool) -> None:
        handlers: list[RetryHandler] = [*all_builtin_retry_handlers(), ServerErrorRetryHandler()] if retries else []
        super().__init__(token, api_url, TIMEOUT_S, retry_handlers=handlers)

    def api_call(self, api_method: str, **options: Any) -> SlackResponse:
        with _slack_errors(api_method):
            return super().api_call(api_method, **options)

    def post(self, channel: str, message: Message, thread: str = "") -> str:
        """Post ``message`` and return its address. If ``thread``, the timestamp of a message, is
        set, reply in that thread."""
        response = self.chat_postMessage(
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
            self.chat_update(channel=channel, ts=ts, text=message.text, blocks=message.blocks)
        except SlackError as error:
            if error.reason != "not_writable":
                raise

    def post_ephemeral(self, channel: str, user: str, message: Message) -> None:
        """Show ``message`` to one user in the channel. If the bot is not a member of the channel,
        send a direct message."""
        try:
            self.chat_postEphemeral(channel=channel, user=user, text=message.text, blocks=message.blocks)
        except SlackError as error:
            if error.reason != "not_writable":
                raise
            self.post(user, message)

    def upload(self, address: str, data: bytes, filename: str, title: str, alt_text: str) -> None:
        channel, _, ts = address.partition("/")
        with _slack_errors("files.upload"):  # the file itself is sent without `api_call`
            self.files_upload_v2(
                channel=channel, thread_ts=ts, content=data, filename=filename, title=title, alt_txt=alt_text
            )

    def members(self, group: str) -> frozenset[str]:
        users: list[str] = self.usergroups_users_list(usergroup=group)["users"] or []
        return frozenset(users)


@contextmanager
def _slack_errors(call: str) -> Generator[None]:
    try:
        yield
    except SlackApiError as error:
        raise _refusal(call, error) from None
    except (OSError, HTTPException, SlackRequestError) as error:
        raise _unavailable(call, str(error)) from None


def _refusal(call: str, error: SlackApiError) -> SlackError:
    data: Any = getattr(error.response, "data", error.response)
    body: dict[str, Any] = data if isinstance(data, dict) else {}  # a proxy's error page is not JSON
    status = getattr(error.response, "status_code", 0)
    code = str(body.get("error") or f"status {status}")
    if status == 429 or code == "ratelimited":
        return SlackError(f"Slack limits the rate of {call}.", "unavailable")
    if status >= 500 or code in _UNAVAILABLE:
        return _unavailable(call, f"status {status}" if status >= 500 else code)
    refused = f"Slack refused {call}: "
    if code == "missing_scope":
        return SlackError(
            f"{refused}the app lacks the scope {body.get('needed', '')!r}; compare its manifest with "
            "deploy/slack/manifest.yaml and install it again."
        )
    if code in _TOKEN_REFUSED:
        name = "SLACK_APP_TOKEN" if call == "apps.connections.open" else "SLACK_BOT_TOKEN"
        return SlackError(f"{refused}{code}; set {name} to the token of the installed app (docs/slack.md).")
    return SlackError(f"{refused}{code}.", "not_writable" if code in _NOT_WRITABLE else "")


def _unavailable(call: str, reason: str) -> SlackError:
    return SlackError(f"Slack is unavailable ({call}: {reason}); see https://slack-status.com.", "unavailable")
