"""Block Kit validation: by the models of the SDK, and beyond them after
https://docs.slack.dev/reference/block-kit."""

import re
from collections.abc import Iterator
from typing import Any

from slack_sdk.errors import SlackObjectFormationError
from slack_sdk.models.blocks import Block as Model

Block = dict[str, Any]
MENTIONS = re.compile(r"<(?:@[UW]\w+|#[CG]\w+|!date\^\d+\^[^|<>]+\|[^<>]+|https?://[^|<>]+(?:\|[^<>]+)?)>")


def faults(blocks: list[Block]) -> list[str]:
    """Return the reasons why Slack would reject the blocks with ``invalid_blocks``; empty if they
    are valid."""
    result = [f"{len(blocks)} blocks, at most 50"] if len(blocks) > 50 else []
    for number, block in enumerate(blocks):
        result += [f"blocks/{number}: {fault}" for fault in _faults(block)]
    return result


def buttons(blocks: list[Block]) -> list[Block]:
    """Return all buttons of a message."""
    elements = (element for block in blocks if block["type"] == "actions" for element in block["elements"])
    return [element for element in elements if element["type"] == "button"]


def visible(blocks: list[Block]) -> str:
    """Return all text of a message, as a client without blocks shows it."""
    texts: list[str] = []
    for block in blocks:
        if "text" in block:
            texts.append(block["text"]["text"])
        texts += [field["text"] for field in block.get("fields", ())]
        for element in block.get("elements", ()):
            text = element["text"]
            texts.append(text if isinstance(text, str) else f"[{text['text']}]")
    return "\n".join(texts)


def _faults(block: Block) -> Iterator[str]:
    try:
        parsed = Model.parse(block)
        if parsed is None or type(parsed) is Model:
            yield f"unknown type {block.get('type')!r}"
        else:
            parsed.to_dict()
    except SlackObjectFormationError as error:
        yield str(error)
    elements = block.get("elements", [])
    if block.get("type") in ("actions", "context") and not elements:
        yield "no elements"
    ids = [element["action_id"] for element in elements if "action_id" in element]
    if len(set(ids)) < len(ids):
        yield "a duplicate action_id"
    limits = [(block["text"], 3000)] if "text" in block else []
    limits += [(field, 2000) for field in block.get("fields", ())]
    limits += [(element, 3000) for element in elements if isinstance(element.get("text"), str)]
    for text, longest in limits:
        if not 1 <= len(text["text"]) <= longest:
            yield f"text of {len(text['text'])} characters, 1 to {longest}"
        # A rule of evernear, not of Slack: text other than its own mentions, dates and links is
        # escaped.
        rest = MENTIONS.sub("", text["text"]) if text["type"] == "mrkdwn" else ""
        if "<" in rest or ">" in rest:
            yield f"unescaped text: {text['text']!r}"
