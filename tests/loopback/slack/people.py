"""Payloads that Slack delivers for commands, mentions and clicks, and their signatures."""

import hashlib
import hmac
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

TEAM = "T0EVERNEAR"
_numbers = itertools.count(1)
Payload = dict[str, Any]


@dataclass(frozen=True)
class Person:
    """A user of a workspace."""

    id: str
    name: str
    team: str = TEAM

    def types(self, text: str, channel: str, response_url: str) -> Payload:
        """Return the payload of a slash command."""
        command, _, rest = text.partition(" ")
        return {
            "token": "deprecated",
            "team_id": self.team,
            "team_domain": "evernear",
            "channel_id": channel,
            "channel_name": "training",
            "user_id": self.id,
            "user_name": self.name,
            "command": command,
            "text": rest,
            "api_app_id": "A0EVERNEAR",
            "is_enterprise_install": "false",
            "response_url": response_url,
            "trigger_id": _trigger_id(),
        }

    def mentions(self, text: str, channel: str) -> Payload:
        """Return the event of a mention."""
        ts = f"{time.time():.6f}"
        event = {"type": "app_mention", "user": self.id, "text": text, "ts": ts, "channel": channel, "event_ts": ts}
        return {
            "token": "deprecated",
            "team_id": TEAM,
            "api_app_id": "A0EVERNEAR",
            "type": "event_callback",
            "event_id": f"Ev{next(_numbers):08d}",
            "event_time": int(time.time()),
            "event": {**event, "team": self.team},
            "authorizations": [{"team_id": TEAM, "enterprise_id": None, "user_id": "U0BOT", "is_bot": True}],
        }


@dataclass(frozen=True)
class Click:
    """A click on a button of a message."""

    channel: str
    ts: str
    button: Mapping[str, Any]
    response_url: str
    thread: str | None = None
    is_ephemeral: bool = False
    trigger_id: str = field(default_factory=lambda: _trigger_id())

    def by(self, person: Person) -> Payload:
        """Return the interactive payload of the click."""
        container = {
            "type": "message",
            "message_ts": self.ts,
            "channel_id": self.channel,
            "is_ephemeral": self.is_ephemeral,
        }
        action = {
            key: self.button[key] for key in ("type", "action_id", "text", "value", "style") if key in self.button
        }
        return {
            "type": "block_actions",
            "user": {"id": person.id, "username": person.name, "name": person.name, "team_id": person.team},
            "api_app_id": "A0EVERNEAR",
            "token": "deprecated",
            "container": container | ({"thread_ts": self.thread} if self.thread else {}),
            "trigger_id": self.trigger_id,
            "team": {"id": person.team, "domain": "evernear"},
            "enterprise": None,
            "is_enterprise_install": False,
            "channel": {"id": self.channel, "name": "training"},
            "message": {"type": "message", "ts": self.ts, "user": "U0BOT"},
            "response_url": self.response_url,
            "actions": [action | {"block_id": "b1", "action_ts": f"{time.time():.6f}"}],
        }


def body_of(payload: Payload) -> tuple[str, str]:
    """Return body and content type of the HTTP request for ``payload``."""
    if payload.get("type") == "event_callback":
        return json.dumps(payload), "application/json"
    form = payload if "command" in payload else {"payload": json.dumps(payload)}
    return urlencode(form), "application/x-www-form-urlencoded"


def signed(payload: Payload, secret: str, at_s: float | None = None) -> tuple[str, dict[str, str]]:
    """Return body and headers of a signed request
    (https://docs.slack.dev/authentication/verifying-requests...)."""
    body, content_type = body_of(payload)
    timestamp = str(int(time.time() if at_s is None else at_s))
    digest = hmac.new(secret.encode(), f"v0:{timestamp}:{body}".encode(), hashlib.sha256).hexdigest()
    return body, {
        "content-type": content_type,
        "x-slack-request-timestamp": timestamp,
        "x-slack-signature": f"v0={digest}",
    }


def envelope(payload: Payload, accepts_response: bool = False) -> Payload:
    """Return the Socket Mode envelope for ``payload``."""
    kinds = {"event_callback": "events_api", "block_actions": "interactive"}
    kind = kinds.get(str(payload.get("type")), "slash_commands")
    return {
        "envelope_id": f"00000000-0000-4000-8000-{next(_numbers):012d}",
        "type": kind,
        "accepts_response_payload": kind == "slash_commands" or accepts_response,
        "payload": payload,
    }


def _trigger_id() -> str:
    return f"{next(_numbers)}.{time.time_ns()}.abcdef"
