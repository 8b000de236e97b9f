"""Extract images from requests: the body itself, a multipart field, or base64 in JSON.

The base64 text may be wrapped, URL-safe, unpadded, or part of a ``data:`` URI.

JSON is decoded with a schema, which creates only the base64 text. The `json` module would also
create all other values, which can take 25 times as much memory as the body itself.
"""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import numpy as np

from evernear.data.preprocess import Pixels
from evernear.errors import DataError, EvernearError
from evernear.release.manifest import ReleaseManifest
from evernear.serving.responses import MESSAGE_MAX_IMAGES, PIXELS_FIELD, PREPROCESSING_FIELD, Rejection

FIELDS = ("body", "data", "image", "file")
# An 8 x 8 grayscale PNG image.
EXAMPLE_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAADElEQVR4AWNgoA4AAABIAAE8O4AtAAAAAElFTkSuQmCC"
_MAX_REASON_LENGTH = 200
_JSON_STARTS = b"{[ \n\r\t"
_AS_BODY = "send it as the body with Content-Type image/png, image/jpeg, image/webp or image/heic"
_AS_JSON = 'as JSON {"data": "<base64>"}'
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard"}
"""Signatures of compressed bodies. Deflate and Brotli data have none."""
_TO_STANDARD_ALPHABET = str.maketrans("-_", "+/", " \t\r\n")


class RequestError(EvernearError):
    """The body of a request is not the expected JSON."""


class ImageRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An image to recognize."""

    data: Annotated[
        str,
        msgspec.Meta(
            description="A PNG, JPEG, WebP or HEIC file of any size, gray or color, in base64.",
            examples=[EXAMPLE_IMAGE],
        ),
    ]


class _LenientImageRequest(msgspec.Struct):
    data: str


_STRICT = msgspec.json.Decoder(ImageRequest)
_LENIENT = msgspec.json.Decoder(_LenientImageRequest)


def image_request_schema() -> dict[str, Any]:
    (_, components) = msgspec.json.schema_components([ImageRequest])
    return components["ImageRequest"]


def decode_base64(text: str) -> bytes:
    """Decode base64 or a ``data:`` URI, also wrapped, URL-safe or unpadded."""
    with suppress(msgspec.ValidationError):
        return msgspec.convert(text, bytes)  # only standard base64; the base64 module takes ten times as long
    if text[:5].lower() == "data:":
        header, comma, text = text.partition(",")
        if not (comma and header.lower().endswith(";base64")):
            raise binascii.Error("the data: URI is not base64")
    encoded = text.translate(_TO_STANDARD_ALPHABET).rstrip("=")
    return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)


def compression(body: bytes) -> str | None:
    """The error message for a compressed body, otherwise None."""
    kind = _COMPRESSED.get(body[:2]) or _COMPRESSED.get(body[:4])
    return kind and f"The request's body is compressed with {kind}; send it uncompressed."


def image_from_body(media_type: str, body: bytes) -> bytes:
    """The image file that is the body, or that an `ImageRequest` contains. JSON is also detected by
    its first byte, with which no image file begins, so a wrong media type is harmless."""
    if compressed := compression(body):
        raise RequestError(compressed)
    if not body or media_type.startswith("multipart/"):
        raise RequestError(f"The request has no image; {_AS_BODY}, or {_AS_JSON}.")
    is_json = body[:1] in _JSON_STARTS or media_type.startswith("application/json")
    return _image_from_json(body) if is_json else body


def _image_from_json(body: bytes) -> bytes:
    try:
        request = _STRICT.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError and UnicodeDecodeError are ValueErrors
        reason = str(error)[:_MAX_REASON_LENGTH]
        raise RequestError(f'The request is not {{"data": "<base64>"}}: {reason}.') from None
    try:
        return decode_base64(request.data)
    except ValueError:
        raise DataError('The text under "data" is not base64.') from None


def images_from_fields(
    fields: Mapping[str, bytes], release: ReleaseManifest
) -> Sequence[bytes | Rejection] | Sequence[Pixels | Rejection]:
    """Extract the images from the fields of a TorchServe request: one image file, or the pixels of
    several images."""
    if PIXELS_FIELD not in fields:
        return [image_from_fields(fields)]
    shape, data = release.preprocessing, bytes(fields[PIXELS_FIELD])
    if fields.get(PREPROCESSING_FIELD) != shape.model_dump_json().encode():
        message = f"The pixels do not have the preprocessing of release {release.version}; prepare the image again."
        return [
            Rejection(code=HTTPStatus.CONFLICT, type="OtherPreprocessing", message=message, version=release.version)
        ]
    count, rest = divmod(len(data), math.prod(shape.shape))
    if rest or not 1 <= count <= MESSAGE_MAX_IMAGES:
        size = " x ".join(map(str, shape.shape))
        message = f"{len(data)} bytes are not the pixels of 1 to {MESSAGE_MAX_IMAGES} images of {size} bytes."
        return [Rejection(type="BadPixels", message=message)]
    return list(np.frombuffer(data, np.uint8).reshape(count, *shape.shape))


def image_from_fields(fields: Mapping[str, bytes]) -> bytes | Rejection:
    """Extract the image file from the fields of a TorchServe request. A plain body is ``body``.

    JSON is detected by its first byte, with which no image file begins, so a wrong content type is
    harmless. Unknown JSON fields are ignored.
    """
    images = [bytes(fields[name]) for name in FIELDS if name in fields]
    if len(images) > 1:
        return Rejection(type="ManyImages", message="The form has several images or files; send one image per request.")
    data = next(iter(images), None)
    if data is None:
        return Rejection(
            type="NoImage",
            message=f'The request has no image; {_AS_BODY}, as a multipart field "data", or {_AS_JSON}.',
        )
    if not data:
        return Rejection(type="NoImage", message="The image is empty.")
    if compressed := compression(data):
        return Rejection(type="Compressed", message=compressed)
    if data[:1] not in _JSON_STARTS:
        return data
    try:
        return decode_base64(_LENIENT.decode(data).data)
    except msgspec.ValidationError:
        return Rejection(type="BadJson", message='The request\'s JSON has no text under "data".')
    except (ValueError, RecursionError):  # msgspec.DecodeError, binascii.Error and UnicodeDecodeError are ValueErrors
        return Rejection(type="BadJson", message="The request is not JSON with base64 in it.")
