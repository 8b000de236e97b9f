"""gRPC transport: TorchServe's gRPC API.

TorchServe 0.12 returns the gRPC status OK even if the handler rejects a request with the HTTP
status 400 or 503. The response then contains a `Rejection`. For an unknown model or version, it
returns INTERNAL with a Java exception in the second line of the details. If a message is larger
than ``max_request_size``, it ends the stream with CANCELLED.
"""

from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
from pydantic import ValidationError

from evernear.errors import (
    EvernearError,
    PredictionRejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    ServingError,
)
from evernear.serving.client.target import Target, authorities_file
from evernear.serving.grpc_channel import Addresses, channel_options
from evernear.serving.responses import EMBEDDING_FIELD, Prediction, Rejection
from evernear.serving.torchserve_proto.inference_pb2 import PredictionResponse, PredictionsRequest
from evernear.serving.tracing import trace_fields

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_REJECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
}
_REJECTED_BY_JAVA = ("ModelNotFoundException", "ModelVersionNotFoundException", "BadRequestException")


class _Channel:
    """A channel to the target's current addresses. ``api`` is `grpc` or `grpc.aio`."""

    def __init__(self, target: Target, api: Any) -> None:
        self._target = target
        self._api = api
        self._addresses = Addresses(target.host, target.port)
        self._opened = self._open(self._addresses.target)

    def channel(self) -> tuple[Any, Any]:
        """The channel, and the callable for predictions. Only calls in flight still reference an
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
            credentials = grpc.ssl_channel_credentials(Path(authorities_file()).read_bytes())
            channel = api.secure_channel(address, credentials, options=options)
        else:
            channel = api.insecure_channel(address, options=options)
        codecs: Any = (PredictionsRequest.SerializeToString, PredictionResponse.FromString)
        return address, channel, channel.unary_unary(PREDICTIONS, *codecs)


class GrpcTransport(_Channel):
    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc)

    def predict(self, image: bytes, version: str | None, *, embedding: bool = False) -> Prediction:
        _channel, call = self.channel()
        with _errors(self._target):
            response = call(**_request(self._target, image, version, embedding))
        return _parse(self._target, response)


class AsyncGrpcTransport(_Channel):
    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc.aio)

    async def predict(self, image: bytes, version: str | None, *, embedding: bool = False) -> Prediction:
        _channel, call = self.channel()
        with _errors(self._target):
            response = await call(**_request(self._target, image, version, embedding))
        return _parse(self._target, response)


def _request(target: Target, image: bytes, version: str | None, embedding: bool) -> dict[str, Any]:
    token = target.token()
    fields = {"body": image, **trace_fields(), **({EMBEDDING_FIELD: b"1"} if embedding else {})}
    return {
        "request": PredictionsRequest(model_name=target.model, model_version=version or "", input=fields),
        "metadata": (("authorization", f"Bearer {token}"),) if token else (),
        "timeout": target.timeout_s,
    }


def _parse(target: Target, response: PredictionResponse) -> Prediction:
    try:
        return Prediction.model_validate_json(response.prediction)
    except ValidationError:
        pass
    try:
        rejection = Rejection.model_validate_json(response.prediction)
    except ValidationError:
        raise ServingError(f"The server at {target.address} is not an evernear release.") from None
    if rejection.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ServingError(f"{target.address} failed: {rejection.message}")
    raise PredictionRejectedError(rejection.message)


@contextmanager
def _errors(target: Target) -> Generator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _error(target, error) from None


def _error(target: Target, error: Any) -> EvernearError:
    """Convert a `grpc.RpcError`. Errors from `grpc` and `grpc.aio` have a code and details."""
    code, details = error.code(), error.details() or "no reason is given"
    reason = details.splitlines()[0].rstrip(".") + "."
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerTimeoutError(f"No response from {target.address} within {target.timeout_s:g} s.")
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnreachableError(f"No server answers gRPC at {target.address}; {target.hint}.")
    if code in _REJECTED or details.rstrip(".()").endswith(_REJECTED_BY_JAVA):
        return PredictionRejectedError(reason)
    return ServingError(f"{target.address} failed: {reason}")
