"""Bolt handlers: resolve the caller, check the permission, run the registered command or button
handler, and acknowledge.

The bot acknowledges a delivery only after the request is in the store. Duplicate deliveries and
repeated clicks lead to the same request. If the store is unavailable, the bot tells the user that
nothing was done.
"""

import logging
from collections.abc import Mapping
from typing import Any

from slack_bolt import Ack, App, BoltContext, BoltResponse, Respond
from slack_sdk.web import WebClient

from evernear.common.audit import request_id
from evernear.errors import EvernearError
from evernear.triggers.slack import routes
from evernear.triggers.slack.access import Caller, RequestRefusedError
from evernear.triggers.slack.blocks import error_text, line
from evernear.triggers.slack.client import Message
from evernear.triggers.slack.commands import help_message
from evernear.triggers.slack.routes import BUTTONS, COMMANDS, Call
from evernear.triggers.slack.services import Services

Payload = dict[str, Any]
_log = logging.getLogger(__name__)


class Handlers:
    """The handlers of one bot. Bolt passes arguments to a handler according to the names of its
    parameters."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def register(self, app: App) -> None:
        """Register the handlers for all kinds of deliveries with ``app``."""
        for slash in {name.partition(" ")[0] for name in COMMANDS}:
            app.command(slash)(ack=self.command, lazy=[self.query])
        app.event("app_mention")(self.mention)
        for action in BUTTONS:
            app.action(action)(self.click)
        app.error(self.error)

    def command(self, ack: Ack, command: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """Run a command that changes something. Queries are only acknowledged here."""
        match = routes.find(str(command["command"]), str(command.get("text") or ""))
        if match is None:
            return _acknowledge(ack, help_message())
        route, text = match
        if route.is_query:
            return ack()
        call = self._call(context, body, str(command["trigger_id"]), text)
        if route.permission:
            call.require(route.permission, route.name)
        return _acknowledge(ack, route.run(call))

    def query(self, respond: Respond, command: Payload, body: Payload, context: BoltContext) -> None:
        """Answer a query after its acknowledgement, because the answer may take longer than Slack
        waits."""
        match = routes.find(str(command["command"]), str(command.get("text") or ""))
        if match is None or not match[0].is_query:
            return
        route, text = match
        try:
            call = self._call(context, body, str(command["trigger_id"]), text)
            if route.permission:
                call.require(route.permission, route.name)
            message = route.run(call)
        except Exception as error:  # Slack shows nothing for an error after the acknowledgement
            if not isinstance(error, EvernearError):
                _log.error("internal error in %s", route.name, exc_info=error)
            message = line(error_text(error))
        if message is not None:
            _respond(respond, message)

    def mention(self, event: Payload, body: Payload, context: BoltContext) -> None:
        """Reply to a mention with the help message, in the thread of the mention. Bolt acknowledges
        on return."""
        thread = str(event.get("thread_ts") or event.get("ts") or "")
        call = self._call(context, body, str(body["event_id"]), thread=thread)
        call.record("help", request_id("help", call.trigger))

    def click(self, ack: Ack, action: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """Run the handler of a button."""
        name = str(action["action_id"])
        button = BUTTONS[name]
        value = str(action.get("value") or "")
        call = self._call(context, body, str(body.get("trigger_id") or ""), value, _thread(body))
        if button.permission:
            call.require(button.permission, name)
        button.run(call)
        return ack()

    def error(self, error: Exception, body: Payload, respond: Respond, context: BoltContext) -> BoltResponse | None:
        """Tell the user why nothing was done.

        Internal errors are not acknowledged, so that Slack reports a failure.
        """
        if not isinstance(error, EvernearError):
            _log.error("internal error in a delivery of Slack", exc_info=error)
            return None
        if body.get("type") == "event_callback":
            return None  # Slack delivers an event again
        text = str(error)
        if not isinstance(error, RequestRefusedError):
            _log.warning("not accepted: %s", error)
            text = f"{error} Nothing was done; try again."
        message = line(text)
        if "command" in body:
            return BoltResponse(status=200, body={"response_type": "ephemeral", "text": message.text})
        _respond(respond, message)
        return BoltResponse(status=200, body="")

    def _call(self, context: BoltContext, body: Payload, trigger: str, text: str = "", thread: str = "") -> Call:
        return Call(self._services, Caller.of(context, body), trigger, text, thread)


def create_slack_app(client: WebClient, signing_secret: str, handlers: Handlers) -> App:
    """Create the Bolt app.

    Raises:
        slack_bolt.error.BoltError: Slack rejects the token of ``client``, or is
            unavailable.
        OSError: Slack is unreachable.
    """
    quiet = logging.getLogger("evernear.slack.bolt")
    quiet.setLevel(logging.WARNING)  # at lower levels, Bolt logs the bodies of unsigned requests
    # Listeners run before the response, so that every acknowledged request is stored.
    app = App(client=client, signing_secret=signing_secret, process_before_response=True, logger=quiet)
    handlers.register(app)
    return app


def _acknowledge(ack: Ack, message: Message | None) -> BoltResponse:
    return ack(text=message.text, blocks=message.blocks) if message else ack()


def _respond(respond: Respond, message: Message) -> None:
    respond(text=message.text, blocks=message.blocks, response_type="ephemeral", replace_original=False)


def _thread(body: Mapping[str, Any]) -> str:
    """The thread of the message that contains the button. Empty for an ephemeral message."""
    container: Mapping[str, Any] = body.get("container") or {}
    if container.get("thread_ts"):
        return str(container["thread_ts"])
    return "" if container.get("is_ephemeral") else str(container.get("message_ts") or "")
