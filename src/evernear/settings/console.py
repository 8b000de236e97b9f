"""The settings of the ``console`` section."""

from ipaddress import ip_network
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from evernear.settings.section import Host, LocalPath, Section


def _network(text: str) -> str:
    ip_network(text)  # its ValueError quotes the text
    return text


class ConsoleSettings(Section):
    """The console, a web page on which users try and label images, reindex, and decide
    which release is live.

    Without ``identity_header``, anyone with the token that `evernear console` prints
    may do everything. With ``identity_header``, a trusted proxy sends each user's name.
    The lists ``may_label``, ``may_start`` and ``may_promote`` then set the permissions.
    A list contains the names of users, or * for everyone. An empty list permits no one.
    If all lists are empty, the console is read-only.
    """

    host: Host = Field(default="127.0.0.1", description="Address to bind. Others than loopback need TLS or a proxy.")
    port: int = Field(default=8095, ge=0, le=65535, description="Port of the console; 0: any free one.")
    certificate: LocalPath | None = Field(default=None, description="File with the TLS certificate chain (PEM).")
    private_key: LocalPath | None = Field(default=None, description="File with the key of the certificate (PEM).")
    identity_header: str = Field(
        default="", description="Header in which a trusted proxy sends the person, such as X-Auth-Request-Email."
    )
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = Field(
        default=(), description="Addresses or networks of the proxies, such as 10.0.0.0/8."
    )
    may_label: tuple[str, ...] = Field(default=(), description="Who may name images, and undo that.")
    may_start: tuple[str, ...] = Field(default=(), description="Who may start a reindex.")
    may_promote: tuple[str, ...] = Field(default=(), description="Who may promote a release, and roll back.")
    max_request_size_bytes: int = Field(default=10 * 2**20, ge=1024, description="Largest image file.")
    max_bodies_size_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="Total size of the images in flight; further requests get 503."
    )
    upload_timeout_s: float = Field(default=30.0, gt=0.0, description="Time limit for receiving an image.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.identity_header) != bool(self.trusted_proxies):
            raise ValueError("identity_header and trusted_proxies belong together; set both or neither")
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key belong together; set both or neither")
        if self.max_bodies_size_bytes < self.max_request_size_bytes:
            raise ValueError("max_bodies_size_bytes is smaller than max_request_size_bytes, a single body")
        return self
