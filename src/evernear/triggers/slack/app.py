"""The Bolt app: check the permission, store the request and acknowledge.

Slack delivers again what was not acknowledged, and duplicate deliveries and repeated clicks lead to
the same request. If the store is unavailable, the bot tells the user that nothing was done.
"""

import logging
from collections.abc import Callable
from functools import partial
from http.client import HTTPException
from typing import Any

from slack_bolt import Ack, App, BoltContext, BoltResponse, Respond

from evernear.common.audit import request_id
from evernear.errors import EvernearError
from evernear.settings.triggers import Right
from evernear.triggers.slack import promotions, prompts, runs
from evernear.triggers.slack.blocks import LINK, Message, error_text, line
from evernear.triggers.slack.client import SlackClient
from evernear.triggers.slack.commands import COMMANDS, Command, help_message
from evernear.triggers.slack.services import Call, RequestRefusedError, Services

Payload = dict[str, Any]
BUTTONS: dict[str, tuple[Right | None, Callable[[Call], None]]] = {
    prompts.ACCEPT: ("start", prompts.accept),
    prompts.DECLINE: (None, prompts.decline),
    runs.STOP: ("start", runs.request_stop),
    promotions.PROMOTE: ("promote", partial(promotions.request_move, kind="promote")),
    promotions.ROLL_BACK: ("promote", partial(promotions.request_move, kind="roll_back")),
    LINK: (None, lambda _: None),  # Slack also reports clicks on buttons that open a page
}
"""The permission and the handler of each action id."""
_log = logging.getLogger(__name__)


def create_slack_app(client: SlackClient, signing_secret: str, services: Services) -> App:
    """Create the Bolt app. Slack waits 3 seconds for an acknowledgement, so ``client`` must not
    retry."""
    quiet = logging.getLogger("evernear.slack.bolt")
    quiet.setLevel(logging.WARNING)  # at lower levels, Bolt logs the bodies of unsigned requests
    # Listeners run before the response, so that every acknowledged request is stored.
    app = App(client=client, signing_secret=signing_secret, process_before_response=True, logger=quiet)
    for command in COMMANDS.values():
        _add_command(app, services, command)
    app.command("/evernear")(lambda ack: _acknowledge(ack, help_message()))
    for action in BUTTONS:
        _add_button(app, services, action)

    def mention(context: BoltContext, body: Payload) -> None:
        """Reply with the help message. Bolt acknowledges on return."""
        call = Call.of(services, context, body)
        call.record("help", request_id("help", call.trigger))

    app.event("app_mention")(mention)
    app.error(_explain)
    return app


def _add_command(app: App, services: Services, command: Command) -> None:
    """A command that changes something runs before its acknowledgement. A query runs after it,
    because the answer may take longer than Slack waits."""
    slash, *words = command.name.split()

    def is_typed(payload: Payload) -> bool:
        typed = _text(payload).split()
        # Phones capitalize the first word.
        is_named = [word.lower() for word in typed[: len(words)]] == words
        return is_named and (len(typed) == len(words) or bool(command.usage))

    def call_of(context: BoltContext, body: Payload) -> Call:
        arguments = _text(body).split(maxsplit=len(words))[len(words) :]
        return Call.of(services, context, body, *arguments)

    def permit(context: BoltContext, body: Payload, next: Callable[[], None]) -> None:
        if command.permission:
            call_of(context, body).require(command.permission, command.name)
        next()

    def run(ack: Ack, context: BoltContext, body: Payload) -> BoltResponse:
        return _acknowledge(ack, command.run(call_of(context, body)))

    def answer(respond: Respond, context: BoltContext, body: Payload) -> None:
        try:
            message = command.run(call_of(context, body))
        except Exception as error:  # Slack shows nothing for an error after the acknowledgement
            if not isinstance(error, EvernearError):
                _log.error("internal error in %s", command.name, exc_info=error)
            message = line(error_text(error))
        if message is not None:
            _respond(respond, message)

    listen = app.command(slash, matchers=[is_typed], middleware=[permit])
    if command.is_query:
        listen(ack=lambda ack: ack(), lazy=[answer])
    else:
        listen(run)


def _add_button(app: App, services: Services, action: str) -> None:
    permission, run = BUTTONS[action]

    def click(ack: Ack, payload: Payload, context: BoltContext, body: Payload) -> BoltResponse:
        call = Call.of(services, context, body, str(payload.get("value") or ""))
        if permission:
            call.require(permission, action)
        run(call)
        return ack()

    app.action(action)(click)


def _explain(error: Exception, body: Payload, respond: Respond) -> BoltResponse | None:
    """Tell the user why nothing was done. An internal error, or one that cannot be told, is not
    acknowledged, so that Slack reports a failure, and neither is an event, so that Slack delivers
    it again."""
    if not isinstance(error, EvernearError):
        _log.error("internal error in a delivery of Slack", exc_info=error)
        return None
    if body.get("type") == "event_callback":
        return None
    text = str(error)
    if not isinstance(error, RequestRefusedError):
        _log.warning("not accepted: %s", error)
        text = f"{error} Nothing was done; try again."
    message = line(text)
    if "command" in body:
        return BoltResponse(status=200, body={"response_type": "ephemeral", "text": message.text})
    return BoltResponse(status=200, body="") if _respond(respond, message) else None


def _text(command: Payload) -> str:
    return str(command.get("text") or "")


def _acknowledge(ack: Ack, message: Message | None) -> BoltResponse:
    return ack(text=message.text, blocks=message.blocks) if message else ack()


def _respond(respond: Respond, message: Message) -> bool:
    """Show ``message`` to the user alone. False if Slack does not accept it: a response URL is
    valid for 30 minutes and five messages."""
    try:
        answer = respond(text=message.text, blocks=message.blocks, response_type="ephemeral", replace_original=False)
        fault = "" if answer.status_code == 200 else f"status {answer.status_code}"
    except (OSError, HTTPException, ValueError) as error:  # ValueError: the request has no response URL
        fault = str(error)
    if fault:
        _log.warning("Slack did not accept a response (%s): %s", fault, message.text)
    return not fault
