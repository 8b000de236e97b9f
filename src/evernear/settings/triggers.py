"""Settings of the triggers: Kubeflow Pipelines, Slack and the watcher."""

from typing import Literal

from pydantic import Field

from evernear.settings.section import Fraction, Host, LocalPath, Section


class PipelineSettings(Section):
    """The Kubeflow Pipelines server.

    Credentials come from the environment: KFP_TOKEN (a bearer token) or KFP_COOKIES (``name=value; ...``, a session
    of Dex or IAP). With neither, a pod uses its service account's token for KFP.
    """

    endpoint: str = Field(
        default="",
        pattern=r"^(https?://[^\s]+)?$",
        description="URL of the KFP API; if empty, ml-pipeline.kubeflow of the cluster that this process runs in.",
    )
    namespace: str = Field(default="", description="The user's namespace, on a multi-user KFP.")
    ui_url: str = Field(default="", description="URL of the KFP UI, for links; if empty, the endpoint.")
    ca_file: LocalPath | None = Field(default=None, description="CA certificates (PEM) that verify the endpoint.")
    experiment: str = Field(default="evernear", min_length=1, description="KFP experiment of the runs.")
    timeout_s: float = Field(default=30.0, gt=0.0, description="Timeout of an API call.")
    attempts: int = Field(
        default=4, ge=1, le=10, description="Attempts of an API call that cannot connect or gets 5xx."
    )


class SlackSettings(Section):
    """The Slack bot. Tokens come from the environment: SLACK_BOT_TOKEN, SLACK_APP_TOKEN, SLACK_SIGNING_SECRET.

    Permissions are lists of ids, as shown by Slack's "Copy member ID" and "Copy link": users (U..., W...), user groups
    (S...) and channels (C..., G...: all members). An empty list permits no one. Reading needs no permission.
    """

    channel: str = Field(default="", description="Id of the channel for proposals and for outcomes of other runs.")
    may_start: tuple[str, ...] = Field(default=(), description="Who may start runs and answer proposals.")
    may_stop: tuple[str, ...] = Field(default=(), description="Who may stop runs.")
    may_promote: tuple[str, ...] = Field(default=(), description="Who may promote a release that the gate held.")
    may_roll_back: tuple[str, ...] = Field(default=(), description="Who may roll back to the previous champion.")
    may_schedule: tuple[str, ...] = Field(default=(), description="Who may pause and resume the watcher.")
    may_label: tuple[str, ...] = Field(default=(), description="Who may see live queries and label them.")
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


class WatchSettings(Section):
    """When the watcher proposes to retrain or to reindex."""

    interval_s: int = Field(default=3600, ge=1, description="Time between two checks of the source and live queries.")
    policy: Literal["ask", "start"] = Field(default="ask", description="Ask in Slack, or start the run immediately.")
    cooldown_s: int = Field(
        default=6 * 3600, ge=0, description="Time after an answer or a start before the same run is proposed again."
    )
    bucket_events: bool = Field(
        default=True,
        description="Also check as soon as MinIO reports a change in the bucket.",
    )
    debounce_s: float = Field(default=60.0, gt=0.0, description="Quiet time after the last change before a check.")
    new_train_images: int = Field(
        default=100, ge=1, description="New training images from which training is proposed, with new_train_share."
    )
    new_train_share: float = Field(
        default=0.05, ge=0.0, description="The same, as a share of the images that the network was trained on."
    )
    new_gallery_images: int = Field(default=20, ge=1, description="New gallery images that propose a reindex.")
    drift_window_s: int = Field(default=24 * 3600, ge=1, description="Age of the live queries that a check reads.")
    min_queries: int = Field(default=200, ge=20, description="Smallest sample of live queries to test for drift.")
    false_alarm_rate: float = Field(
        default=0.001, ge=1e-4, lt=0.5, description="Largest share of checks that may report drift by chance."
    )
    unknown_rise: Fraction = Field(
        default=0.05, description="Smallest rise of the unknown rate to report, as a share of all queries."
    )
    distance_shift: Fraction = Field(
        default=0.15, description="Smallest Kolmogorov-Smirnov statistic of the gallery distances to report."
    )
    embedding_shift: Fraction = Field(
        default=0.02, description="Smallest energy coefficient of the embeddings to report."
    )
    query_retention_s: int = Field(
        default=14 * 24 * 3600, ge=3600, description="Age at which logged queries are deleted."
    )
    prune_keep: int = Field(
        default=0,
        ge=0,
        description="Number of newest releases and runs to keep when the watcher prunes the store, once a day; 0: "
        "it does not.",
    )
    health_host: Host = Field(default="127.0.0.1", description="Address of the health probe.")
    health_port: int = Field(default=8091, ge=0, le=65535, description="Port of the health probe; 0: none.")
