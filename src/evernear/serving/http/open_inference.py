"""The Open Inference Protocol (v2): tensors in JSON, in binary after JSON, and in protobuf messages.

A request carries one tensor: ``images`` (BYTES, shape (N,)) or ``pixels`` (UINT8, shape
(N, H, W, C), preprocessed as the release specifies). Its response consists of tensors, which cannot
represent errors. An invalid image therefore fails the whole request.
"""  # noqa: W505

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, cast
from uuid import uuid4

import msgspec
import numpy as np
from starlette.exceptions import HTTPException

from evernear.data.preprocess import Pixels, Preprocessing
from evernear.release.manifest import ReleaseManifest
from evernear.serving.http.decoder import Files
from evernear.serving.http.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from evernear.serving.request_parsing import compression, decode_base64
from evernear.serving.responses import Neighbor, Prediction, Rejection

HEADER_LENGTH = "inference-header-content-length"
"""The HTTP header with the size in bytes of the JSON before binary data."""
IMAGES, PIXELS = "images", "pixels"
OUTPUTS = {
    "pred": ("BYTES", 1),
    "dist": ("FP32", 1),
    "unknown": ("BOOL", 1),
    "neighbor_labels": ("BYTES", 2),
    "neighbor_dists": ("FP32", 2),
    "version": ("BYTES", 1),
    "neighbor_rows": ("INT64", 2),
}
"""Datatype and rank of each output tensor. Add new ones at the end, because some clients access
them by position."""
MAX_TENSORS = 64
"""Limit for the inputs and the outputs of a request. A valid one has one input."""
_NUMBERS = {"FP32": "<f4", "BOOL": "?", "INT64": "<i8", "UINT8": "u1"}
_CONTENTS = {"BYTES": "bytes_contents", "FP32": "fp32_contents", "BOOL": "bool_contents", "INT64": "int64_contents"}
_PADDING = Neighbor(label="", dist=-1.0, row=-1)
"""Fills the neighbor tensors if an approximate index returns fewer neighbors for one image."""


class _Parameters(msgspec.Struct):
    """Those of the extension for binary data; others are ignored."""

    binary_data_size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    binary_data: bool | None = None
    binary_data_output: bool = False


