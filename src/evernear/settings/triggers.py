"""The settings of the watcher, the Slack bot and the console, and who may use the last two."""

from ipaddress import ip_network
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from evernear.settings.section import Host, LocalPath, Section, ServerUrl

Right = Literal["label", "start", "promote"]


class PermissionSettings(Section):
    """Who may change something in Slack and in the console. Reading needs no permission.

    A list contains IDs of Slack: of users (U..., W...), of user groups (S...) and of channels
    (C..., G...), whose members are all permitted. "Copy member ID" and "Copy link" show them. A
    list also contains the names of users that the console's proxy sends, or * for everyone whom it
    lets in. An empty list permits no one.
    """

    label: tuple[str, ...] = Field(default=(), description="Who may name images, and undo that.")
    start: tuple[str, ...] = Field(
        default=(),
        description="Who may start and stop runs, answer proposals, and pause the watcher.",
    )
    promote: tuple[str, ...] = Field(
        default=(), description="Who may promote a release that the gate held, and roll back."
    )


def _network(text: str) -> str:
    ip_network(text)  # its ValueError quotes the text
    return text


class ConsoleSettings(Section):
    """The console, a web page on which users try and label images, reindex, and decide which
    release is live.

    Without ``identity_header``, anyone with the token that `evernear console` prints may do
    everything. With ``identity_header``, a trusted proxy sends each user's name, and the
    ``permissions`` section lists who may do what.
    """

    host: Host = Field(default="127.0.0.1", description="Address to bind. Others than loopback need TLS or a proxy.")
    port: int = Field(default=8095, ge=0, le=65535, description="Port of the console; 0: any free one.")
    certificate: LocalPath | None = Field(default=None, description="File with the TLS certificate chain (PEM).")
    private_key: LocalPath | None = Field(default=None, description="File with the key of the certificate (PEM).")
    identity_header: str = Field(
        default="", description="Header in which a trusted proxy sends the person, such as X-Auth-Request-Email."
    )
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = Field(
        default=(),
        description="Addresses or networks of the proxies, such as 10.0.0.0/8. Only these may send "
        "identity_header and X-Forwarded-Host.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.identity_header and not self.trusted_proxies:
            raise ValueError("identity_header needs trusted_proxies, the addresses of the proxies that set it")
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key belong together; set both or neither")
        return self


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
    api_url: ServerUrl = Field(
        default="https://slack.com/api/", description="URL of Slack's Web API; GovSlack uses another one."
    )


class WatchSettings(Section):
    """When the watcher checks, and what it does then. The bounds of drift are constants of
    `evernear.triggers.watch.observe`."""

    interval_s: int = Field(default=3600, ge=1, description="Time between two checks of the source and live queries.")
    policy: Literal["ask", "start"] = Field(default="ask", description="Ask in Slack, or start the run immediately.")
    cooldown_s: int = Field(
        default=6 * 3600, ge=0, description="Time after a start or an expiry before the same run is proposed again."
    )
    new_train_images: int = Field(
        default=100,
        ge=1,
        description="New training images that propose a training run, if they are also 5% of the images that the "
        "network was trained on.",
    )
    query_retention_s: int = Field(
        default=14 * 24 * 3600,
        ge=3600,
        description="Age at which logged queries, and images that were sent to review, are deleted.",
    )
    prune_keep: int | None = Field(
        default=None,
        ge=1,
        description="Number of newest releases and runs that the watcher keeps when it prunes the store, once a day. "
        "Default: it does not prune.",
    )
    bake_s: int = Field(
        default=900,
        ge=0,
        description="Time after a rollout to Kubernetes in which the watcher compares errors, the p99 of the time that "
        "clients wait for TorchServe (with its queue) and the share of unknown with the release before, and rolls back "
        "by itself if one has risen; 0: none.",
    )
    health_host: Host = Field(default="127.0.0.1", description="Address of the health probe.")
    health_port: int = Field(default=8091, ge=0, le=65535, description="Port of the health probe; 0: none.")
