"""Review in Slack: live queries are shown as images with a class picker.

`evernear.review` processes the answers. A click is only recorded as a request. The
worker executes the request, because listing the source takes longer than Slack waits.
"""

from collections.abc import Iterable, Sequence

from evernear.common.output import quantity
from evernear.common.retry import retry
from evernear.errors import ConflictError, DataError, SettingsError
from evernear.review.answers import Answer, Answers
from evernear.review.label_target import open_label_target
from evernear.review.queue import Item, Queue
from evernear.triggers.requests import Request, request_id
from evernear.triggers.slack.blocks import actions, button, code, context, image, line, mention, section, select
from evernear.triggers.slack.client import Block, FileNotReadyError, Message
from evernear.triggers.slack.routes import Call, query
from evernear.triggers.slack.routes import button as on_button
from evernear.triggers.slack.services import Services

SHOWN = 8
LABEL, SKIP, UNDO = "review_label", "review_skip", "review_undo"
OPTIONS_MAX = 100
_FILE_PAUSES_S = (0.5, 1, 2, 4, 8)
"""Pauses between attempts to show an uploaded image. Slack processes an upload only
after the call that completes the upload.

See github.com/slackapi/node-slack-sdk/issues/1865.
"""
LABEL_MAX_CHARACTERS = 75


@query("/evernear review", "posts live queries that the release was unsure of, to label", permission="label")
def review(call: Call) -> Message | None:
    """Post the newest uncertain queries from the review queue."""
    services = call.services
    target = open_label_target(services.settings.data.source, services.settings.data)
    items = Queue(services.store).pending(Answers(services.store, target).latest().keys(), SHOWN)
    if not items:
        return line("The review queue is empty.")
    files = [services.slack.upload_image(item.image, f"{item.id[:16]}.png") for item in items]
    post_images(call, review_message(items, files, target.labels))
    return None


def post_images(call: Call, message: Message) -> None:
    """Post a message with newly uploaded images as soon as Slack has processed the
    images.
    """
    slack, channel = call.services.slack, call.caller.channel
    retry(lambda: slack.post(channel, message), on=FileNotReadyError, pauses_s=_FILE_PAUSES_S)


@on_button(LABEL, permission="label")
def label(call: Call) -> None:
    """Record an answer that assigns a class. The option's value contains the image and
    the class.
    """
    call.record("label", request_id("label", call.trigger), text=f"label {call.text}")


@on_button(SKIP, permission="label")
def skip(call: Call) -> None:
    """Record that an image is not valid."""
    call.record("label", request_id("label", call.trigger), text=f"skip {call.text}")


@on_button(UNDO, permission="label")
def undo(call: Call) -> None:
    """Record a request to undo an answer."""
    call.record("label", request_id("label", call.trigger), text=f"undo {call.text}")


def answer(services: Services, request: Request) -> None:
    """Execute a recorded answer, and report it in the thread of the images."""
    action, _, rest = request.text.partition(" ")
    image_id, _, chosen = rest.partition(" ")
    try:
        recorded = Answer.model_validate(
            {"image": image_id, "action": action, "label": chosen, "who": str(request.by), "at": request.created}
        )
        for sentence in _record(services, recorded):
            services.notify(request, sentence)
    except (ConflictError, DataError, SettingsError) as error:
        services.notify(request, str(error))
        services.finish(request, "failed")
        return
    services.audit(request, "label", "done", detail=f"{action} {image_id[:16]} {chosen}".strip())
    services.slack.post(request.channel, answer_message(recorded, request), request.thread)
    services.finish(request, "ended")


def review_message(items: Sequence[Item], files: Sequence[str], labels: Sequence[str]) -> Message:
    """A message that shows each item with its image, its nearest classes,
    a class picker and a button.
    """
    blocks: list[Block] = [section("*Live queries to label*")]
    for item, file in zip(items, files, strict=True):
        verdict = "unknown" if item.unknown else "near a boundary"
        suggested = [each for each in item.candidates if each in labels]
        ordered = [*suggested, *(each for each in labels if each not in suggested)]
        options = {each: f"{item.id} {each}" for each in ordered if len(each) <= LABEL_MAX_CHARACTERS}
        blocks += [
            image(file, f"query {item.id[:8]}"),
            context(f"{verdict}, distance {item.dist:.2f}; nearest: {', '.join(map(code, item.candidates[:3]))}"),
            *actions(
                select("Class", LABEL, dict(list(options.items())[:OPTIONS_MAX])),
                button("Not valid, skip", SKIP, item.id),
            ),
        ]
    if len(labels) > OPTIONS_MAX:
        blocks.append(context(f"The pickers have {OPTIONS_MAX} of {len(labels)} classes; `evernear review` lists all."))
    return Message(text=f"{quantity(len(items), 'live query', 'live queries')} to label", blocks=tuple(blocks))


def answer_message(answer: Answer, request: Request) -> Message:
    """A message that reports a user's answer, with a button that undoes the answer."""
    done = {"label": f"labeled {code(answer.label)}", "skip": "skipped", "undo": "back in the queue"}[answer.action]
    text = f"{code(answer.image[:8])} {done} by {mention(request.by)}"
    buttons = [] if answer.action == "undo" else [button("Undo", UNDO, answer.image)]
    return Message(text=text, blocks=(section(text), *actions(*buttons)))


def _record(services: Services, answer: Answer) -> Iterable[str]:
    """Record an answer. Return a sentence for each earlier answer that was set
    aside.
    """
    answers = Answers(services.store, open_label_target(services.settings.data.source, services.settings.data))
    if answer.action == "undo":
        answers.undo(answer)
    else:
        item = Queue(services.store).find(answer.image)
        if item is None:
            raise DataError("The image is no longer in the queue; its log file was removed.")
        answers.label(item.image, answer)
    return answers.set_aside.values()
