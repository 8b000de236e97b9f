from typing import Literal

from pydantic import Field

from evernear.settings.section import Host, Section


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
