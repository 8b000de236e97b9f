"""The settings of the ``watch`` section."""

from typing import Literal

from pydantic import Field

from evernear.settings.section import Fraction, Host, Section


class WatchSettings(Section):
    """Conditions under which the watcher proposes retraining or reindexing."""

    interval_s: int = Field(default=3600, ge=1, description="Time between two checks of the source and live queries.")
    policy: Literal["ask", "start"] = Field(default="ask", description="Ask in Slack, or start the run immediately.")
    cooldown_s: int = Field(
        default=6 * 3600, ge=0, description="Time after a start or an expiry before the same run is proposed again."
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
    min_queries: int = Field(
        default=200,
        ge=20,
        description="Smallest sample of live queries to test for drift. If fewer of them are independent, a check also "
        "reads older ones, up to query_retention_s.",
    )
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
        default=0.005, description="Smallest energy coefficient of the embeddings to report."
    )
    query_retention_s: int = Field(
        default=14 * 24 * 3600,
        ge=3600,
        description="Age at which logged queries, and images that were sent to review, are deleted.",
    )
    prune_keep: int = Field(
        default=0,
        ge=0,
        description="Number of newest releases and runs to keep when the watcher prunes the store, once a day; 0: "
        "it does not.",
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
