"""Random live queries in Slack: images with a class picker. The labels measure the
release's accuracy.
"""

from collections.abc import Sequence

from evernear.common.output import quantity
from evernear.errors import DataError
from evernear.review.live_labels import import_labels
from evernear.review.random_queries import WEEKLY, RandomQueries, RandomQuery, Week
from evernear.triggers.requests import Request, request_id
from evernear.triggers.slack.blocks import actions, code, context, image, line, mention, section, select
from evernear.triggers.slack.client import Block, Message
from evernear.triggers.slack.reviews import LABEL_MAX_CHARACTERS, OPTIONS_MAX, SHOWN, post_images
from evernear.triggers.slack.routes import Call, query
from evernear.triggers.slack.routes import button as on_button
from evernear.triggers.slack.services import Services

LABEL = "random_query_label"
_VALUE_MAX_CHARACTERS = 150
_ACTION = "random"


@query("/evernear labels", "posts random live queries to label, which measure accuracy", permission="label")
def ask(call: Call) -> Message | None:
    """Post this week's random queries that have no label yet."""
    services = call.services
    champion = services.registry.champion()
    if champion is None:
        return line("No release is live.")
    week = RandomQueries(services.store).this_week(champion.version, services.clock())
    if len(week.labels) >= WEEKLY:
        return line(f"{len(week.labels)} random queries have labels this week. That is enough.")
    if not week.pending:
        return line("No random query is waiting. Servers log a choice of the images with serving.query_log=images.")
    shown = week.pending[:SHOWN]
    files = [services.slack.upload_image(each.image, f"live-query-{number}.png") for number, each in enumerate(shown)]
    labels = services.registry.get(champion.version, include_pruned=True).manifest.labels
    post_images(call, labels_message(week, shown, files, labels))
    return None


@on_button(LABEL, permission="label")
def label(call: Call) -> None:
    """Record a label. The option's value contains the query and the class."""
    call.record("label", request_id("label", call.trigger), text=f"{_ACTION} {call.text}")


def is_for_one(request: Request) -> bool:
    """Whether a request contains the label of a random query."""
    return request.text.startswith(f"{_ACTION} ")


def answer(services: Services, request: Request) -> None:
    """Store a recorded label, and report it in the thread of the images."""
    _, query, chosen = request.text.split(" ", 2)
    try:
        if import_labels(services.store, {query: chosen}, request.created).missing:
            raise DataError("The query is no longer in the log.")
    except DataError as error:
        services.notify(request, str(error))
        services.finish(request, "failed")
        return
    services.audit(request, "label", "done", detail=request.text)
    services.slack.post(request.channel, label_message(query, chosen, request), request.thread)
    services.finish(request, "ended")


def labels_message(week: Week, shown: Sequence[RandomQuery], files: Sequence[str], labels: Sequence[str]) -> Message:
    """A message that shows each query of ``shown`` with its image and a class picker.

    The release's answer is not shown, because it would suggest a label.
    """
    title = f"{len(week.labels)} of {WEEKLY} labeled this week"
    blocks: list[Block] = [
        section(f"*Random live queries: {title}*"),
        context("Their labels measure accuracy and never enter the dataset. Leave out an image that you cannot name."),
    ]
    for each, file in zip(shown, files, strict=True):
        values = {name: f"{each.id} {name}" for name in labels if len(name) <= LABEL_MAX_CHARACTERS}
        options = [(name, value) for name, value in values.items() if len(value) <= _VALUE_MAX_CHARACTERS]
        blocks.append(image(file, "live query"))
        if options:
            blocks += actions(select("Class", LABEL, dict(options[:OPTIONS_MAX])))
    if len(labels) > OPTIONS_MAX:
        blocks.append(context(f"The pickers have {OPTIONS_MAX} of {len(labels)} classes; the console lists all."))
    text = f"{quantity(len(shown), 'random live query', 'random live queries')} to label"
    return Message(text=text, blocks=tuple(blocks))


def label_message(query: str, label: str, request: Request) -> Message:
    """A message that reports a user's label. Choosing a different class in the picker
    replaces the label.
    """
    text = f"{code(query[:8])} labeled {code(label)} by {mention(request.by)}"
    return Message(text=text, blocks=(section(text),))
