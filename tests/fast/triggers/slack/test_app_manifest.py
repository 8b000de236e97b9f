"""The app's manifest requests the scopes, commands and events that the bot uses, and no others."""

import json
import re
from pathlib import Path

import jsonschema
import yaml

from evernear.triggers.slack import app, client
from evernear.triggers.slack.commands import COMMANDS
from tests import ROOT
from tests.loopback.slack import server

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


def test_manifest_matches_slacks_schema() -> None:
    schema = json.loads((ROOT / "tests" / "loopback" / "slack" / "manifest.schema.1.0.0.json").read_text())
    jsonschema.Draft7Validator(schema).validate(MANIFEST)


def test_scopes_match_the_calls_of_the_bot() -> None:
    called = set(re.findall(r"self\.(\w+)\(", Path(client.__file__).read_text())) - {"post"} | {"auth_test"}
    assert called == set(SCOPES)
    prompt = set(MANIFEST["oauth_config"]["scopes"]["bot"])
    assert prompt == {"commands", "app_mentions:read"}.union(*(SCOPES[call] for call in called))
    assert prompt == set(server.SCOPES.split(",")), "the loopback Slack grants no more"
    assert set(MANIFEST["oauth_config"]["scopes"]) == {"bot"}


def test_commands_and_events_have_handlers() -> None:
    source = Path(app.__file__).read_text()
    commands = {command["command"] for command in MANIFEST["features"]["slash_commands"]}
    assert commands == {name.partition(" ")[0] for name in COMMANDS}
    assert MANIFEST["settings"]["event_subscriptions"]["bot_events"] == re.findall(r'app\.event\("(.+?)"\)', source)
    assert MANIFEST["settings"]["socket_mode_enabled"] is True
