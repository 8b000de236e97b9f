"""Block Kit validation, after https://docs.slack.dev/reference/block-kit/blocks and
.../block-elements."""

import re
from collections.abc import Callable
from typing import Any

Block = dict[str, Any]
MENTIONS = re.compile(r"<(?:@[UW]\w+|#[CG]\w+|!date\^\d+\^[^|<>]+\|[^<>]+|https?://[^|<>]+(?:\|[^<>]+)?)>")


def faults(blocks: object) -> list[str]:
    """Return the reasons why Slack would reject the blocks with ``invalid_blocks``; empty if they
    are valid."""
    result: list[str] = []
    if not isinstance(blocks, list):
        return ["blocks is not a list"]
    if len(blocks) > 50:
        result.append(f"{len(blocks)} blocks, at most 50")
    ids = [block["block_id"] for block in blocks if "block_id" in block]
    if len(set(ids)) < len(ids):
        result.append("a block_id twice")
    for number, block in enumerate(blocks):
        check = _BLOCKS.get(block.get("type"))
        block_faults = check(block) if check else [f"unknown type {block.get('type')!r}"]
        result += [f"blocks/{number}: {fault}" for fault in block_faults]
        if len(block.get("block_id", "")) > 255:
            result.append(f"blocks/{number}: block_id is longer than 255")
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


def _section(block: Block) -> list[str]:
    result = _keys(block, {"type", "text", "fields", "block_id", "accessory", "expand"})
    if "text" not in block and "fields" not in block:
        result.append("a section without text or fields")
    if "text" in block:
        result += _text(block["text"], 3000)
    fields = block.get("fields", [])
    if "fields" in block and not 1 <= len(fields) <= 10:
        result.append(f"{len(fields)} fields, 1 to 10")
    for field in fields:
        result += _text(field, 2000)
    return result


def _header(block: Block) -> list[str]:
    return _keys(block, {"type", "text", "block_id"}) + _text(block["text"], 150, "plain_text")


def _context(block: Block) -> list[str]:
    result = _keys(block, {"type", "elements", "block_id"})
    if not 1 <= len(block["elements"]) <= 10:
        result.append(f"{len(block['elements'])} elements, 1 to 10")
    for element in block["elements"]:
        result += _text(element, 3000)
    return result


def _actions(block: Block) -> list[str]:
    result = _keys(block, {"type", "elements", "block_id"})
    if not 1 <= len(block["elements"]) <= 25:
        result.append(f"{len(block['elements'])} elements, 1 to 25")
    ids = [element.get("action_id") for element in block["elements"]]
    if len(set(ids)) < len(ids):
        result.append("a duplicate action_id")
    for element in block["elements"]:
        result += _button(element)
    return result


def _button(button: Block) -> list[str]:
    result = _keys(button, {"type", "text", "action_id", "url", "value", "style", "confirm", "accessibility_label"})
    if button.get("type") != "button":
        return [f"unknown element {button.get('type')!r}"]
    result += _text(button["text"], 75, "plain_text")
    for key, longest in (("action_id", 255), ("value", 2000), ("url", 3000)):
        if key in button and not 1 <= len(button[key]) <= longest:
            result.append(f"{key} of {len(button[key])} characters, 1 to {longest}")
    if "style" in button and button["style"] not in ("primary", "danger"):
        result.append(f"style {button['style']!r}")
    if "confirm" in button:
        result += _confirm(button["confirm"])
    return result


def _confirm(dialog: Block) -> list[str]:
    result = _keys(dialog, {"title", "text", "confirm", "deny", "style"})
    for key, longest in (("title", 100), ("text", 300), ("confirm", 30), ("deny", 30)):
        result += _text(dialog[key], longest, "plain_text")
    return result


def _text(text: Block, longest: int, kind: str | None = None) -> list[str]:
    allowed = {"mrkdwn": {"type", "text", "verbatim"}, "plain_text": {"type", "text", "emoji"}}
    if text.get("type") not in allowed or (kind and text["type"] != kind):
        return [f"text of type {text.get('type')!r}"]
    result = _keys(text, allowed[text["type"]])
    if not 1 <= len(text["text"]) <= longest:
        result.append(f"text of {len(text['text'])} characters, 1 to {longest}")
    # A rule of evernear, not of Slack: text other than its own mentions, dates and links is
    # escaped.
    rest = MENTIONS.sub("", text["text"]) if text["type"] == "mrkdwn" else ""
    if "<" in rest or ">" in rest:
        result.append(f"unescaped text: {text['text']!r}")
    return result


def _keys(block: Block, known: set[str]) -> list[str]:
    return [f"unknown key {key!r}" for key in block if key not in known]


_BLOCKS: dict[Any, Callable[[Block], list[str]]] = {
    "section": _section,
    "header": _header,
    "context": _context,
    "actions": _actions,
    "divider": lambda block: _keys(block, {"type", "block_id"}),
}
