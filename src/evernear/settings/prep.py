"""The settings of the ``prep`` section."""

from typing import Self

from pydantic import Field, model_validator

from evernear.settings.section import Host, Port, Section


class PrepSettings(Section):
    """The preprocessing server in front of the predictor."""

    host: Host = Field(default="127.0.0.1", description="Address to bind.")
    port: Port = Field(default=8090, description="Port of the HTTP API.")
    predictor_host: Host = Field(
        default="", description="Host of TorchServe's gRPC API; if empty, the server of the working directory."
    )
    predictor_fallback_host: Host = Field(
        default="", description="Host to call if no address of ``predictor_host`` answers, such as a ClusterIP Service."
    )
    predictor_tls: bool = Field(default=False, description="Use TLS to both hosts.")
    timeout_s: float = Field(default=10.0, gt=0.0, description="Time for a request, including queueing and retries.")
    attempts: int = Field(
        default=4, ge=1, le=5, description="Attempts to reach the predictor for a request; gRPC allows 5."
    )
    in_flight: int = Field(default=64, ge=1, description="Concurrent requests to the predictor; others wait.")
    max_request_size_bytes: int = Field(
        default=10 * 2**20, ge=1024, description="Largest JSON body. Base64 makes an image a third larger."
    )
    max_bodies_size_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="Total size of the bodies in flight; further requests get 503."
    )
    upload_timeout_s: float = Field(default=10.0, gt=0.0, description="Time limit for receiving the body of a request.")
    large_decodes: int = Field(
        default=1, ge=1, description="Images of more than a megapixel to decode concurrently; each needs memory."
    )

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.max_bodies_size_bytes < self.max_request_size_bytes:
            raise ValueError("max_bodies_size_bytes is smaller than max_request_size_bytes, a single body")
        return self
