"""gRPC transport: TorchServe's gRPC API.

TorchServe 0.12 returns the gRPC status OK even if the handler rejects a request with the HTTP
status 400 or 503. The response then contains a `Rejection`. For an unknown model or version, it
returns INTERNAL with a Java exception in the second line of the details. If a message is larger
than ``max_request_size``, it ends the stream with CANCELLED.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from ipaddress import IPv4Address, ip_address
from typing import Any, TypeVar

import grpc
from pydantic import TypeAdapter, ValidationError

from evernear.errors import (
    EvernearError,
    PredictionRejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    ServingError,
)
from evernear.serving.client import Target, authorities_file, require_bounded, tls_context, token_refused
from evernear.serving.client.inference_pb2 import PredictionResponse, PredictionsRequest
from evernear.serving.endpoints import host_and_port
from evernear.serving.responses import EMBEDDING_FIELD, PIXELS_FIELD, PREPROCESSING_FIELD, Prediction, Rejection
from evernear.serving.tracing import TRACE_FIELD, trace_fields

RESOLUTION_PERIOD_S = 1.0
RECONNECT_BACKOFF_MS = 1000
"""Longest pause between two connection attempts. gRPC's default: two minutes. An attempt may take
20 s, gRPC's default, because a server on a busy machine may need seconds for its first answer."""
DEAD_CONNECTION_MS = 2000
"""Time without a TCP acknowledgment after which a connection counts as dead."""
KEEPALIVE_MS = 600_000
"""Also enables `DEAD_CONNECTION_MS`. Netty accepts at most one ping every five minutes."""
RETRY_TOKENS = 200
"""A failed attempt removes a token, and a successful one adds a token. While at most half remain,
calls are not retried."""


class Addresses:
    """The gRPC target for a host name, which a thread resolves every second.

    gRPC itself resolves a name at most every 30 s, and waits up to two minutes if it has no
    address. As long as its connections are alive, it does not look for new pods. A new channel
    reuses existing connections, so an address change is cheap. If the name cannot be resolved, the
    previous target remains in use.
    """

    def __init__(self, host: str, port: int) -> None:
        self._name = (host, port)
        self._closed = threading.Event()
        self.target = host_and_port(host, port)
        if not _is_address(host):
            threading.Thread(target=self._follow, name=f"addresses of {host}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError, UnicodeError):
                self.target = _resolve(*self._name)
            self._closed.wait(RESOLUTION_PERIOD_S)


def channel_options(authority: str, attempts: int) -> Sequence[tuple[str, Any]]:
    """Options for a channel to `Addresses`. ``authority`` is the server name for HTTP/2 and TLS.

    If the server is unavailable, a call, which must be idempotent, is attempted up to ``attempts``
    times while enough `RETRY_TOKENS` remain. In a long outage, calls fail without retries.
    """
    # Use all pods in turn. By default, gRPC sends all calls to one.
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if attempts > 1:
        policy = {
            "maxAttempts": attempts,
            "initialBackoff": "0.1s",
            "maxBackoff": "1s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        config["methodConfig"] = [{"name": [{}], "retryPolicy": policy}]
        config["retryThrottling"] = {"maxTokens": RETRY_TOKENS, "tokenRatio": 1}
    return [
        ("grpc.default_authority", authority),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", DEAD_CONNECTION_MS),
        ("grpc.service_config", json.dumps(config)),
    ]


def _resolve(host: str, port: int) -> str:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    if all(isinstance(ip_address(address), IPv4Address) for address in addresses):
        return "ipv4:" + ",".join(f"{address}:{port}" for address in addresses)
    return "ipv6:" + ",".join(f"[{_as_ipv6(address)}]:{port}" for address in addresses)


def _as_ipv6(text: str) -> str:
    """A gRPC target needs addresses of one family. For an IPv4-mapped one, the kernel uses IPv4."""
    return f"::ffff:{text}" if isinstance(ip_address(text), IPv4Address) else text


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
Answer = TypeVar("Answer")
_PREDICTIONS = TypeAdapter(list[Prediction])
PREDICTIONS_METHOD = (PREDICTIONS, PredictionsRequest.SerializeToString, PredictionResponse.FromString)
_REJECTED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
_TOKEN_REFUSED = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
_REJECTED_BY_JAVA = ("ModelNotFoundException", "ModelVersionNotFoundException", "BadRequestException")


class Channel:
    """A channel to the target's current addresses. ``api`` is `grpc` or `grpc.aio`. ``method`` has
    the path of a method, and its codecs."""

    def __init__(self, target: Target, api: Any, method: tuple[Any, Any, Any] = PREDICTIONS_METHOD) -> None:
        self._target = target
        self._api = api
        self._method = method
        self._addresses = Addresses(target.host, target.port)
        self._opened = self._open(self._addresses.target)

    def channel(self) -> tuple[Any, Any]:
        """The channel, and the callable for the method. Only calls in flight still reference an
        earlier channel, which closes when the last of them completes."""
        address, channel, call = self._opened
        if address != self._addresses.target:
            self._opened = _, channel, call = self._open(self._addresses.target)
        return channel, call

    def close(self) -> Any:
        """With `grpc.aio`, this returns a coroutine."""
        self._addresses.close()
        _, channel, _ = self._opened
        return channel.close()

    def _open(self, address: str) -> tuple[str, Any, Any]:
        target, api = self._target, self._api
        options = channel_options(target.address, target.attempts)
        if target.tls:
            tls_context()  # raises a SettingsError for an unusable file
            credentials = grpc.ssl_channel_credentials(authorities_file().read_bytes())
            channel = api.secure_channel(address, credentials, options=options)
        else:
            channel = api.insecure_channel(address, options=options)
        return address, channel, channel.unary_unary(*self._method)


class GrpcTransport(Channel):
    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc)

    def predict(self, image: bytes, version: str | None, *, embedding: bool = False) -> Prediction:
        _channel, call = self.channel()
        with grpc_errors(self._target):
            response = call(**_file_request(self._target, image, version, embedding))
        return _parse(self._target, response, Prediction.model_validate_json)


class AsyncGrpcTransport(Channel):
    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc.aio)

    async def predict(self, image: bytes, version: str | None, *, embedding: bool = False) -> Prediction:
        _channel, call = self.channel()
        with grpc_errors(self._target):
            response = await call(**_file_request(self._target, image, version, embedding))
        return _parse(self._target, response, Prediction.model_validate_json)

    async def predict_pixels(
        self, images: Sequence[bytes], preprocessing: bytes, traces: Sequence[bytes], *, embedding: bool = False
    ) -> list[Prediction]:
        """Recognize the pixels of at most `MESSAGE_MAX_IMAGES` images. ``traces`` has the trace
        field of each, which may be empty. Raises the errors of
        `evernear.serving.client.Client.predict`."""
        pixels = b"".join(images)
        require_bounded(pixels, self._target)
        fields = {PIXELS_FIELD: pixels, PREPROCESSING_FIELD: preprocessing}
        if any(traces):
            fields[TRACE_FIELD] = b",".join(traces)
        _channel, call = self.channel()
        with grpc_errors(self._target):
            response = await call(**_request(self._target, fields, None, embedding))
        predictions = _parse(self._target, response, _PREDICTIONS.validate_json)
        if len(predictions) != len(images):
            count = f"{len(predictions)} predictions for {len(images)} images"
            raise ServingError(f"The server at {self._target.address} returned {count}.")
        return predictions


