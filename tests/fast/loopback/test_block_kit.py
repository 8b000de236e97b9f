"""The fake Slack refuses blocks that Slack refuses."""

from typing import Any

import pytest

from tests.loopback.slack import block_kit

Block = dict[str, Any]


def section(text: str, **fields: Any) -> Block:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}} | fields


def button(label: str = "Start", **fields: Any) -> Block:
    text = {"type": "plain_text", "text": label}
    return {"type": "actions", "elements": [{"type": "button", "text": text, "action_id": "a"} | fields]}


@pytest.mark.parametrize(
    ("blocks", "fault"),
    [
        ([section("a <https://x.example|link>"), button(style="primary"), {"type": "divider"}], ""),
        ([{"type": "divider"}] * 51, "51 blocks"),
        ([section("x" * 3001)], "text attribute cannot exceed 3000"),
        ([section("", fields=[])], "text of 0 characters"),
        ([section("x", fields=[{"type": "mrkdwn", "text": "x" * 2001}])], "text of 2001 characters"),
        ([section("<!channel>")], "unescaped text"),
        ([{"type": "section"}], "text or fields"),
        ([{"type": "nothing"}], "unknown type 'nothing'"),
        ([{"type": "context", "elements": []}], "no elements"),
        ([button("x" * 76)], "text attribute cannot exceed 75"),
        ([button(style="blue")], "style"),
        ([button(value="x" * 2001)], "value attribute cannot exceed 2000"),
        ([{"type": "actions", "elements": button()["elements"] * 2}], "duplicate action_id"),
    ],
)
def test_blocks_are_validated(blocks: list[Block], fault: str) -> None:
    faults = "; ".join(block_kit.faults(blocks))
    assert fault in faults
    assert bool(faults) == bool(fault)
