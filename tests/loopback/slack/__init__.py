"""A Slack on loopback: Web API, Socket Mode, and people who click what they see."""

from tests.loopback.slack.people import Click, Person, signed
from tests.loopback.slack.server import SlackServer

__all__ = ["Click", "Person", "SlackServer", "signed"]
