"""The predictors that a server can call: TorchServe, and a predictor of KServe."""

import asyncio
import base64
import json
from collections.abc import Sequence
from http import HTTPStatus

import grpc
import httpx
import numpy as np
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from evernear.data.preprocess import Pixels
from evernear.serving.client import AsyncClient, Target, tls_context
from evernear.serving.client.grpc import Channel, grpc_errors
from evernear.serving.client.http import http_errors, status_error
from evernear.serving.decoding import decode_image, prepare
from evernear.serving.http import open_inference
from evernear.serving.http.open_inference import HEADER_LENGTH
from evernear.serving.http.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from evernear.serving.responses import Prediction
from evernear.serving.tracing import trace_fields

IN_FLIGHT = 64
"""Concurrent requests to TorchServe, two full batches; others wait."""
CONNECT_TIMEOUT_S = 1.0
"""Timeout for each REST connection attempt. A failed one is retried."""
MODEL_INFER = (
    "/inference.GRPCInferenceService/ModelInfer",
    ModelInferRequest.SerializeToString,
    ModelInferResponse.FromString,
)
_PREDICTIONS = TypeAdapter(list[Prediction])


class TorchServe:
    """TorchServe over gRPC, with one image per call."""

    prepare = staticmethod(prepare)

    def __init__(self, target: Target, *, embeddings: bool = False) -> None:
        """If ``embeddings`` is set, predictions contain the image's embedding."""
        self._client = AsyncClient(target)
        self._embeddings = embeddings
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self.close = self._client.close

    async def recognize(self, prepared: Sequence[bytes]) -> list[Prediction]:
        return await asyncio.gather(*map(self._recognize_one, prepared))

    async def _recognize_one(self, image: bytes) -> Prediction:
        async with self._slots:
            return await self._client.predict(image, embedding=self._embeddings)


class _Rest:
    """A predictor of KServe over REST. No proxy is used, because it leads out of the cluster."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = httpx.AsyncClient(
            base_url=target.url,
            timeout=httpx.Timeout(target.timeout_s, connect=CONNECT_TIMEOUT_S),
            transport=httpx.AsyncHTTPTransport(
                verify=tls_context() if target.tls else False, retries=target.attempts - 1
            ),
            trust_env=False,
        )
        self.close = self._client.aclose

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        trace = {name: value.decode() for name, value in trace_fields().items()}
        with http_errors(self._target):
            response = await self._client.post(path, content=body, headers=headers | trace)
        if response.is_success:
            return response
        if response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            raise _too_large()
        raise status_error(self._target, response)


class V1(_Rest):
    """KServe's v1 protocol, which has no tensors: images are PNG files."""

    prepare = staticmethod(prepare)

    async def recognize(self, prepared: Sequence[bytes]) -> list[Prediction]:
        instances = [{"data": base64.b64encode(image).decode()} for image in prepared]
        body, headers = json.dumps({"instances": instances}).encode(), {"Content-Type": "application/json"}
        response = await self._post(f"/v1/models/{self._target.model}:predict", body, headers)
        return _PREDICTIONS.validate_python(response.json()["predictions"])


class V2(_Rest):
    """The Open Inference Protocol over REST, with binary tensors."""

    prepare = staticmethod(decode_image)

    async def recognize(self, prepared: Sequence[Pixels]) -> list[Prediction]:
        head, data = open_inference.rest_request(np.stack(prepared))
        headers = {HEADER_LENGTH: str(len(head))}
        response = await self._post(f"/v2/models/{self._target.model}/infer", head + data, headers)
        return open_inference.predictions_of_rest(response.content, response.headers.get(HEADER_LENGTH))


class GrpcV2:
    """The Open Inference Protocol over gRPC, with raw tensors."""

    prepare = staticmethod(decode_image)

    def __init__(self, target: Target) -> None:
        self._target = target
        self._channel = Channel(target, grpc.aio, MODEL_INFER)
        self.close = self._channel.close

    async def recognize(self, prepared: Sequence[Pixels]) -> list[Prediction]:
        request = open_inference.grpc_request(np.stack(prepared), self._target.model)
        metadata = tuple((name, value.decode()) for name, value in trace_fields().items())
        _channel, call = self._channel.channel()
        with grpc_errors(self._target):
            try:
                response = await call(request, timeout=self._target.timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise _too_large() from None
                raise
        return open_inference.predictions_of_grpc(response)


def _too_large() -> HTTPException:
    message = "The prepared images are too large for the predictor; send fewer per request."
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


Pod = TorchServe | V1 | V2 | GrpcV2
"""A predictor. ``prepare`` converts an inspected file to what it receives. The methods raise the
errors of `evernear.serving.client.Client.predict`, or any error for the answer of a foreign one."""
