"""KServe's two protocols: what a request asks for, and what its answer looks like.

v1 carries base64 in JSON and has room for an error beside the answers, so a bad image fails alone::

    {"instances": [{"data": "<base64>"}, ...]}  ->  {"predictions": [<Prediction or Refusal>, ...]}

v2, the Open Inference Protocol, carries one tensor, by REST or gRPC: ``images``, BYTES (N,), or ``pixels``,
UINT8 (N, H, W, C), as the release's preprocessing leaves them. It answers tensors, which have no room for an
error, so a request with a bad image is refused whole.
"""

import base64
import binascii
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
from evernear.serving.messages import Neighbor, Prediction, Refusal

Images = list[bytes | Refusal] | Pixels
"""Image files, a `Refusal` standing in for one that cannot be read; or pixels (N, H, W, C) of uint8."""
Tensors = list[dict[str, Any]]
IMAGES, PIXELS = "images", "pixels"
_NOBODY = Neighbor(label="", dist=-1.0)
"""Stands in ``neighbor_labels`` and ``neighbor_dists`` where an approximate index found fewer neighbours."""


MAX_TENSORS = 64
"""Inputs or outputs that a v2 request may name; it needs one input and has six outputs."""


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
    """A v2 request over REST. Decoding ends at the first fault, where KServe's pydantic model collects them all."""

    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


_INFER = msgspec.json.Decoder(_Infer)


@dataclass(frozen=True)
class Question:
    """What one request asks for; ``request`` is the v2 request, None in v1."""

    images: Images
    request: InferRequest | None


def read_question(payload: Any, shape: Preprocessing, max_images: int) -> Question:
    """A request as KServe decodes it: `InferRequest` in v2, the parsed JSON in v1.

    Raises:
        InvalidArgument: it is no request of either protocol.
        ResourceExhausted: it holds more than ``max_images``.
    """
    if isinstance(payload, InferRequest):
        return Question(_images_of(payload, shape, max_images), payload)
    instances = _instances_of(payload)
    _require_few(len(instances), max_images)
    return Question([_image_of(instance) for instance in instances], None)


