"""Blocking and asyncio clients for a model server, which need neither torch nor FAISS."""

import json
import os
import ssl
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import certifi

from evernear.common.disk import open_regular, reread
from evernear.common.environment import authorities, text_file, usable, valid_secret
from evernear.errors import DataError, PredictionRejectedError, SettingsError
from evernear.serving.endpoints import endpoints, home_of, host_and_port, read_key, start_hint
from evernear.serving.responses import Metadata, Prediction
from evernear.settings import RunSettings
from evernear.settings.serving import MODEL_NAME, PREP_TIMEOUT_S, RESPONSE_TIMEOUT_S
from evernear.settings.sources import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

Format = Literal["rest", "grpc", "prep"]
GRPC_FRAME_BYTES = 448
"""Upper bound for the rest of a message: names, lengths and a trace context."""


@dataclass(frozen=True)
class Target:
    """A model on a server.

    ``format`` selects TorchServe's REST API, its gRPC API, or the preprocessing server. ``token``
    is called before each request, because TorchServe creates a new token each time it starts.
    ``timeout_s`` applies to one prediction. A gRPC call is attempted at most ``attempts`` times,
    and only while the server is unreachable. ``hint`` is the suggested fix in the error for an
    unreachable server.
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
        """The preprocessing server (``prep``) or the working directory's TorchServe.

        Raises:
            ServerUnreachableError: no TorchServe server was started in the working directory.
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
        """A server on ``host``, with the ports of ``settings`` and the token of the environment."""
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
    def max_image_size_bytes(self) -> int:
        return self.max_size_bytes - (GRPC_FRAME_BYTES if self.format == "grpc" else 0)

    @property
    def address(self) -> str:
        return host_and_port(self.host, self.port)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"


def token_of_environment() -> str | None:
    """A remote server's token, from ``EVERNEAR_TOKEN`` or the file that ``EVERNEAR_TOKEN_FILE``
    specifies: only the token, or a TorchServe ``key_file.json``."""
    if token := usable(TOKEN_VARIABLE):
        return token
    file = os.environ.get(TOKEN_FILE_VARIABLE)
    if not file:
        return None
    try:
        return _token_in(Path(file))
    except OSError as error:
        raise SettingsError(f"{TOKEN_FILE_VARIABLE}={file} cannot be read: {error.strerror}.") from None


@reread
def _token_in(path: Path) -> str:
    token = text_file(TOKEN_FILE_VARIABLE, path)
    try:
        token = str(json.loads(token)["inference"]["key"]) if token.startswith("{") else token
    except (ValueError, KeyError, TypeError):
        token = ""
    if not token:
        raise SettingsError(
            f"{TOKEN_FILE_VARIABLE}={path} has no token: neither the token alone, nor a TorchServe key_file.json."
        )
    return valid_secret(f"{TOKEN_FILE_VARIABLE}={path}", token)


def authorities_file() -> Path:
    """The CA file: ``SSL_CERT_FILE``, or by default, certifi's list of public CAs."""
    named = os.environ.get("SSL_CERT_FILE")
    return authorities("SSL_CERT_FILE", Path(named)) if named else Path(certifi.where())


def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authorities_file())


def token_refused(target: Target) -> PredictionRejectedError:
    what = "the token" if target.token() else "a request without a token"
    return PredictionRejectedError(
        f"The server at {target.address} refuses {what}; set {TOKEN_VARIABLE} to what `evernear token` prints on its "
        "machine."
    )


class Client:
    """A thread-safe client for one model, usable as a context manager.

    ::

        with Client.of(settings) as client:
            print(client.predict(Path("7.png").read_bytes()).pred)
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        # To start the command line faster, import only the selected transport.
        if target.format == "grpc":
            from evernear.serving.client.grpc import GrpcTransport as Transport
        else:
            from evernear.serving.client.http import HttpTransport as Transport
        self._transport: Any = Transport(target)
        self.close = weakref.finalize(self, self._transport.close)  # also runs for a client that is never closed

    @staticmethod
    def of(settings: RunSettings, format: Format = "rest") -> "Client":
        """A client for the server of a working directory.

        Raises:
            ServerUnreachableError: no server is running.
        """
        return Client(Target.local(settings, format))

    def predict(self, image: bytes, version: str | None = None, *, embedding: bool = False) -> Prediction:
        """Recognize ``image``, the content of a PNG, JPEG, WebP or HEIC file. By default, the
        server chooses the version. With ``embedding``, TorchServe adds the embedding.

        Raises:
            ServerUnreachableError: no server responds.
            ServerTimeoutError: no response arrives within the target's ``timeout_s``.
            PredictionRejectedError: the image or the request is invalid.
            ServingError: the server failed.
        """
        require_bounded(image, self._target)
        return self._transport.predict(image, version, embedding=embedding)

    def predict_file(self, path: Path, version: str | None = None) -> dict[str, Any]:
        """Call `predict` with the content of a file, and return the prediction as a JSON object.

        Raises:
            DataError: the file cannot be read.
        """
        return self.predict(read_file(path), version).model_dump(mode="json")

    @property
    def max_size_bytes(self) -> int:
        """The server's limit of an image."""
        return self._target.max_image_size_bytes

    def metadata(self) -> Metadata:
        """Ask the preprocessing server for the model's metadata. Raises the errors of `predict`.

        Raises:
            SettingsError: the target is not a preprocessing server.
        """
        _require_prep(self._target)
        return self._transport.metadata()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """`Client` on asyncio. Use an instance only in the event loop in which it was created."""

    def __init__(self, target: Target) -> None:
        self._target = target
        if target.format == "grpc":
            from evernear.serving.client.grpc import AsyncGrpcTransport as Transport
        else:
            from evernear.serving.client.http import AsyncHttpTransport as Transport
        self._transport: Any = Transport(target)

    @staticmethod
    def of(settings: RunSettings, format: Format = "rest") -> "AsyncClient":
        return AsyncClient(Target.local(settings, format))

    async def predict(self, image: bytes, version: str | None = None, *, embedding: bool = False) -> Prediction:
        require_bounded(image, self._target)
        return await self._transport.predict(image, version, embedding=embedding)

    async def metadata(self) -> Metadata:
        _require_prep(self._target)
        return await self._transport.metadata()

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def read_file(path: Path) -> bytes:
    """Raises DataError if the file cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def require_bounded(image: bytes, target: Target) -> None:
    """Check the server's size limit before sending."""
    limit = target.max_image_size_bytes
    if len(image) > limit:
        raise PredictionRejectedError(f"The image has {len(image)} bytes; the server's limit is {limit}.")


def _require_prep(target: Target) -> None:
    if target.format != "prep":
        raise SettingsError("Only the preprocessing server provides metadata over the network; use --format prep.")
