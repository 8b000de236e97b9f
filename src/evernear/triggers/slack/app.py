"""What Slack delivers, taken in: who is it, may they, write it down, acknowledge. The worker does the rest.

An acknowledgement promises that the request is in the store. Slack's own copies of a delivery and second clicks come
to the same record, so none is dropped unseen and none starts anything twice; where the store does not answer, the
person is told that nothing was done.
"""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import Field, ValidationError
from slack_bolt import Ack, App, BoltContext, BoltResponse, Respond
from slack_sdk.web import WebClient

from evernear.errors import ConflictError, EvernearError
from evernear.frozen import Frozen
from evernear.settings import SlackSettings
from evernear.store import Store
from evernear.triggers import audit
from evernear.triggers.proposals import Proposal, Proposals
from evernear.triggers.slack import messages
from evernear.triggers.slack.access import Access, Action, Caller, Refused
from evernear.triggers.slack.answers import Answers
from evernear.triggers.slack.inbox import TEXT_MAX, Inbox, Kind, Request, id_of
from evernear.triggers.slack.web import Message
from evernear.triggers.slack.worker import request_of

Payload = dict[str, Any]
SHORTEST_RUN_ID = 4
_log = logging.getLogger(__name__)


class _Moved(Frozen):
    """The value of a button that moves the champion."""

    release: Annotated[str, Field(max_length=100)]
    move: int