def _file_request(target: Target, image: bytes, version: str | None, embedding: bool) -> dict[str, Any]:
    return _request(target, {"body": image, **trace_fields()}, version, embedding)


def _request(target: Target, fields: dict[str, bytes], version: str | None, embedding: bool) -> dict[str, Any]:
    token = target.token()
    if embedding:
        fields[EMBEDDING_FIELD] = b"1"
    return {
        "request": PredictionsRequest(model_name=target.model, model_version=version or "", input=fields),
        "metadata": (("authorization", f"Bearer {token}"),) if token else (),
        "timeout": target.timeout_s,
    }


def _parse(target: Target, response: PredictionResponse, answer: Callable[[bytes], Answer]) -> Answer:
    try:
        return answer(response.prediction)
    except ValidationError:
        pass
    try:
        rejection = Rejection.model_validate_json(response.prediction)
    except ValidationError:
        raise ServingError(f"The server at {target.address} is not an evernear release.") from None
    if rejection.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ServingError(f"{target.address} failed: {rejection.message}")
    raise PredictionRejectedError(rejection.message, rejection.version)


@contextmanager
def grpc_errors(target: Target) -> Generator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _error(target, error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Not the caller was canceled, but the call: another task closed the client.
        reason = f"The connection to {target.address} was closed during the prediction; {target.hint}."
        raise ServerUnreachableError(reason) from None


def _error(target: Target, error: Any) -> EvernearError:
    """Convert a `grpc.RpcError`. Errors from `grpc` and `grpc.aio` have a code and details."""
    code, details = error.code(), error.details() or "no reason is given"
    reason = details.splitlines()[0].rstrip(".") + "."
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerTimeoutError(f"No response from {target.address} within {target.timeout_s:g} s.")
    if code is grpc.StatusCode.UNAVAILABLE:
        # gRPC says so too if the connection is lost, and TorchServe if no worker is ready.
        why = "" if "failed to connect" in details.lower() else f" ({reason.rstrip('.')})"
        return ServerUnreachableError(f"No server answers gRPC at {target.address}{why}; {target.hint}.")
    if code in _TOKEN_REFUSED:
        return token_refused(target)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ServingError(f"The server at {target.address} answers gRPC, but is another one; {target.hint}.")
    if code in _REJECTED or details.rstrip(".()").endswith(_REJECTED_BY_JAVA):
        return PredictionRejectedError(reason)
    return ServingError(f"{target.address} failed: {reason}")
