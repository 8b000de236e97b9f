"""Requests and responses in KServe's two protocols.

v1 carries base64 in JSON. Each entry in the response is a prediction or an error, so an invalid
image does not affect the others::

    {"instances": [{"data": "<base64>"}, ...]}  ->  {"predictions": [<Prediction or Rejection>, ...]}

v2, the Open Inference Protocol, carries one tensor over REST or gRPC: ``images`` (BYTES, shape
(N,)) or ``pixels`` (UINT8, shape (N, H, W, C), preprocessed as the release specifies). Its response
consists of tensors, which cannot represent errors. An invalid image therefore fails the whole
request.
"""  # noqa: W505

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

import msgspec
import numpy as np
from grpc_interceptor.exceptions import InvalidArgument, ResourceExhausted
from kserve import InferInput, InferOutput, InferRequest, InferResponse
from kserve.protocol.infer_type import RequestedOutput
from numpy.typing import NDArray

from evernear.data.preprocess import Pixels, Preprocessing
from evernear.serving.request_parsing import compression, decode_base64
from evernear.serving.responses import Neighbor, Prediction, Rejection

Images = list[bytes | Rejection] | Pixels
"""Image files, or a `Rejection` for unreadable ones, or a uint8 array of shape (N, H, W, C)."""
Tensors = list[dict[str, Any]]
IMAGES, PIXELS = "images", "pixels"
OUTPUTS = (
    ("pred", "BYTES", 1),
    ("dist", "FP32", 1),
    ("unknown", "BOOL", 1),
    ("neighbor_labels", "BYTES", 2),
    ("neighbor_dists", "FP32", 2),
    ("version", "BYTES", 1),
    ("neighbor_rows", "INT64", 2),
)
"""Name, datatype and rank of each output tensor. Add new ones at the end, because some clients
access them by position."""
MAX_TENSORS = 64
"""Limit for the inputs and the outputs of a v2 request. A valid one has one input."""
_PADDING = Neighbor(label="", dist=-1.0, row=-1)
"""Fills the neighbor tensors if an approximate index returns fewer neighbors for one image."""


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any]
    parameters: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Infer(msgspec.Struct):
    """A v2 request over REST. Decoding stops at the first error, unlike KServe's pydantic model."""

    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


_INFER = msgspec.json.Decoder(_Infer)


@dataclass(frozen=True)
class PredictRequest:
    """``infer`` is the v2 request, or None for a v1 request."""

    images: Images
    infer: InferRequest | None


def parse_request(payload: Any, shape: Preprocessing, max_images: int) -> PredictRequest:
    """Parse a request that KServe has decoded: an `InferRequest` in v2, or JSON in v1.

    Raises:
        InvalidArgument: the request conforms to neither protocol.
        ResourceExhausted: the request has more than ``max_images`` images.
    """
    if isinstance(payload, InferRequest):
        return PredictRequest(_tensor_images(payload, shape, max_images), payload)
    instances = _instances(payload)
    _require_at_most(max_images, len(instances))
    return PredictRequest([_instance_image(instance) for instance in instances], None)