class Desk:
    """The handlers of one bot. Bolt hands each what its arguments name."""

    def __init__(
        self,
        settings: SlackSettings,
        store: Store,
        access: Access,
        answers: Answers,
        clock: Callable[[], datetime],
        wake: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._access = access
        self._answers = answers
        self._clock = clock
        self._wake = wake
        self._inbox = Inbox(store)
        self._proposals = Proposals(store)

    def register(self, app: App) -> None:
        """Let ``app`` hand over what it receives."""
        app.command("/retrain")(self.retrain)
        app.command("/evernear")(ack=self.evernear, lazy=[self.answer])
        app.event("app_mention")(self.mentioned)
        app.action(messages.START)(self.start)
        app.action(messages.DECLINE)(self.decline)
        app.action(messages.ACCEPT)(self.accept_proposal)
        app.action(messages.NOT_NOW)(self.decline_proposal)
        app.action(messages.STOP)(self.stop)
        app.action(messages.PROMOTE)(self.promote)
        app.action(messages.ROLL_BACK)(self.roll_back)
        app.action(messages.LINK)(self.link)
        app.error(self.failed)

    # --- commands ------------------------------------------------------------------------------------------------

    def retrain(self, ack: Ack, command: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """``/retrain [name=value ...]``: the worker asks for confirmation."""
        caller = self._require("start", context, body)
        text = str(command.get("text") or "")[: TEXT_MAX + 1]
        self._take(caller, body, "retrain", id_of("retrain", command["trigger_id"]), state="new", text=text)
        return ack()

    def evernear(self, ack: Ack, command: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """``/evernear ...``: what changes something is taken here; what is only looked up, `answer` answers."""
        match str(command.get("text") or "").split():
            case ["stop", run] if len(run) >= SHORTEST_RUN_ID:
                caller = self._require("stop", context, body)
                self._take(caller, body, "stop", id_of("stop", command["trigger_id"]), text=run[:100])
                return ack()
            case ["stop", *_]:
                return ack(f"Which run? /evernear stop RUN, with at least {SHORTEST_RUN_ID} characters of its id.")
            case ["schedule", "start" | "stop" as word]:
                caller = self._require("schedule", context, body)
                told = self._answers.turn(word == "start", str(caller.person))
                self._audit(id_of("help", command["trigger_id"]), caller, f"schedule_{word}", "done")
                return ack(told.text)
            case ["status" | "runs" | "champion" | "schedule"] | ["rollback"]:
                return ack()
            case _:
                return ack(text=messages.HELP.text, blocks=messages.HELP.blocks)

    def answer(self, respond: Respond, command: Payload, body: Payload, context: BoltContext) -> None:
        """Look up what was asked for; takes longer than Slack waits, so it comes after the acknowledgement."""
        try:
            match str(command.get("text") or "").split():
                case ["status"]:
                    told = self._answers.status()
                case ["runs"]:
                    told = self._answers.runs()
                case ["champion"]:
                    told = self._answers.champion()
                case ["schedule"]:
                    told = self._answers.schedule()
                case ["rollback"]:
                    self._require("roll_back", context, body)
                    told = self._answers.rollback()
                case _:
                    return
        except Exception as error:  # it is acknowledged already, so that Slack would say nothing
            if not isinstance(error, EvernearError):
                _log.error("evernear itself failed to answer.", exc_info=error)
            told = messages.line(messages.sentence_of(error))
        _whisper(respond, told)

    def mentioned(self, event: Payload, body: Payload, context: BoltContext) -> None:
        """A mention gets help, in its thread; Bolt acknowledges when this returns."""
        thread = str(event.get("thread_ts") or event.get("ts") or "")
        self._take(Caller.of(context, body), body, "help", id_of("help", body["event_id"]), thread=thread)

    # --- clicks --------------------------------------------------------------------------------------------------

    def start(self, ack: Ack, action: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """Yes: the run is to start."""
        caller = self._require("start", context, body)
        request = self._question(action)
        late = self._clock() - request.created > timedelta(seconds=self._settings.prompt_timeout_s)
        if request.state == "new":
            raise Refused("I am still writing that question down; click again in a moment.")
        if request.state == "asked" and not late:
            request = self._answer(request, "accepted", caller)
            self._wake()
        if request.answered_by is None:
            raise Refused("That question has expired; /retrain asks again.")
        if request.answered_by != caller.person:
            raise Refused(f"{request.by} was quicker.")
        return ack()

    def decline(self, ack: Ack, action: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """No; also from who asked."""
        caller, request = Caller.of(context, body), self._question(action)
        if caller.person.id != request.asked_by.id:
            self._require("start", context, body)
        if request.state == "asked":
            request = self._answer(request, "declined", caller)
            self._wake()
        if (request.state, request.answered_by) == ("declined", caller.person):
            self._audit(request.id, caller, "decline", "done")
        return ack()

    def accept_proposal(self, ack: Ack, action: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """Yes to the watcher."""
        caller = self._require("start", context, body)
        proposal = self._proposal(action)
        if proposal.state == "open":
            proposal = self._answer_proposal(proposal, "accepted", caller, body)
        if proposal.state != "accepted":
            raise Refused(f"That proposal was {proposal.state} before your click.")
        with suppress(ConflictError):  # a copy of this click, or the worker, was quicker
            request = request_of(proposal, caller.channel)
            self._inbox.add(request.model_copy(update={"answered_by": caller.person}))
        self._wake()
        return ack()

    def decline_proposal(self, ack: Ack, action: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """No to the watcher."""
        caller = self._require("start", context, body)
        proposal = self._proposal(action)
        if proposal.state == "open":
            proposal = self._answer_proposal(proposal, "declined", caller, body)
            self._wake()
        if proposal.state == "accepted":
            raise Refused("That proposal was accepted before your click.")
        if (proposal.state, proposal.answered_by) == ("declined", str(caller.person)):
            self._audit(proposal.id, caller, "decline", "done")
        return ack()

    def stop(self, ack: Ack, action: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """The run is to end."""
        caller, run = self._require("stop", context, body), str(action["value"])[:100]
        self._take(caller, body, "stop", id_of("stop", run), run=run, thread=_thread(body))
        return ack()

    def promote(self, ack: Ack, action: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """A held release is to serve anyway."""
        return self._move("promote", ack, action, self._require("promote", context, body), body)

    def roll_back(self, ack: Ack, action: Payload, body: Payload, context: BoltContext) -> BoltResponse:
        """What served before is to serve again."""
        return self._move("roll_back", ack, action, self._require("roll_back", context, body), body)

    def link(self, ack: Ack) -> BoltResponse:
        """A button that only opens a page; Slack tells of that too."""
        return ack()

    def failed(self, error: Exception, body: Payload, respond: Respond, context: BoltContext) -> BoltResponse | None:
        """Tell a person why nothing was done. What is a fault of ours stays unacknowledged, so that Slack says so."""
        if not isinstance(error, EvernearError):
            _log.error("evernear itself failed on what Slack delivered.", exc_info=error)
            return None
        if body.get("type") == "event_callback":
            return None  # nobody to tell; Slack delivers it again
        sentence = str(error)
        if not isinstance(error, Refused):
            _log.warning("not taken: %s", error)
            sentence = f"{error} Nothing was done; try again."
        told = messages.line(sentence)
        if "command" in body:
            return BoltResponse(status=200, body={"response_type": "ephemeral", "text": told.text})
        _whisper(respond, told)
        return BoltResponse(status=200, body="")

    # --- what they share -----------------------------------------------------------------------------------------

    def _require(self, action: Action, context: BoltContext, body: Payload) -> Caller:
        """Who it is, if they may.

        Raises:
            Refused: they may not; that is in the audit.
        """
        caller = Caller.of(context, body)
        try:
            self._access.require(action, caller)
        except Refused as error:
            _log.warning("refused: %s may not %s.", caller.person, action)
            self._audit(id_of("help", body.get("trigger_id")), caller, action, "refused", str(error))
            raise
        return caller

    def _take(self, caller: Caller, body: Payload, kind: Kind, request_id: str, **fields: Any) -> None:
        """Write down what ``caller`` asks for, unless it is written down already.

        What failed is tried again if they ask again; a copy of what was delivered before does nothing.
        """
        where = {"channel": caller.channel, "trigger": str(body.get("trigger_id") or "")}
        tree = {"id": request_id, "kind": kind, "created": self._clock(), "asked_by": caller.person}
        request = Request.model_validate(tree | where | fields)
        try:
            self._inbox.add(request)
        except ConflictError:
            held = self._inbox.find(request_id)
            if held is not None and held.state == "failed" and held.trigger != request.trigger:
                self._inbox.change(held, **request.model_dump(exclude={"id", "attempt"}), attempt=held.attempt + 1)
            else:
                _log.info("%s was delivered before.", request_id)
        self._wake()

    def _move(self, kind: Kind, ack: Ack, action: Payload, caller: Caller, body: Payload) -> BoltResponse:
        try:
            asked = _Moved.model_validate(json.loads(str(action["value"])))
        except (ValueError, ValidationError):
            raise Refused("That button is of another version of me; /evernear champion tells what serves.") from None
        request_id = id_of(kind, asked.release, asked.move)
        self._take(caller, body, kind, request_id, release=asked.release, move=asked.move, thread=_thread(body))
        return ack()

    def _question(self, action: Payload) -> Request:
        request = self._inbox.find(str(action["value"])[:128])
        if request is None or request.kind != "retrain":
            raise Refused("I do not know that question any longer; /retrain asks again.")
        return request

    def _answer(self, request: Request, state: str, caller: Caller) -> Request:
        try:
            return self._inbox.change(request, state=state, answered_by=caller.person, answered=self._clock())
        except ConflictError:  # a second click, or another person's, came first
            return self._inbox.find(request.id) or request

    def _proposal(self, action: Payload) -> Proposal:
        proposal = self._proposals.find(str(action["value"])[:128])
        if proposal is None:
            raise Refused("I do not know that proposal any longer.")
        return proposal

    def _answer_proposal(self, proposal: Proposal, state: str, caller: Caller, body: Payload) -> Proposal:
        message = proposal.message or f"{caller.channel}/{body['container']['message_ts']}"
        try:
            return self._proposals.change(
                proposal, state=state, answered_by=str(caller.person), answered=self._clock(), message=message
            )
        except ConflictError:
            return self._proposals.show(proposal.id)

    def _audit(self, request: str, caller: Caller, what: str, result: Any, detail: str = "") -> None:
        who, where = str(caller.person), caller.channel
        line = audit.Line(
            request=request, at=self._clock(), who=who, what=what, result=result, where=where, detail=detail
        )
        audit.write(self._store, line)


def create_app(client: WebClient, signing_secret: str, desk: Desk) -> App:
    """The Bolt app with the handlers of ``desk``.

    Raises:
        slack_bolt.error.BoltError: Slack does not take the token of ``client``, or cannot say.
        OSError: Slack cannot be reached.
    """
    quiet = logging.getLogger("evernear.slack.bolt")
    quiet.setLevel(logging.WARNING)  # below that it logs the bodies of requests that nobody has signed
    # Before the response, so that what is acknowledged is written down.
    app = App(client=client, signing_secret=signing_secret, process_before_response=True, logger=quiet)
    desk.register(app)
    return app


def _thread(body: Payload) -> str:
    """The thread that a click belongs to: that of the message with the button; none for one only its reader sees."""
    container: Payload = body.get("container") or {}
    if container.get("thread_ts"):
        return str(container["thread_ts"])
    return "" if container.get("is_ephemeral") else str(container.get("message_ts") or "")


def _whisper(respond: Respond, told: Message) -> None:
    respond(text=told.text, blocks=told.blocks, response_type="ephemeral", replace_original=False)
