from pydantic import Field

from evernear.settings.section import Host, Port, Section

MAX_BODIES_SIZE_BYTES = 64 * 2**20
"""Total size of the bodies in flight; further requests get 503."""
UPLOAD_TIMEOUT_S = 10.0
"""Time limit for receiving the body of a request: 10 MiB at 8 Mbit/s."""
LARGE_DECODES = 1
"""Images of more than a megapixel to decode concurrently; each needs memory."""
TIMEOUT_S = 10.0
"""Time for a request, including queueing and retries."""


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
