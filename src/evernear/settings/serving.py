"""The settings of TorchServe and of the preprocessing server, and the limits that nobody tunes."""

from typing import Literal

from pydantic import Field

from evernear.settings.section import Host, PixelLimit, Port, Section

MODEL_NAME = "embedding"
"""Name of the model in URLs. A server serves one model."""
QUEUE_SIZE = 512
"""Requests that may wait; further ones get 503. More would time out before their turn."""
RESPONSE_TIMEOUT_S = 30
"""Time for a batch, which takes less than a second; a worker that takes longer is replaced."""
STARTUP_TIMEOUT_S = 120
"""Time for a release to become ready. The largest index loads in a tenth of it."""
HEAP_SIZE_BYTES = 512 * 2**20
"""Java heap of TorchServe. Requests in flight may use a quarter of it; further ones get 503."""


class ServingSettings(Section):
    """TorchServe. ``batch_size``, ``max_request_size_bytes`` and ``max_pixels`` are stored in the
    release."""

    host: Host = Field(default="127.0.0.1", description="Address to bind.")
    inference_port: Port = Field(default=8080, description="Predictions over REST.")
    management_port: Port = Field(default=8081, description="Management over REST, always on loopback.")
    metrics_port: Port = Field(default=8082, description="Prometheus metrics.")
    grpc_inference_port: Port = Field(default=7070, description="Predictions over gRPC.")
    grpc_management_port: Port = Field(default=7071, description="Management over gRPC, always on loopback.")
    workers: int = Field(default=1, ge=1, le=256, description="Processes that recognize images.")
    batch_size: int = Field(default=32, ge=1, le=1024, description="Largest number of requests in a batch.")
    max_request_size_bytes: int = Field(
        default=6_553_500, ge=1024, le=HEAP_SIZE_BYTES // 4, description="Larger requests get 413."
    )
    max_pixels: PixelLimit = Field(
        default=25_000_000, description="Largest width times height of an image; larger images get 400."
    )
    query_log: Literal["off", "figures", "images"] = Field(
        default="figures", description="What to log of sampled live queries, from which the watcher computes drift."
    )


MAX_BODIES_SIZE_BYTES = 64 * 2**20
"""Total size of the bodies in flight; further requests get 503."""
UPLOAD_TIMEOUT_S = 10.0
"""Time limit for receiving the body of a request: 10 MiB at 8 Mbit/s."""
LARGE_DECODES = 1
"""Images of more than a megapixel to decode concurrently; each needs memory."""
PREP_TIMEOUT_S = 10.0
"""Time for a request to the preprocessing server, including queueing and retries."""


class PrepSettings(Section):
    """The preprocessing server in front of the predictor."""

    host: Host = Field(default="127.0.0.1", description="Address to bind.")
    port: Port = Field(default=8090, description="Port of the HTTP API.")
    predictor_host: Host | None = Field(
        default=None, description="Host of TorchServe's gRPC API. Default: the server of the working directory."
    )
    predictor_fallback_host: Host | None = Field(
        default=None,
        description="Host to call if no address of ``predictor_host`` answers, such as a ClusterIP Service. Default: "
        "none.",
    )
    predictor_tls: bool = Field(default=False, description="Use TLS to both hosts.")
    max_request_size_bytes: int = Field(
        default=10 * 2**20,
        ge=1024,
        le=MAX_BODIES_SIZE_BYTES,
        description="Largest JSON body. Base64 makes an image a third larger.",
    )
