"""A Slack workspace on loopback: Web API, Socket Mode, and users who click the buttons that they
see."""

from tests.loopback.slack.people import Click, Person, signed
from tests.loopback.slack.server import SlackServer

__all__ = ["Click", "Person", "SlackServer", "signed"]
