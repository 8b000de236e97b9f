"""The settings of the ``slack`` section."""

from typing import Literal

from pydantic import Field

from evernear.settings.section import Host, Section


class SlackSettings(Section):
    """The Slack bot. Tokens come from the environment: SLACK_BOT_TOKEN,
    SLACK_APP_TOKEN, SLACK_SIGNING_SECRET.

    Permissions are lists of the IDs of users (U..., W...), user groups (S...) and
    channels (C..., G...). In Slack, "Copy member ID" and "Copy link" show these IDs.
    All members of a listed user group or channel are permitted. An empty list permits
    no one. Commands that only read need no permission.
    """

    channel: str = Field(default="", description="Id of the channel for proposals and for outcomes of other runs.")
    may_start: tuple[str, ...] = Field(default=(), description="Who may start runs and answer proposals.")
    may_stop: tuple[str, ...] = Field(default=(), description="Who may stop runs.")
    may_promote: tuple[str, ...] = Field(default=(), description="Who may promote a release that the gate held.")
    may_roll_back: tuple[str, ...] = Field(default=(), description="Who may roll back to the previous champion.")
    may_schedule: tuple[str, ...] = Field(default=(), description="Who may pause and resume the watcher.")
    parameters: tuple[str, ...] = Field(
        default=(
            "preset",
            "train.epochs",
            "train.batch_size",
            "train.learning_rate",
            "train.weight_decay",
            "train.margin",
            "train.scale",
            "train.embedding_dim",
            "train.width",
            "train.augment",
            "train.seed",
            "index.type",
            "index.search",
            "index.label_by",
            "index.k",
        ),
        description="Settings and pipeline parameters that /retrain may set, by full name. If they include "
        "settings of the gate or of the data, anyone who may start a run also decides what is promoted.",
    )
    prompt_timeout_s: int = Field(default=4 * 3600, ge=60, description="Seconds before an unanswered prompt expires.")
    start_timeout_s: int = Field(
        default=3600, ge=1, description="Time to retry starting a run while Kubeflow Pipelines is unavailable."
    )
    poll_s: float = Field(default=5.0, gt=0.0, description="Interval between polls of runs and proposals.")
    update_interval_s: float = Field(default=15.0, ge=1.0, description="Shortest time between edits of a message.")
    mode: Literal["socket", "http"] = Field(
        default="socket",
        description="socket: the bot connects to Slack and needs no public URL; http: Slack calls the bot.",
    )
    host: Host = Field(default="127.0.0.1", description="Address to bind in mode http.")
    port: int = Field(default=3000, ge=0, le=65535, description="Port of the HTTP server; 0: any free one.")
    max_request_size_bytes: int = Field(default=2**20, ge=1024, description="Larger requests get 413.")
    api_url: str = Field(
        default="https://slack.com/api/", description="URL of Slack's Web API; GovSlack uses another one."
    )