def parse_infer_request(body: bytes, model_name: str) -> InferRequest:
    """Parse the JSON of a v2 request.

    Raises:
        InvalidArgument: the JSON does not conform to the protocol.
    """
    require_uncompressed(body)
    try:
        request = _INFER.decode(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The request does not conform to the Open Inference Protocol: {error}.") from None
    require_few_tensors(len(request.inputs), len(request.outputs or ()))
    return InferRequest(
        model_name=model_name,
        request_id=request.id,
        parameters=request.parameters,
        infer_inputs=[
            InferInput(tensor.name, tensor.shape, tensor.datatype, tensor.data, tensor.parameters or {})
            for tensor in request.inputs
        ],
        request_outputs=[RequestedOutput(tensor.name, tensor.parameters or {}) for tensor in request.outputs or ()]
        or None,
    )


def require_uncompressed(body: bytes) -> None:
    if compressed := compression(body):
        raise InvalidArgument(compressed)


def require_few_tensors(inputs: int, outputs: int) -> None:
    """Check a v2 request before tensor objects are created."""
    if max(inputs, outputs) > MAX_TENSORS:
        raise InvalidArgument(f"The request names more than {MAX_TENSORS} inputs or outputs.")


def build_response(
    request: PredictRequest, results: Sequence[Prediction | Rejection], model_name: str
) -> dict[str, Any] | InferResponse:
    """Build the response in the protocol of the request.

    Raises:
        InvalidArgument: all images were rejected (v1), or any image was rejected (v2).
    """
    rejected = [(number, result) for number, result in enumerate(results) if isinstance(result, Rejection)]
    if request.infer is None:
        if rejected and len(rejected) == len(results):
            raise InvalidArgument(rejected[0][1].message)
        return {"predictions": [result.model_dump(mode="json") for result in results]}
    if rejected:
        number, rejection = rejected[0]
        raise InvalidArgument(f"Image {number + 1} of {len(results)} cannot be answered: {rejection.message}")
    predictions = [result for result in results if isinstance(result, Prediction)]
    return InferResponse(
        response_id=request.infer.id or str(uuid4()),
        model_name=model_name,
        infer_outputs=_outputs(predictions),
        use_binary_outputs=request.infer.use_binary_outputs,
        requested_outputs=request.infer.request_outputs,
    )


def parse_response(response: InferResponse) -> list[Prediction]:
    """Parse a v2 response from `build_response`.

    Raises:
        ValueError: the response comes from a different kind of model.
    """
    columns = {name: _column(response, name) for name in ("pred", "dist", "unknown", "version")}
    near = [_column(response, name) for name in ("neighbor_labels", "neighbor_dists", "neighbor_rows")]
    return [
        Prediction(
            pred=pred,
            dist=dist,
            unknown=unknown,
            neighbors=tuple(
                Neighbor(label=label, dist=distance, row=row)
                for label, distance, row in zip(*neighbors, strict=True)
                if distance != _PADDING.dist
            ),
            version=version,
        )
        for pred, dist, unknown, version, *neighbors in zip(*columns.values(), *near, strict=True)
    ]


def v1_request(images: Sequence[bytes]) -> dict[str, Any]:
    return {"instances": [{"data": base64.b64encode(image).decode()} for image in images]}


def v2_request(pixels: Pixels, model_name: str, binary: bool) -> InferRequest:
    """Build a v2 request for ``pixels`` of shape (N, H, W, C). ``binary`` is for gRPC: over REST,
    KServe's client sends contradictory content types for binary data."""
    tensor = InferInput(PIXELS, list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels, binary_data=binary)
    return InferRequest(model_name=model_name, infer_inputs=[tensor])


def input_types(shape: Preprocessing) -> Tensors:
    """A predictor's alternative input tensors, for the Open Inference Protocol's model metadata."""
    pixels = [-1, shape.height_px, shape.width_px, shape.channels]
    return [
        {"name": IMAGES, "datatype": "BYTES", "shape": [-1]},
        {"name": PIXELS, "datatype": "UINT8", "shape": pixels},
    ]


def output_types() -> Tensors:
    return [{"name": name, "datatype": datatype, "shape": [-1] * rank} for name, datatype, rank in OUTPUTS]


def _instances(payload: Any) -> list[Any]:
    if isinstance(payload, bytes):  # KServe parses the body only for some content types
        try:
            payload = json.loads(payload)
        except (ValueError, RecursionError):
            raise InvalidArgument('The request is not JSON; send {"instances": [{"data": "<base64>"}]}.') from None
    instances: Any = cast(dict[str, Any], payload).get("instances") if isinstance(payload, dict) else None
    if not isinstance(instances, list):
        raise InvalidArgument('The request has no list "instances"; send {"instances": [{"data": "<base64>"}]}.')
    return cast(list[Any], instances)


def _instance_image(instance: Any) -> bytes | Rejection:
    encoded: Any = cast(dict[str, Any], instance).get("data") if isinstance(instance, dict) else None
    if not isinstance(encoded, str):
        return Rejection(message='The instance has no text under "data".')
    return _from_base64(encoded)


def _from_base64(encoded: str) -> bytes | Rejection:
    try:
        return decode_base64(encoded)
    except ValueError:
        return Rejection(message="The image is not base64.")


def _tensor_images(request: InferRequest, shape: Preprocessing, max_images: int) -> Images:
    tensors = {(tensor.name, tensor.datatype): tensor for tensor in request.inputs}
    if len(request.inputs) != 1 or not tensors.keys() <= {(IMAGES, "BYTES"), (PIXELS, "UINT8")}:
        raise InvalidArgument(f'Send one input: "{IMAGES}", BYTES [N], or "{PIXELS}", UINT8 [N, H, W, C].')
    ((name, _), tensor) = tensors.popitem()
    dims = tensor.shape
    expected = (shape.height_px, shape.width_px, shape.channels) if name == PIXELS else ()
    if not dims or dims[0] < 0 or tuple(dims[1:]) != expected:
        raise InvalidArgument(f'"{name}" has the shape {dims}; expected {["N", *expected]}.'.replace("'", ""))
    _require_at_most(max_images, dims[0])
    try:
        return _pixels(tensor) if name == PIXELS else [_file(image) for image in tensor.as_numpy().tolist()]
    except (ValueError, TypeError, OverflowError, struct.error):
        raise InvalidArgument(f'The data of "{name}" do not fit its shape {dims} and type.') from None


def _pixels(tensor: InferInput) -> Pixels:
    """JSON may contain values that a cast to uint8 would wrap or truncate."""
    if not tensor.data:
        return tensor.as_numpy()
    values = np.asarray(tensor.data)
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 255:
        raise ValueError
    return values.astype(np.uint8).reshape(tensor.shape)


def _file(image: Any) -> bytes | Rejection:
    """JSON contains an image as base64 text, and gRPC contains the bytes of its file."""
    if isinstance(image, str):
        return _from_base64(image)
    if not isinstance(image, bytes):
        raise TypeError
    return image


def _require_at_most(max_images: int, count: int) -> None:
    if count > max_images:
        raise ResourceExhausted(f"The request has {count} images; the limit is {max_images}.")


def _outputs(predictions: list[Prediction]) -> list[InferOutput]:
    count = len(predictions)
    width = max((len(p.neighbors) for p in predictions), default=0)
    neighbors = [n for p in predictions for n in (*p.neighbors, *[_PADDING] * (width - len(p.neighbors)))]
    data = {name: [getattr(p, name) for p in predictions] for name in ("pred", "dist", "unknown", "version")}
    data |= {f"neighbor_{name}s": [getattr(n, name) for n in neighbors] for name in ("label", "dist", "row")}
    return [InferOutput(name, [count, width][:rank], datatype, data[name]) for name, datatype, rank in OUTPUTS]


def _column(response: InferResponse, name: str) -> list[Any]:
    output = response.get_output_by_name(name)
    if output is None:
        raise ValueError(f"there is no output {name!r}")
    return _decoded(output.as_numpy()).tolist()


def _decoded(values: NDArray[Any]) -> NDArray[Any]:
    """gRPC transmits text values as bytes."""
    if values.dtype != np.object_:
        return values
    texts = [value.decode() if isinstance(value, bytes) else value for value in values.ravel().tolist()]
    return np.array(texts, np.object_).reshape(values.shape)
