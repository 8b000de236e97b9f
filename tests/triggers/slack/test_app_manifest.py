"""The app's manifest asks for what the bot uses, and for nothing else."""

import json
import re
from pathlib import Path

import jsonschema
import yaml

from evernear.triggers.slack import app as handlers
from evernear.triggers.slack import web
from tests.loopback.slack import server

ROOT = Path(__file__).parents[3]
MANIFEST = yaml.safe_load((ROOT / "deploy" / "slack" / "manifest.yaml").read_text())
SCOPES = {
    "chat_postMessage": {"chat:write", "chat:write.public"},
    "chat_postEphemeral": {"chat:write"},
    "chat_update": {"chat:write"},
    "files_upload_v2": {"files:write"},
    "usergroups_users_list": {"usergroups:read"},
    "auth_test": set(),
}
"""Of the methods that the bot calls, after https://docs.slack.dev/reference/methods."""


def test_slack_would_take_it() -> None:
    schema = json.loads((ROOT / "tests" / "loopback" / "slack" / "manifest.schema.1.0.0.json").read_text())
    jsonschema.Draft7Validator(schema).validate(MANIFEST)


def test_its_scopes_are_those_of_the_calls_that_the_bot_makes() -> None:
    called = set(re.findall(r"_client\.(\w+)\(", Path(web.__file__).read_text()))
    assert called == set(SCOPES)
    asked = set(MANIFEST["oauth_config"]["scopes"]["bot"])
    assert asked == {"commands", "app_mentions:read"}.union(*(SCOPES[call] for call in called))
    assert asked == set(server.SCOPES.split(",")), "the loopback Slack grants no more"
    assert set(MANIFEST["oauth_config"]["scopes"]) == {"bot"}


def test_its_commands_and_events_are_those_that_are_handled() -> None:
    source = Path(handlers.__file__).read_text()
    commands = {command["command"] for command in MANIFEST["features"]["slash_commands"]}
    assert commands == set(re.findall(r'app\.command\("(.+?)"\)', source))
    assert MANIFEST["settings"]["event_subscriptions"]["bot_events"] == re.findall(r'app\.event\("(.+?)"\)', source)
    assert MANIFEST["settings"]["socket_mode_enabled"] is True