class Tensor(msgspec.Struct):
    """``data`` is a list, or bytes in the binary format, to which JSON only refers."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | bytes = []
    parameters: _Parameters | None = None


class InferRequest(NamedTuple):
    """``outputs`` maps the names of the requested outputs to whether they are binary."""

    id: str
    inputs: list[Tensor]
    outputs: dict[str, bool]


class _JsonOutput(msgspec.Struct):
    name: str
    parameters: _Parameters | None = None


class _JsonRequest(msgspec.Struct):
    """Decoding stops at the first error."""

    inputs: list[Tensor]
    id: str | None = None
    parameters: _Parameters | None = None
    outputs: list[_JsonOutput] | None = None


class _JsonResponse(msgspec.Struct):
    outputs: list[Tensor]


_REQUEST = msgspec.json.Decoder(_JsonRequest)
_RESPONSE = msgspec.json.Decoder(_JsonResponse)


def parse_rest(body: bytes, header_length: str | None) -> InferRequest:
    """Parse JSON, or JSON of ``header_length`` bytes and binary data.

    Raises:
        HTTPException: with status 400, the request does not conform to the protocol.
    """
    if compressed := compression(body):
        raise invalid(compressed)
    try:
        head, binary = _split(body, header_length)
        request = _REQUEST.decode(head)
        require_few_tensors(len(request.inputs), len(request.outputs or ()))
        inputs = _with_binary(request.inputs, binary)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The request does not conform to the Open Inference Protocol: {error}.") from None
    default = request.parameters is not None and request.parameters.binary_data_output
    wanted = {
        output.name: default if (binary := output.parameters and output.parameters.binary_data) is None else binary
        for output in request.outputs or ()
    }
    return InferRequest(request.id or str(uuid4()), inputs, _outputs(wanted, default))


def parse_grpc(request: ModelInferRequest) -> InferRequest:
    """Raises the errors of `parse_rest`."""
    require_few_tensors(len(request.inputs), len(request.outputs))
    raw = request.raw_input_contents
    if raw and (len(raw) != len(request.inputs) or any(tensor.HasField("contents") for tensor in request.inputs)):
        raise invalid("Send the data of all inputs in raw_input_contents, or of all in contents.")
    listed = [tensor.contents.bytes_contents or tensor.contents.uint_contents for tensor in request.inputs]
    inputs = [
        Tensor(each.name, each.datatype, list(each.shape), data)
        for each, data in zip(request.inputs, raw or map(list, listed), strict=True)
    ]
    outputs = _outputs({output.name: bool(raw) for output in request.outputs}, bool(raw))
    return InferRequest(request.id or str(uuid4()), inputs, outputs)


def images_of(request: InferRequest, shape: Preprocessing, max_images: int, *, pixels: bool) -> Files | Pixels:
    """The images of a request. ``shape`` is that of ``pixels``, if the server accepts them.

    Raises:
        HTTPException: the tensor is not an expected one (400), or has too many images (413).
    """
    accepted = _inputs(shape, pixels=pixels)
    names = [(tensor.name, tensor.datatype) for tensor in request.inputs]
    if len(names) != 1 or names[0] not in accepted:
        other = f', or "{PIXELS}", UINT8 [N, H, W, C]' if pixels else "; only the predictor accepts pixels"
        raise invalid(f'Send one input: "{IMAGES}", BYTES [N]{other}.')
    (tensor,) = request.inputs
    expected = accepted[names[0]]
    dims = tensor.shape
    if not dims or dims[0] < 0 or tuple(dims[1:]) != expected:
        raise invalid(f'"{tensor.name}" has the shape {dims}; expected {["N", *expected]}.'.replace("'", ""))
    require_few_images(dims[0], max_images)
    try:
        return _pixels(tensor) if tensor.name == PIXELS else _files(tensor)
    except (ValueError, TypeError, OverflowError, struct.error):
        raise invalid(f'The data of "{tensor.name}" do not fit its shape {dims} and type.') from None


def rest_response(
    request: InferRequest, model: str, version: str, results: Sequence[Prediction | Rejection]
) -> tuple[bytes, int | None]:
    """The body of a response, and the size of its JSON if binary data follow.

    Raises:
        HTTPException: with status 400, an image was rejected.
    """
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name, datatype, shape, values in _columns(_predictions(results)):
        if name not in request.outputs:
            continue
        output: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
        if request.outputs[name]:
            binary.append(_encode(datatype, values))
            outputs.append(output | {"parameters": {"binary_data_size": len(binary[-1])}})
        else:
            outputs.append(output | {"data": values})
    head = msgspec.json.encode({"model_name": model, "model_version": version, "id": request.id, "outputs": outputs})
    return b"".join([head, *binary]), len(head) if binary else None


def grpc_response(
    request: InferRequest, model: str, version: str, results: Sequence[Prediction | Rejection]
) -> ModelInferResponse:
    """Raises the errors of `rest_response`."""
    response = ModelInferResponse(model_name=model, model_version=version, id=request.id)
    for name, datatype, shape, values in _columns(_predictions(results)):
        if name not in request.outputs:
            continue
        output = response.outputs.add(name=name, datatype=datatype, shape=shape)
        if request.outputs[name]:
            response.raw_output_contents.append(_encode(datatype, values))
        else:
            data = [value.encode() for value in values] if datatype == "BYTES" else values
            getattr(output.contents, _CONTENTS[datatype]).extend(data)
    return response


def rest_request(pixels: Pixels) -> tuple[bytes, bytes]:
    """The JSON and the binary data of a request for ``pixels`` of shape (N, H, W, C)."""
    data = pixels.tobytes()
    tensor = {"name": PIXELS, "shape": pixels.shape, "datatype": "UINT8", "parameters": {"binary_data_size": len(data)}}
    return msgspec.json.encode({"inputs": [tensor], "parameters": {"binary_data_output": True}}), data


def grpc_request(pixels: Pixels, model: str) -> ModelInferRequest:
    tensor = ModelInferRequest.InferInputTensor(name=PIXELS, datatype="UINT8", shape=pixels.shape)
    return ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[pixels.tobytes()])


def predictions_of_rest(body: bytes, header_length: str | None) -> list[Prediction]:
    """Parse a response of `rest_response`. Raises any error for another one."""
    head, binary = _split(body, header_length)
    return _rows(_with_binary(_RESPONSE.decode(head).outputs, binary))


def predictions_of_grpc(response: ModelInferResponse) -> list[Prediction]:
    """Parse a response of `grpc_response` with raw tensors. Raises any error for another one."""
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return _rows(Tensor(output.name, output.datatype, list(output.shape), raw) for output, raw in pairs)


def tensors(release: ReleaseManifest, *, pixels: bool) -> dict[str, list[dict[str, Any]]]:
    """The alternative inputs and the outputs, for the metadata of a model."""
    accepted = _inputs(release.preprocessing, pixels=pixels)
    inputs = ((name, datatype, (-1, *shape)) for (name, datatype), shape in accepted.items())
    outputs = ((name, datatype, (-1,) * rank) for name, (datatype, rank) in OUTPUTS.items())
    return {"inputs": [*map(_described, inputs)], "outputs": [*map(_described, outputs)]}


def _inputs(shape: Preprocessing, *, pixels: bool) -> dict[tuple[str, str], tuple[int, ...]]:
    """The shape of one image, by the name and the datatype of its tensor."""
    return {(IMAGES, "BYTES"): ()} | ({(PIXELS, "UINT8"): shape.shape} if pixels else {})


def _described(tensor: tuple[str, str, tuple[int, ...]]) -> dict[str, Any]:
    return dict(zip(("name", "datatype", "shape"), tensor, strict=True))


def require_few_tensors(inputs: int, outputs: int) -> None:
    """Check a request before tensor objects are created."""
    if max(inputs, outputs) > MAX_TENSORS:
        raise invalid(f"The request names more than {MAX_TENSORS} inputs or outputs.")


def require_few_images(count: int, max_images: int) -> None:
    if count > max_images:
        message = f"The request has {count} images; the limit is {max_images}."
        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def invalid(message: str) -> HTTPException:
    return HTTPException(HTTPStatus.BAD_REQUEST, message)


def file_of(encoded: str) -> bytes | Rejection:
    try:
        return decode_base64(encoded)
    except ValueError:
        return Rejection(message="The image is not base64.")


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    if header_length is None:
        return body, b""
    length = int(header_length) if re.fullmatch("[0-9]{1,18}", header_length) else -1
    if not 0 <= length <= len(body):
        raise ValueError(f"the header {HEADER_LENGTH} does not fit the body")
    return body[:length], body[length:]


def _with_binary(tensors: list[Tensor], binary: bytes) -> list[Tensor]:
    """``tensors``, with the data in ``binary`` to which they refer."""
    for tensor in tensors:
        size = tensor.parameters and tensor.parameters.binary_data_size
        if isinstance(tensor.data, bytes) or (size or 0) > len(binary):
            raise ValueError(f"the data of {tensor.name!r} are no list, or do not fit the body")
        if size is not None and tensor.data:
            raise ValueError(f"the data of {tensor.name!r} are in the JSON and after it")
        if size is not None:
            tensor.data, binary = binary[:size], binary[size:]
    if binary:
        raise ValueError("the body has more binary data than its tensors")
    return tensors


def _outputs(wanted: dict[str, bool], binary_by_default: bool) -> dict[str, bool]:
    if unknown := [name for name in wanted if name not in OUTPUTS]:
        raise invalid(f"The model has no output {unknown[0][:64]!r}; it has {', '.join(OUTPUTS)}.")
    return wanted or dict.fromkeys(OUTPUTS, binary_by_default)


def _pixels(tensor: Tensor) -> Pixels:
    """JSON may contain values that a cast to uint8 would wrap or truncate."""
    if isinstance(tensor.data, bytes):
        return np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape)
    values = np.asarray(tensor.data)
    if values.size and (values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 255):
        raise ValueError
    return values.astype(np.uint8).reshape(tensor.shape)


def _files(tensor: Tensor) -> Files:
    """JSON contains an image as base64 text. All other formats contain the bytes of its file."""
    data = list(_texts(tensor.data)) if isinstance(tensor.data, bytes) else tensor.data
    if len(data) != tensor.shape[0]:
        raise ValueError
    return [_file(image) for image in data]


def _file(image: Any) -> bytes | Rejection:
    if isinstance(image, str):
        return file_of(image)
    if not isinstance(image, bytes):
        raise TypeError
    return image


def _texts(data: bytes) -> Iterator[bytes]:
    """The elements of a binary BYTES tensor: each after its size in 4 bytes."""
    position = 0
    while position < len(data):
        (size,) = struct.unpack_from("<I", data, position)
        if size > len(data) - position - 4:
            raise ValueError
        yield data[position + 4 : position + 4 + size]
        position += 4 + size


def _encode(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        texts = [value.encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return np.asarray(values, _NUMBERS[datatype]).tobytes()


def _decode(tensor: Tensor) -> list[Any]:
    if not isinstance(tensor.data, bytes):
        return tensor.data
    if tensor.datatype == "BYTES":
        return [text.decode() for text in _texts(tensor.data)]
    return cast(list[Any], np.frombuffer(tensor.data, _NUMBERS[tensor.datatype]).tolist())


def _predictions(results: Sequence[Prediction | Rejection]) -> list[Prediction]:
    predictions: list[Prediction] = []
    for number, result in enumerate(results, 1):
        if isinstance(result, Rejection):
            raise invalid(f"Image {number} of {len(results)} cannot be answered: {result.message}")
        predictions.append(result)
    return predictions


def _columns(predictions: list[Prediction]) -> Iterator[tuple[str, str, list[int], list[Any]]]:
    """Name, datatype, shape and values of each output tensor."""
    count, width = len(predictions), max((len(p.neighbors) for p in predictions), default=0)
    neighbors = [n for p in predictions for n in (*p.neighbors, *[_PADDING] * (width - len(p.neighbors)))]
    for name, (datatype, rank) in OUTPUTS.items():
        field = name.removeprefix("neighbor_").removesuffix("s")
        rows = predictions if rank == 1 else neighbors
        yield name, datatype, [count, width][:rank], [getattr(row, name if rank == 1 else field) for row in rows]


def _rows(tensors: Iterable[Tensor]) -> list[Prediction]:
    columns, count = {}, 0
    for tensor in tensors:
        columns[tensor.name], count = _decode(tensor), tensor.shape[0]
    width = len(columns["neighbor_rows"]) // max(1, count)
    names = [columns[f"neighbor_{name}s"] for name in ("label", "dist", "row")]
    neighbors = [Neighbor(label=label, dist=distance, row=row) for label, distance, row in zip(*names, strict=True)]
    return [
        Prediction(
            pred=pred,
            dist=dist,
            unknown=unknown,
            neighbors=tuple(n for n in neighbors[row * width : (row + 1) * width] if n.dist != _PADDING.dist),
            version=version,
        )
        for row, (pred, dist, unknown, version) in enumerate(
            zip(*(columns[name] for name in ("pred", "dist", "unknown", "version")), strict=True)
        )
    ]
