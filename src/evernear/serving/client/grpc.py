"""Over TorchServe's gRPC API.

Seen on TorchServe 0.12: what the handler answers with status 400 or 503 arrives as OK, with the `Refusal` as its
content; an unknown model or version is INTERNAL, told by the Java exception in its second line; a message
beyond ``max_request_size`` ends the stream with CANCELLED.
"""

import json
from collections.abc import Sequence
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
from evernear.serving.messages import Prediction, Refusal
from evernear.serving.torchserve_proto.inference_pb2 import PredictionResponse, PredictionsRequest

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
}
_REFUSED_IN_JAVA = ("ModelNotFoundException", "ModelVersionNotFoundException", "BadRequestException")


class Grpc:
    """Ask over gRPC, and wait."""

    def __init__(self, target: Target) -> None:
        self._target = target
        if target.tls:
            self._channel = grpc.secure_channel(target.address, _credentials(), options=_options(target))
        else:
            self._channel = grpc.insecure_channel(target.address, options=_options(target))
        self._call = self._channel.unary_unary(PREDICTIONS, *_CODECS)

    def predict(self, image: bytes, version: str | None) -> Prediction:
        """The answer for one image file."""
        try:
            answer = self._call(**_request(self._target, image, version))
        except grpc.RpcError as error:
            raise _error(self._target, error) from None
        return _prediction(self._target, answer)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


class AsyncGrpc:
    """Ask over gRPC from asyncio."""

    def __init__(self, target: Target) -> None:
        self._target = target
        if target.tls:
            self._channel = grpc.aio.secure_channel(target.address, _credentials(), options=_options(target))
        else:
            self._channel = grpc.aio.insecure_channel(target.address, options=_options(target))
        self._call = self._channel.unary_unary(PREDICTIONS, *_CODECS)

    async def predict(self, image: bytes, version: str | None) -> Prediction:
        """The answer for one image file."""
        try:
            answer = await self._call(**_request(self._target, image, version))
        except grpc.RpcError as error:
            raise _error(self._target, error) from None
        return _prediction(self._target, answer)

    async def aclose(self) -> None:
        """End the connection."""
        await self._channel.close()


_CODECS: tuple[Any, Any] = (PredictionsRequest.SerializeToString, PredictionResponse.FromString)


def _credentials() -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(Path(authorities_file()).read_bytes())


def _options(target: Target) -> Sequence[tuple[str, Any]]:
    """Channel options; a prediction changes nothing, so one that did not arrive may be asked for again."""
    options: list[tuple[str, Any]] = [
        ("grpc.enable_http_proxy", 0),
        # A server that was away is found again within this time, where gRPC's own is two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    # Where the name stands for several pods (a headless Service) they are asked in turn; gRPC's own stays with one.
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
    return [*options, ("grpc.service_config", json.dumps(config))]


def _request(target: Target, image: bytes, version: str | None) -> dict[str, Any]:
    token = target.token()
    return {
        "request": PredictionsRequest(model_name=target.model, model_version=version or "", input={"body": image}),
        "metadata": (("authorization", f"Bearer {token}"),) if token else (),
        "timeout": target.timeout_s,
    }


def _prediction(target: Target, answer: PredictionResponse) -> Prediction:
    try:
        return Prediction.model_validate_json(answer.prediction)
    except ValidationError:
        pass
    try:
        refusal = Refusal.model_validate_json(answer.prediction)
    except ValidationError:
        raise ServingError(f"What answers at {target.address} is no evernear release.") from None
    if refusal.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ServingError(f"{target.address} failed: {refusal.message}")
    raise PredictionRejectedError(refusal.message)


def _error(target: Target, error: Any) -> EvernearError:
    """What a `grpc.RpcError` means; both kinds of call have its code and its details."""
    code, details = error.code(), error.details() or "no reason is given"
    reason = details.splitlines()[0].rstrip(".") + "."
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerTimeoutError(f"No answer from {target.address} within {target.timeout_s:g} s.")
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnreachableError(f"No server answers gRPC at {target.address}; {target.hint}.")
    if code in _REFUSED or details.rstrip(".()").endswith(_REFUSED_IN_JAVA):
        return PredictionRejectedError(reason)
    return ServingError(f"{target.address} failed: {reason}")
