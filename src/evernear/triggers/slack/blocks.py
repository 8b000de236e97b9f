"""The bot's messages, and escaping for untrusted text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any, Literal

from slack_sdk.models.blocks import (
    ActionsBlock,
    Block,
    ButtonElement,
    ConfirmObject,
    ContextBlock,
    HeaderBlock,
    MarkdownTextObject,
    PlainTextObject,
    SectionBlock,
)

from evernear.common.output import printable
from evernear.common.progress import duration as seconds_in_words
from evernear.errors import EvernearError
from evernear.kubeflow.runs import State
from evernear.triggers.requests import Person

TEXT_MAX, FIELD_MAX, HEADER_MAX = 3000, 2000, 150
"""Slack's limits, in characters, for a section, a field and a header."""
LINK = "link"
EMOJI = {
    State.PENDING: ":white_circle:",
    State.RUNNING: ":hourglass_flowing_sand:",
    State.SUCCEEDED: ":white_check_mark:",
    State.SKIPPED: ":heavy_minus_sign:",
    State.FAILED: ":x:",
    State.CANCELING: ":octagonal_sign:",
    State.CANCELED: ":octagonal_sign:",
    State.PAUSED: ":double_vertical_bar:",
}


@dataclass(frozen=True)
class Message:
    """``text`` is for notifications and for clients that do not render blocks."""

    text: str
    blocks: tuple[Block, ...] = ()


def line(text: str) -> Message:
    """A message of one line. ``text`` is untrusted plain text."""
    return paragraph(escape(text))


def paragraph(text: str) -> Message:
    return Message(text=text, blocks=(section(text),))


def error_text(error: Exception) -> str:
    """The message of an expected error. An unexpected error has an untrusted message, so only its
    type is shown."""
    if isinstance(error, EvernearError):
        return str(error)
    return f"An internal error occurred ({type(error).__name__}); the bot's log has the details."


def escape(text: str) -> str:
    """Escape untrusted text for Slack's mrkdwn format. The result is one line without links or
    mentions. Text that Slack parses consists of literals in this package and of strings that passed
    through this function, such as names, versions, sentences and ids. See
    https://docs.slack.dev/messaging/formatting-message-text#escaping"""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def mention(person: Person) -> str:
    """A mention, or the escaped name of a person without an id, such as the watcher."""
    return f"<@{person.id}>" if re.fullmatch(r"[UW]\w+", person.id, re.ASCII) else escape(person.name)


def date(at: datetime) -> str:
    """Format a time in the reader's time zone."""
    return f"<!date^{int(at.timestamp())}^{{date_short_pretty}} {{time}}|{at:%Y-%m-%d %H:%M} UTC>"


def duration(time: timedelta) -> str:
    return seconds_in_words(max(0.0, time.total_seconds()))


def link(url: str, name: str) -> str:
    """A link, or only the escaped name if there is no URL."""
    if not url.startswith("http"):
        return escape(name)
    return f"<{escape(url).replace('|', '%7C')}|{escape(name).replace('|', '/')}>"


def code(text: str) -> str:
    return "`" + escape(text).replace("`", "'") + "`"


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 2] + " …"


def join_lines(lines: Sequence[str]) -> str:
    """Join as many whole lines as fit into a section. A truncated line could end inside a link."""
    ends = accumulate(len(line) + 1 for line in lines)
    fitting = [line for line, end in zip(lines, ends, strict=True) if end < TEXT_MAX]
    return "\n".join([*fitting, "…"] if len(fitting) < len(lines) else fitting)


def header(text: str) -> Block:
    """The text is plain text with emoji."""
    return HeaderBlock(text=PlainTextObject(text=cut(printable(text), HEADER_MAX), emoji=True))


def section(text: str) -> Block:
    return SectionBlock(text=_mrkdwn(text))


def fields(texts: Mapping[str, str]) -> Block:
    return SectionBlock(fields=[_mrkdwn(f"*{title}*\n{text}", FIELD_MAX) for title, text in texts.items()])


def context(text: str) -> Block:
    return ContextBlock(elements=[_mrkdwn(text)])


def actions(*buttons: ButtonElement) -> list[Block]:
    """A row of buttons. Empty without buttons."""
    return [ActionsBlock(elements=buttons)] if buttons else []


def button(
    text: str, action: str, value: str, style: Literal["primary"] | None = None, url: str | None = None
) -> ButtonElement:
    """A button that sends ``value`` to the handler of ``action``."""
    return ButtonElement(text=_plain(text), action_id=action, value=value, style=style, url=url)


def link_button(url: str, value: str) -> list[ButtonElement]:
    """The button that opens the page of a run. The list is empty if the URL is unknown."""
    return [button("Open in Kubeflow", LINK, value, url=url)] if url.startswith("http") else []


def danger_button(text: str, action: str, value: str, question: str, explanation: str) -> ButtonElement:
    """A red button that asks for confirmation."""
    confirm = ConfirmObject(
        title=_plain(question),
        text=_plain(cut(printable(explanation), 300)),
        confirm=_plain(text),
        deny=_plain("Cancel"),
        style="danger",
    )
    return ButtonElement(text=_plain(text), action_id=action, value=value, style="danger", confirm=confirm)


def as_text(value: Any) -> str:
    return cut(value if isinstance(value, str) else json.dumps(value), 100)


def _plain(text: str) -> PlainTextObject:
    """Text that Slack shows verbatim, without markup, links or mentions. slack_sdk would convert a
    plain string to mrkdwn."""
    return PlainTextObject(text=printable(text))


def _mrkdwn(text: str, length: int = TEXT_MAX) -> MarkdownTextObject:
    return MarkdownTextObject(text=cut(text, length))
