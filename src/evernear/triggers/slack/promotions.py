"""The buttons for promotions and rollbacks, and the code that executes the requests.

In a cluster, a pipeline moves the champion, because the bot itself has no permissions in the
cluster. Outside a cluster, the bot itself moves the champion.
"""

import logging
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from slack_sdk.models.blocks import ButtonElement

from evernear.common.audit import request_id
from evernear.common.frozen import Frozen
from evernear.errors import EvernearError
from evernear.release.promotions import Cause, Champion, Promotion
from evernear.triggers.requests import Request
from evernear.triggers.slack.blocks import Message, danger_button, escape, mention, paragraph
from evernear.triggers.slack.services import Call, RequestRefusedError, Services

PROMOTE, ROLL_BACK = "release.promote", "release.roll_back"
_PIPELINES = {"promote": "promote", "roll_back": "rollback"}
_CHANGED = "The champion has changed since the button was shown; /evernear champion shows the current one."
_log = logging.getLogger(__name__)


class _Target(Frozen):
    release: Annotated[str, Field(max_length=100)]
    move: int


def request_move(call: Call, kind: Literal["promote", "roll_back"]) -> None:
    try:
        target = _Target.model_validate_json(call.text)
    except ValidationError:
        raise RequestRefusedError(
            "That button is from another version of the bot; /evernear champion shows the live release."
        ) from None
    call.record(kind, request_id(kind, target.release, target.move), release=target.release, move=target.move)


def prepare_run(services: Services, request: Request) -> Request | None:
    """Choose the pipeline and its parameters. None if the request failed because the champion has
    changed."""
    if request.parameters:
        return request
    current = services.registry.champion()
    if (current.promotion.number if current else 0) != request.move:
        services.slack.post(request.channel, not_moved_message(request, _CHANGED), request.thread)
        services.audit(request, request.kind, "failed", detail=_CHANGED)
        services.finish(request, "failed")
        return None
    parameters = {"release": request.release, "reason": _reason(request)}
    return services.requests.change(request, pipeline=_PIPELINES[request.kind], parameters=parameters)


def move(services: Services, request: Request) -> None:
    """Promote or roll back in this process. What a stopped process has completed is not
    repeated."""
    before = services.registry.champion()  # raises if the store is unavailable, and is retried
    if (before.promotion.number if before else 0) == request.move:
        error = _try_move(services, request)
    elif before and before.promotion.number == request.move + 1 and request.id in before.promotion.why:
        error = ""
    else:
        error = _CHANGED
    after = services.registry.champion()
    message = not_moved_message(request, error) if error or after is None else moved_message(request, after.promotion)
    services.audit(request, request.kind, "failed" if error else "done", detail=error)
    services.slack.post(request.channel, message, request.thread)
    services.finish(request, "failed" if error else "ended")


def promote_button(candidate: str, current: Champion | None) -> ButtonElement:
    value = _Target(release=candidate, move=current.promotion.number if current else 0).model_dump_json()
    explanation = f"{candidate} goes live although the gate held it. Your name is recorded in the release history."
    return danger_button("Promote anyway", PROMOTE, value, "Promote against the verdict?", explanation)


def roll_back_buttons(current: Champion) -> list[ButtonElement]:
    """The button that rolls back the last promotion. Empty without a previous release."""
    if current.previous is None:
        return []
    value = _Target(release=current.version, move=current.promotion.number).model_dump_json()
    explanation = f"{current.previous} goes live again and replaces {current.version}."
    return [danger_button("Roll back", ROLL_BACK, value, "Roll back?", explanation)]


def moved_message(request: Request, promotion: Promotion) -> Message:
    verb = {"promote": "promoted", "roll_back": "rolled back"}[request.kind]
    replaced = f" and replaces {escape(promotion.previous)}" if promotion.previous else ""
    text = f":white_check_mark: {mention(request.by)} {verb}: *{escape(promotion.version)}* is live{replaced}."
    return paragraph(text)


def not_moved_message(request: Request, error: str) -> Message:
    result = {"promote": "Not promoted", "roll_back": "Not rolled back"}[request.kind]
    text = f":x: {mention(request.by)} *{result}.* {escape(error)}"
    return paragraph(text)


def _try_move(services: Services, request: Request) -> str:
    cause = Cause(by=str(request.by), why=_reason(request))
    try:  # the bot's image lacks the serving packages, but there a pipeline moves the champion
        from evernear.deployment import promote_release, roll_back
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed where the bot runs; run `evernear registry` next to a server."
    try:
        if request.kind == "promote":
            promote_release(request.release, services.settings, force=True, cause=cause)
        else:
            roll_back(services.settings, cause=cause, expected=request.release)
    except EvernearError as error:
        _log.warning("%s: %s", request.id, error)
        return str(error)
    return ""


def _reason(request: Request) -> str:
    return f"requested in Slack, request {request.id}"