def read_infer_request(body: bytes, model_name: str) -> InferRequest:
    """The JSON of a v2 request.

    Raises:
        InvalidArgument: it is none of the protocol.
    """
    try:
        request = _INFER.decode(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The request is none of the Open Inference Protocol: {error}.") from None
    require_few_tensors(len(request.inputs), len(request.outputs or ()))
    return InferRequest(
        model_name=model_name,
        request_id=request.id,
        parameters=request.parameters,
        infer_inputs=[
            InferInput(each.name, each.shape, each.datatype, each.data, each.parameters or {})
            for each in request.inputs
        ],
        request_outputs=[RequestedOutput(each.name, each.parameters or {}) for each in request.outputs or ()] or None,
    )


def require_few_tensors(inputs: int, outputs: int) -> None:
    """Stop a v2 request before its tensors become objects.

    Raises:
        InvalidArgument: it names more than `MAX_TENSORS`.
    """
    if max(inputs, outputs) > MAX_TENSORS:
        raise InvalidArgument(f"The request names more than {MAX_TENSORS} inputs or outputs.")


def write_answer(
    question: Question, answers: Sequence[Prediction | Refusal], model_name: str
) -> dict[str, Any] | InferResponse:
    """The answer in the protocol of the question.

    Raises:
        InvalidArgument: v1 and no image could be answered, or v2 and one could not.
    """
    refused = [(number, answer) for number, answer in enumerate(answers) if isinstance(answer, Refusal)]
    if question.request is None:
        if refused and len(refused) == len(answers):
            raise InvalidArgument(refused[0][1].message)
        return {"predictions": [answer.model_dump(mode="json") for answer in answers]}
    if refused:
        number, refusal = refused[0]
        raise InvalidArgument(f"Image {number + 1} of {len(answers)} cannot be answered: {refusal.message}")
    return _response([answer for answer in answers if isinstance(answer, Prediction)], question.request, model_name)


def read_answers(response: InferResponse) -> list[Prediction]:
    """The predictions in what `write_answer` made for v2.

    Raises:
        ValueError: it was made by another model.
    """
    columns = {name: _column(response, name) for name in ("pred", "dist", "unknown", "version")}
    near = zip(_column(response, "neighbor_labels"), _column(response, "neighbor_dists"), strict=True)
    return [
        Prediction(
            pred=pred,
            dist=dist,
            unknown=unknown,
            neighbors=tuple(
                Neighbor(label=label, dist=away)
                for label, away in zip(labels, dists, strict=True)
                if away != _NOBODY.dist
            ),
            version=version,
        )
        for pred, dist, unknown, version, (labels, dists) in zip(*columns.values(), near, strict=True)
    ]


def ask_v1(images: Sequence[bytes]) -> dict[str, Any]:
    """A v1 request."""
    return {"instances": [{"data": base64.b64encode(image).decode()} for image in images]}


def ask_v2(pixels: Pixels, model_name: str, binary: bool) -> InferRequest:
    """A v2 request for pixels (N, H, W, C). ``binary`` is for gRPC: over REST KServe's client contradicts itself
    about the content type of binary data.
    """
    tensor = InferInput(PIXELS, list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels, binary_data=binary)
    return InferRequest(model_name=model_name, infer_inputs=[tensor])


def input_types(shape: Preprocessing) -> Tensors:
    """The inputs of a predictor, for the protocol's model metadata; a request has one of the two."""
    pixels = [-1, shape.height_px, shape.width_px, shape.channels]
    return [_described(IMAGES, "BYTES", [-1]), _described(PIXELS, "UINT8", pixels)]


def output_types() -> Tensors:
    """The outputs, for the protocol's model metadata."""
    return [
        _described("pred", "BYTES", [-1]),
        _described("dist", "FP32", [-1]),
        _described("unknown", "BOOL", [-1]),
        _described("neighbor_labels", "BYTES", [-1, -1]),
        _described("neighbor_dists", "FP32", [-1, -1]),
        _described("version", "BYTES", [-1]),
    ]


def _described(name: str, datatype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


def _instances_of(payload: Any) -> list[Any]:
    if isinstance(payload, bytes):  # KServe parses only some content types
        try:
            payload = json.loads(payload)
        except (ValueError, RecursionError):
            raise InvalidArgument('The request is no JSON; send {"instances": [{"data": "<base64>"}]}.') from None
    instances: Any = cast(dict[str, Any], payload).get("instances") if isinstance(payload, dict) else None
    if not isinstance(instances, list):
        raise InvalidArgument('The request has no list "instances"; send {"instances": [{"data": "<base64>"}]}.')
    return cast(list[Any], instances)


def _image_of(instance: Any) -> bytes | Refusal:
    encoded: Any = cast(dict[str, Any], instance).get("data") if isinstance(instance, dict) else None
    if not isinstance(encoded, str):
        return Refusal(message='The instance has no text under "data".')
    return _from_base64(encoded)


def _from_base64(encoded: str) -> bytes | Refusal:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return Refusal(message="The image is no base64.")


def _images_of(request: InferRequest, shape: Preprocessing, max_images: int) -> Images:
    tensors = {(tensor.name, tensor.datatype): tensor for tensor in request.inputs}
    if len(request.inputs) != 1 or not tensors.keys() <= {(IMAGES, "BYTES"), (PIXELS, "UINT8")}:
        raise InvalidArgument(f'Send one input: "{IMAGES}", BYTES [N], or "{PIXELS}", UINT8 [N, H, W, C].')
    ((name, _), tensor) = tensors.popitem()
    dims = tensor.shape
    wanted = (shape.height_px, shape.width_px, shape.channels) if name == PIXELS else ()
    if not dims or dims[0] < 0 or tuple(dims[1:]) != wanted:
        raise InvalidArgument(f'"{name}" has the shape {dims}; the release takes {["N", *wanted]}.'.replace("'", ""))
    _require_few(dims[0], max_images)
    try:
        return _pixels(tensor) if name == PIXELS else _files(tensor)
    except (ValueError, TypeError, OverflowError, struct.error):
        raise InvalidArgument(f'The data of "{name}" do not fit its shape {dims} and type.') from None


def _pixels(tensor: InferInput) -> Pixels:
    """The tensor's data; JSON may hold what is no uint8, which a plain cast would wrap or cut."""
    if not tensor.data:
        return tensor.as_numpy()
    values = np.asarray(tensor.data)
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 255:
        raise ValueError
    return values.astype(np.uint8).reshape(tensor.shape)


def _files(tensor: InferInput) -> list[bytes | Refusal]:
    return [_file(image) for image in tensor.as_numpy().tolist()]


def _file(image: Any) -> bytes | Refusal:
    """JSON's text is base64, gRPC's bytes are the image file itself."""
    if isinstance(image, str):
        return _from_base64(image)
    if not isinstance(image, bytes):
        raise TypeError
    return image


def _require_few(count: int, max_images: int) -> None:
    if count > max_images:
        raise ResourceExhausted(f"The request holds {count} images, of {max_images} that are taken at once.")


def _response(predictions: list[Prediction], request: InferRequest, model_name: str) -> InferResponse:
    count = len(predictions)
    width = max((len(p.neighbors) for p in predictions), default=0)
    near = [n for p in predictions for n in (*p.neighbors, *[_NOBODY] * (width - len(p.neighbors)))]
    return InferResponse(
        response_id=request.id or str(uuid4()),
        model_name=model_name,
        infer_outputs=[
            InferOutput("pred", [count], "BYTES", [p.pred for p in predictions]),
            InferOutput("dist", [count], "FP32", [p.dist for p in predictions]),
            InferOutput("unknown", [count], "BOOL", [p.unknown for p in predictions]),
            InferOutput("neighbor_labels", [count, width], "BYTES", [n.label for n in near]),
            InferOutput("neighbor_dists", [count, width], "FP32", [n.dist for n in near]),
            InferOutput("version", [count], "BYTES", [p.version for p in predictions]),
        ],
        use_binary_outputs=request.use_binary_outputs,
        requested_outputs=request.request_outputs,
    )


def _column(response: InferResponse, name: str) -> list[Any]:
    output = response.get_output_by_name(name)
    if output is None:
        raise ValueError(f"there is no output {name!r}")
    return _as_text(output.as_numpy()).tolist()


def _as_text(values: NDArray[Any]) -> NDArray[Any]:
    """gRPC gives bytes where JSON gives text."""
    if values.dtype != np.object_:
        return values
    texts = [value.decode() if isinstance(value, bytes) else value for value in values.ravel().tolist()]
    return np.array(texts, np.object_).reshape(values.shape)
