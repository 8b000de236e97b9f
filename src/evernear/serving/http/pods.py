"""The predictors that a server can call: TorchServe, and a predictor of KServe."""

import asyncio
import base64
import json
import math
from collections.abc import Sequence
from http import HTTPStatus
from itertools import islice
from typing import NamedTuple

import grpc
import httpx
import numpy as np
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from evernear.data.encoded_image import EncodedImage
from evernear.data.preprocess import Pixels, Preprocessing
from evernear.serving.client import Target, tls_context
from evernear.serving.client.grpc import AsyncGrpcTransport, Channel, grpc_errors
from evernear.serving.client.http import http_errors, status_error
from evernear.serving.decoding import decode_image, prepare
from evernear.serving.http import open_inference
from evernear.serving.http.batching import Batcher
from evernear.serving.http.open_inference import HEADER_LENGTH
from evernear.serving.http.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from evernear.serving.responses import MESSAGE_MAX_IMAGES, Prediction
from evernear.serving.tracing import TRACE_FIELD, trace_fields

MESSAGES_IN_FLIGHT = 8
"""Concurrent messages to TorchServe. Further images wait, and form the next messages."""
MESSAGE_SIZE_BYTES = 256 * 1024
"""Size of the pixels in a message, unless a single image is larger."""
FRAME_SIZE_BYTES = 4096
"""Upper bound for the rest of a message: names, the preprocessing and trace contexts."""
CONNECT_TIMEOUT_S = 1.0
"""Timeout for each REST connection attempt. A failed one is retried."""
MODEL_INFER = (
    "/inference.GRPCInferenceService/ModelInfer",
    ModelInferRequest.SerializeToString,
    ModelInferResponse.FromString,
)
_PREDICTIONS = TypeAdapter(list[Prediction])


class PreparedImage(NamedTuple):
    """The pixels of an image, and the `Preprocessing` that they have, in JSON."""

    pixels: bytes
    preprocessing: bytes


class TorchServe:
    """TorchServe over gRPC. A message has the pixels of concurrent requests."""

    def __init__(self, target: Target, *, embeddings: bool = False) -> None:
        """If ``embeddings`` is set, predictions contain the image's embedding."""
        self._transport = AsyncGrpcTransport(target)
        self._embeddings = embeddings
        self._message_size_bytes = max(1, min(MESSAGE_SIZE_BYTES, target.max_size_bytes - FRAME_SIZE_BYTES))
        self._batcher = Batcher(self._send, batch_size=self._message_size_bytes, at_once=MESSAGES_IN_FLIGHT)
        self.close = self._transport.close

    @staticmethod
    def prepare(file: EncodedImage, shape: Preprocessing) -> PreparedImage:
        return PreparedImage(decode_image(file, shape).tobytes(), shape.model_dump_json().encode())

    async def recognize(self, prepared: Sequence[PreparedImage]) -> list[Prediction]:
        trace = trace_fields().get(TRACE_FIELD, b"")
        size = max(len(prepared[0].pixels), math.ceil(self._message_size_bytes / MESSAGE_MAX_IMAGES))
        count = max(1, self._message_size_bytes // size)
        parts = [prepared[at : at + count] for at in range(0, len(prepared), count)]
        kind = prepared[0].preprocessing
        answers = await asyncio.gather(*(self._batcher.run((part, trace), size * len(part), kind) for part in parts))
        return [prediction for answer in answers for prediction in answer]

    async def _send(self, batch: list[tuple[Sequence[PreparedImage], bytes]]) -> list[list[Prediction]]:
        images = [image for part, _ in batch for image in part]
        pixels, preprocessing = [image.pixels for image in images], images[0].preprocessing
        traces = [trace for part, trace in batch for _ in part]
        answers = iter(await self._transport.predict_pixels(pixels, preprocessing, traces, embedding=self._embeddings))
        return [list(islice(answers, len(part))) for part, _ in batch]


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
