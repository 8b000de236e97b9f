"""The settings of the ``serving`` section."""

from typing import Literal, Self

from pydantic import Field, model_validator

from evernear.settings.section import Host, PixelLimit, Port, Section


class ServingSettings(Section):
    """TorchServe. The settings from ``batch_size`` to ``max_pixels`` are stored in the
    release."""

    model_name: str = Field(
        default="embedding", pattern=r"^[a-z][a-z0-9-]{0,62}$", description="Name of the model in URLs."
    )
    host: Host = Field(default="127.0.0.1", description="Address to bind.")
    inference_port: Port = Field(default=8080, description="Predictions over REST.")
    management_port: Port = Field(default=8081, description="Management over REST, always on loopback.")
    metrics_port: Port = Field(default=8082, description="Prometheus metrics.")
    grpc_inference_port: Port = Field(default=7070, description="Predictions over gRPC.")
    grpc_management_port: Port = Field(default=7071, description="Management over gRPC, always on loopback.")
    workers: int = Field(default=1, ge=1, le=256, description="Processes that recognize images.")
    threads: int = Field(
        default=1, ge=1, le=256, description="Threads of each worker; workers times threads should match the cores."
    )
    batch_size: int = Field(default=32, ge=1, le=1024, description="Largest number of requests in a batch.")
    max_batch_delay_ms: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Longest wait for a full batch, if the previous batch had several requests.",
    )
    queue_size: int = Field(default=512, ge=1, description="Requests that may wait; further ones get 503.")
    response_timeout_s: int = Field(
        default=30, ge=1, description="Time for a batch; a worker that takes longer is replaced."
    )
    startup_timeout_s: int = Field(default=120, ge=1, description="Time for a release to become ready.")
    drain_timeout_s: int = Field(default=30, ge=0, description="Time to finish in-flight requests at shutdown.")
    endpoint_removal_s: int = Field(default=10, ge=0, description="preStop delay while the endpoint is removed.")
    model_api: bool = Field(
        default=True,
        description="Allow models to be registered on the running server, as deployments do. If false, the server "
        "serves the models in its model store at startup.",
    )
    max_request_size_bytes: int = Field(default=6_553_500, ge=1024, description="Larger requests get 413.")
    max_pixels: PixelLimit = Field(
        default=25_000_000, description="Largest width times height of an image; larger images get 400."
    )
    heap_size_bytes: int = Field(
        default=512 * 2**20,
        ge=128 * 2**20,
        description="Java heap of TorchServe. Requests in flight may use a quarter of it; further ones get 503.",
    )
    keep_registered: int = Field(default=3, ge=1, description="Releases that stay registered, for a fast rollback.")
    follow_poll_s: float = Field(
        default=30.0,
        gt=0.0,
        description="Time until `evernear serve --follow` reads the champion's pointer again.",
    )
    smoke_queries: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Largest number of stored queries that a release must answer before it goes live.",
    )
    query_log: Literal["off", "figures", "images"] = Field(
        default="figures", description="What to log of sampled live queries, from which the watcher computes drift."
    )
    query_log_sample: int = Field(
        default=100, ge=1, le=10_000, description="Queries that each worker samples in a period."
    )
    query_log_period_s: float = Field(default=300.0, gt=0.0, description="Time between two log files of a worker.")
    query_log_size_bytes: int = Field(
        default=64 * 2**20, ge=2**20, description="Log files buffered on this machine; the oldest are dropped first."
    )

    @model_validator(mode="after")
    def _request_fits_the_heap(self) -> Self:
        if self.max_request_size_bytes > self.heap_size_bytes // 4:
            raise ValueError(
                f"max_request_size_bytes is {self.max_request_size_bytes}; it can be at most a quarter of "
                f"heap_size_bytes, {self.heap_size_bytes // 4}"
            )
        return self
