from typing import Literal

from pydantic import Field

from evernear.settings.section import Host, Section


class SlackSettings(Section):
    """The Slack bot. Tokens come from the environment: SLACK_BOT_TOKEN, SLACK_APP_TOKEN,
    SLACK_SIGNING_SECRET. The ``permissions`` section lists who may do what."""

    channel: str = Field(default="", description="Id of the channel for proposals and for outcomes of other runs.")
    mode: Literal["socket", "http"] = Field(
        default="socket",
        description="socket: the bot connects to Slack and needs no public URL; http: Slack calls the bot.",
    )
    host: Host = Field(default="127.0.0.1", description="Address to bind in mode http.")
    port: int = Field(default=3000, ge=0, le=65535, description="Port of the HTTP server; 0: any free one.")
    api_url: str = Field(
        default="https://slack.com/api/", description="URL of Slack's Web API; GovSlack uses another one."
    )
