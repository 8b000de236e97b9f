"""gRPC transport: TorchServe's gRPC API.

TorchServe 0.12 returns OK when the handler rejects a request with 400 or 503; the content is a `Rejection`. An unknown
model or version is INTERNAL and recognizable by the Java exception in the second line of the details. A message larger
than ``max_request_size`` ends the stream with CANCELLED.
"""

import json
from collections.abc import Generator, Sequence
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
from evernear.serving.responses import Prediction, Rejection
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
    """A channel of ``api``, which is `grpc` or `grpc.aio`."""

    def __init__(self, target: Target, api: Any) -> None:
        self._target = target
        options = _options(target)
        if target.tls:
            credentials = grpc.ssl_channel_credentials(Path(authorities_file()).read_bytes())
            channel = api.secure_channel(target.address, credentials, options=options)
        else:
            channel = api.insecure_channel(target.address, options=options)
        codecs: Any = (PredictionsRequest.SerializeToString, PredictionResponse.FromString)
        self._call: Any = channel.unary_unary(PREDICTIONS, *codecs)
        self.close: Any = channel.close


class GrpcTransport(_Channel):
    """Blocking calls."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc)

    def predict(self, image: bytes, version: str | None) -> Prediction:
        """Request the prediction for an image file."""
        with _errors(self._target):
            response = self._call(**_request(self._target, image, version))
        return _parse(self._target, response)


class AsyncGrpcTransport(_Channel):
    """Calls on asyncio."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc.aio)

    async def predict(self, image: bytes, version: str | None) -> Prediction:
        """Request the prediction for an image file."""
        with _errors(self._target):
            response = await self._call(**_request(self._target, image, version))
        return _parse(self._target, response)


def _options(target: Target) -> Sequence[tuple[str, Any]]:
    """Channel options. Predictions are idempotent, so calls that did not arrive may be retried."""
    # A headless Service resolves to several pods: use them in turn, where gRPC's default stays with one.
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if target.attempts > 1:
        policy = {
            "maxAttempts": target.attempts,
            "initialBackoff": "0.1s",
            "maxBackoff": "2s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        config["methodConfig"] = [{"name": [{}], "retryPolicy": policy}]
    return [
        ("grpc.enable_http_proxy", 0),
        # Reconnect within this time; gRPC's default is two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.service_config", json.dumps(config)),
    ]


def _request(target: Target, image: bytes, version: str | None) -> dict[str, Any]:
    token = target.token()
    fields = {"body": image, **trace_fields()}
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
    """The error for a `grpc.RpcError`; those of both APIs have a code and details."""
    code, details = error.code(), error.details() or "no reason is given"
    reason = details.splitlines()[0].rstrip(".") + "."
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerTimeoutError(f"No response from {target.address} within {target.timeout_s:g} s.")
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnreachableError(f"No server answers gRPC at {target.address}; {target.hint}.")
    if code in _REJECTED or details.rstrip(".()").endswith(_REJECTED_BY_JAVA):
        return PredictionRejectedError(reason)
    return ServingError(f"{target.address} failed: {reason}")
