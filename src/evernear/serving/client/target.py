"""The server that a client calls, and the protocol to use."""

import json
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import certifi

from evernear.common.masking import remember, usable
from evernear.errors import SettingsError
from evernear.serving.endpoints import endpoints, home_of, host_and_port, read_key, start_hint
from evernear.settings import RunSettings
from evernear.settings.prep import TIMEOUT_S as PREP_TIMEOUT_S
from evernear.settings.serving import MODEL_NAME, RESPONSE_TIMEOUT_S
from evernear.settings.sources import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

Format = Literal["rest", "grpc", "prep"]


@dataclass(frozen=True)
class Target:
    """A model on a server.

    ``format`` selects TorchServe's REST API, TorchServe's gRPC API, or the preprocessing server.
    ``token`` is called before each request, because TorchServe creates a new token each time it
    starts. ``timeout_s`` applies to one prediction. ``attempts`` is the maximum number of attempts
    for a gRPC call. A call is retried only if the server is unreachable. ``hint`` is the suggested
    fix in the error message for an unreachable server.
    """

    host: str
    port: int
    model: str
    format: Format = "rest"
    token: Callable[[], str | None] = lambda: None
    tls: bool = False
    timeout_s: float = 30.0
    max_size_bytes: int = 6_553_500
    attempts: int = 1
    hint: str = "check its host and port"

    @staticmethod
    def local(settings: RunSettings, format: Format = "rest") -> "Target":
        """The preprocessing server in ``settings`` if ``format`` is ``prep``, otherwise the
        TorchServe server of the working directory.

        Raises:
            ServerUnreachableError: no TorchServe server was started in the working
                directory.
        """
        if format == "prep":
            return replace(
                Target.remote(settings, settings.prep.host, format),
                token=lambda: None,
                timeout_s=PREP_TIMEOUT_S,
                hint="start it with `evernear prep`",
            )
        home = home_of(settings.workdir)
        server = endpoints(home)
        return replace(
            Target.remote(settings, server.inference_host, format),
            port=server.grpc_inference_port if format == "grpc" else server.inference_port,
            token=partial(read_key, home, "inference"),
            hint=start_hint(home),
        )

    @staticmethod
    def remote(settings: RunSettings, host: str, format: Format = "rest", *, tls: bool = False) -> "Target":
        """A server on ``host``, with the ports from ``settings`` and the token from the
        environment."""
        serving, prep = settings.serving, settings.prep
        port = {"rest": serving.inference_port, "grpc": serving.grpc_inference_port, "prep": prep.port}[format]
        limit = prep.max_request_size_bytes * 3 // 4 if format == "prep" else serving.max_request_size_bytes
        return Target(
            host=host,
            port=port,
            model=MODEL_NAME,
            format=format,
            token=token_of_environment,
            tls=tls,
            timeout_s=RESPONSE_TIMEOUT_S,
            max_size_bytes=limit,
        )

    @property
    def address(self) -> str:
        """``host:port``."""
        return host_and_port(self.host, self.port)

    @property
    def url(self) -> str:
        """The server's base URL."""
        return f"{'https' if self.tls else 'http'}://{self.address}"


def token_of_environment() -> str | None:
    """The token of a remote server, from ``EVERNEAR_TOKEN`` or from the file that
    ``EVERNEAR_TOKEN_FILE`` specifies.

    The file contains only the token, or is a TorchServe ``key_file.json``.

    Raises:
        SettingsError: the file cannot be read.
    """
    if token := usable(TOKEN_VARIABLE):
        return token
    file = os.environ.get(TOKEN_FILE_VARIABLE)
    if not file:
        return None
    try:
        text = Path(file).read_text().strip()
        token = str(json.loads(text)["inference"]["key"]) if text.startswith("{") else text
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{TOKEN_FILE_VARIABLE}={file} cannot be read: {error}.") from None
    remember(token)
    return token


def authorities_file() -> str:
    """The path of the CA file: the value of ``SSL_CERT_FILE``, or by default, certifi's list of
    public CAs."""
    return os.environ.get("SSL_CERT_FILE") or certifi.where()


def tls_context() -> ssl.SSLContext:
    """A TLS context with `authorities_file`.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=authorities_file())
    except OSError as error:
        raise SettingsError(f"SSL_CERT_FILE={authorities_file()} cannot be used: {error}.") from None
