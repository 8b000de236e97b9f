from ipaddress import ip_network
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from evernear.settings.section import Host, LocalPath, Section


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
        default=(), description="Addresses or networks of the proxies, such as 10.0.0.0/8."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.identity_header) != bool(self.trusted_proxies):
            raise ValueError("identity_header and trusted_proxies belong together; set both or neither")
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key belong together; set both or neither")
        return self
