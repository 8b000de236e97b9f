"""Prompts: ask in the channel whether to start a run, and record the answer."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from evernear.common.audit import request_id
from evernear.errors import ConflictError, SettingsError, SlackError
from evernear.kubeflow.runs import Run, combine, from_settings, from_words, split_words
from evernear.kubeflow.runs import State as RunState
from evernear.settings.sources import flat
from evernear.triggers.requests import TEXT_MAX_CHARACTERS, TRAINING, Request, State
from evernear.triggers.slack.blocks import (
    Block,
    Message,
    actions,
    as_text,
    button,
    code,
    context,
    date,
    duration,
    escape,
    fields,
    join_lines,
    line,
    link,
    mention,
    section,
)
from evernear.triggers.slack.services import Call, RequestRefusedError, Services

PROMPT_TIMEOUT = timedelta(hours=4)
"""Time until an unanswered prompt expires, so that a forgotten one starts nothing."""
RETRAIN_PARAMETERS = (
    "preset",
    "train.epochs",
    "train.batch_size",
    "train.learning_rate",
    "train.weight_decay",
    "train.margin",
    "train.scale",
    "train.embedding_dim",
    "train.width",
    "train.augment",
    "train.seed",
    "index.type",
    "index.search",
    "index.k",
)
"""Settings that /retrain may set. With settings of the gate or of the data, anyone who may start a
run would also decide what is promoted."""
ACCEPT, DECLINE = "request.accept", "request.decline"
_VERBS = {TRAINING: "train", "reindex": "index the gallery"}


def request_run(call: Call, pipeline: str) -> None:
    """Record a request to run ``pipeline`` with the settings in ``call.text``. The worker prompts
    for confirmation."""
    call.record(
        "run",
        request_id("run", call.trigger),
        state="pending",
        expires=call.services.clock() + PROMPT_TIMEOUT,
        pipeline=pipeline,
        text=call.text[: TEXT_MAX_CHARACTERS + 1],
    )


def advance(services: Services, request: Request) -> None:
    if request.is_expired(services.clock()) and (request.message or request.is_proposal):
        services.requests.change(request, state="expired")
    elif request.message and request.shown < request.grown:
        services.slack.edit(request.message, proposal(request))
        services.requests.change(request, shown=request.grown)
    elif request.message:
        return
    elif request.is_proposal:
        _post_proposal(services, request)
    else:
        _post_prompt(services, request)


def close(services: Services, request: Request) -> None:
    services.slack.edit(request.message, closed_prompt(request))
    services.requests.change(request, is_closed=True)


def accept(call: Call) -> None:
    _answer(call, _find(call), "accepted")


def decline(call: Call) -> None:
    """The person who made the request needs no permission to decline it."""
    request = _find(call)
    if not call.person.id or call.person.id != request.asked_by.id:
        call.require("start", DECLINE)
    _answer(call, request, "declined")
    call.audit("decline", "done", request=request.id)


def prompt(
    request: Request, parameters: Mapping[str, Any], defaults: Mapping[str, Any], newest: Sequence[Run]
) -> Message:
    changed = [code(f"{name} = {as_text(value)}") for name, value in _changes(parameters, defaults)]
    source = parameters.get("source") or defaults.get("source") or "no source is set"
    succeeded = next((run for run in newest if run.state is RunState.SUCCEEDED), None)
    active = [run for run in newest if not run.state.is_final]
    verb = _VERBS.get(request.pipeline) or f"run {escape(request.pipeline)}"
    question = "Train again?" if request.pipeline == TRAINING else f"Time to {verb}?"
    start = "Start training" if request.pipeline == TRAINING else "Start"
    blocks: list[Block] = [
        section(f"*{question}* Requested by {mention(request.asked_by)}."),
        fields(
            {
                "Pipeline": f"{escape(request.pipeline)}, newest published version",
                "Data": escape(str(source)),
                "Changed settings": ", ".join(changed) or "none",
                "Last successful run": _duration_of(succeeded),
            }
        ),
        *([section(f":warning: {_already_active(active)}")] if active else []),
        *actions(button(start, ACCEPT, request.id, "primary"), button("Not now", DECLINE, request.id)),
        context("Nothing starts without confirmation." + _expiry(request)),
    ]
    name = escape(request.asked_by.name) or "Somebody"
    return Message(text=f"{question} Requested by {name}.", blocks=tuple(blocks))


def proposal(request: Request) -> Message:
    text = "Train" if request.pipeline == TRAINING else "Index"
    buttons = [button(text, ACCEPT, request.id, "primary"), button("Not now", DECLINE, request.id)]
    origin = f"Proposed by the watcher {date(request.created)}. Nothing starts without confirmation."
    return _with_reasons(request, *actions(*buttons), context(origin + _expiry(request)))


def closed_prompt(request: Request) -> Message:
    if request.is_proposal:
        ending = "*Expired:* its reasons no longer hold, or another proposal or release has replaced it."
        return _with_reasons(
            request, context(ending if request.state == "expired" else f"*Declined* by {mention(request.by)}.")
        )
    if request.state == "expired":
        text = f"*Not started.* Nobody answered {mention(request.asked_by)} in time."
    else:
        text = f"*Not started.* Declined by {mention(request.by)}."
    return Message(text="Not started.", blocks=(section(text),))


def _post_proposal(services: Services, request: Request) -> None:
    channel = services.settings.slack.channel
    address = services.slack.post(channel, proposal(request))
    services.requests.change(request, message=address, channel=channel, shown=request.grown)


def _post_prompt(services: Services, request: Request) -> None:
    known = services.runs.parameters(request.pipeline)
    try:
        if len(request.text) > TEXT_MAX_CHARACTERS:
            raise SettingsError(
                f"The command has more than {TEXT_MAX_CHARACTERS} characters; set the settings in the pipeline instead."
            )
        parameters = from_words(split_words(request.text), known, RETRAIN_PARAMETERS)
    except SettingsError as error:
        services.notify(request, str(error))
        services.finish(request, "failed")
        return
    request = services.requests.change(request, parameters=parameters)  # a click may come before the post returns
    defaults = combine(
        {parameter.name: parameter.default for parameter in known}, from_settings(services.settings, known)
    )
    message = prompt(request, parameters, defaults, services.runs.list(request.pipeline, limit=20))
    try:
        address = services.slack.post(request.channel, message)
    except SlackError as error:
        if error.reason != "not_writable":
            raise
        text = "I cannot write to that channel; invite me with /invite @evernear and repeat the command."
        services.slack.post(request.asked_by.id, line(text))
        services.finish(request, "failed")
        return
    services.requests.change(request, message=address)


def _find(call: Call) -> Request:
    request = call.services.requests.find(call.text[:128])
    if request is None or request.kind != "run":
        raise RequestRefusedError("The request of this prompt no longer exists; repeat the command.")
    return request


def _answer(call: Call, request: Request, answer: State) -> None:
    """Write the answer if the request is pending.

    Also write the address of the prompt, because `advance` may not have recorded the address yet.

    Raises:
        RequestRefusedError: the request has expired, or a person has already given a
            different answer.
    """
    services, person, channel = call.services, call.person, call.channel
    while request.state == "pending" and not request.is_expired(services.clock()):
        answered = {"state": answer, "answered_by": person, "answered": services.clock()}
        try:
            request = services.requests.change(request, **answered, channel=channel, message=f"{channel}/{call.thread}")
        except ConflictError:  # another click or `advance` wrote first
            request = _find(call)
        services.wake()
    if request.is_expired(services.clock()):
        raise RequestRefusedError("This prompt has expired; /retrain asks again.")
    was_declined = request.state == "declined"
    by_caller = request.answered_by is not None and request.answered_by.id == person.id
    if was_declined != (answer == "declined") or not by_caller:
        raise RequestRefusedError(f"{request.by} has already {'declined' if was_declined else 'accepted'} this.")


def _with_reasons(request: Request, *more: Block) -> Message:
    question = f"Time to {_VERBS.get(request.pipeline) or 'run ' + escape(request.pipeline)}?"
    reasons = [escape(reason) for reason in request.reasons]
    lines = [f":eyes: *{question}*", *(f"• {reason}" for reason in reasons)]
    return Message(text=" ".join([question, *reasons]), blocks=(section(join_lines(lines)), *more))


def _expiry(request: Request) -> str:
    return f" This prompt expires {date(request.expires)}." if request.expires else ""


def _changes(parameters: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The parameters and settings that differ from the defaults, with their full names."""
    values, default_values = flat(parameters), flat(defaults)
    return [
        (name.removeprefix("settings."), value) for name, value in values.items() if default_values.get(name) != value
    ]


def _duration_of(run: Run | None) -> str:
    if run is None or run.ended is None:
        return "none yet"
    return f"took {duration(run.ended - run.created)}, {date(run.created)}"


def _already_active(runs: Sequence[Run]) -> str:
    names = ", ".join(link(run.url, run.name) for run in runs[:3])
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return f"Already active: {names}{more}."
