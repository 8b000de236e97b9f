"""Images in requests: the body itself, a multipart field, or base64 in JSON.

JSON is decoded against a schema, which builds nothing but the text. `json` would build whatever else a client sends,
at 25 times the size of the body.
"""

import base64
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from evernear.errors import DataError, EvernearError
from evernear.serving.responses import Rejection

FIELDS = ("body", "data", "image", "file")
# An 8 x 8 gray PNG.
EXAMPLE_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAADElEQVR4AWNgoA4AAABIAAE8O4AtAAAAAElFTkSuQmCC"
_MAX_REASON_LENGTH = 200


class RequestError(EvernearError):
    """The body of a request is not the expected JSON."""


class ImageRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An image to recognize."""

    data: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            description="A PNG, JPEG or WebP file of any size, gray or color, in base64.",
            examples=[EXAMPLE_IMAGE],
        ),
    ]


class _LenientImageRequest(msgspec.Struct):
    data: str


_STRICT = msgspec.json.Decoder(ImageRequest)
_LENIENT = msgspec.json.Decoder(_LenientImageRequest)


def image_request_schema() -> dict[str, Any]:
    """The JSON Schema of `ImageRequest`."""
    (_, components) = msgspec.json.schema_components([ImageRequest])
    return components["ImageRequest"]


def image_from_json(body: bytes) -> bytes:
    """Extract the image file from an `ImageRequest`.

    Raises:
        RequestError: the body is not such JSON.
        DataError: its text is not base64.
    """
    try:
        request = _STRICT.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError and UnicodeDecodeError are ValueErrors
        reason = str(error)[:_MAX_REASON_LENGTH]
        raise RequestError(f'The request is not {{"data": "<base64>"}}: {reason}.') from None
    try:
        return base64.b64decode(request.data, validate=True)
    except ValueError:
        raise DataError('The text under "data" is not base64.') from None


def image_from_fields(fields: Mapping[str, bytes]) -> bytes | Rejection:
    """Extract the image file from the fields of a TorchServe request, in which a plain body is named ``body``.

    JSON is recognized by its first byte, with which no image file begins, so a wrong content type is harmless. Unknown
    fields of the JSON are ignored.
    """
    data = next((bytes(fields[name]) for name in FIELDS if name in fields), None)
    if data is None:
        return Rejection(
            type="NoImage",
            message="The request has no image; send it as the body with Content-Type image/png, image/jpeg or "
            "image/webp, "
            'as a multipart field "data", or as JSON {"data": "<base64>"}.',
        )
    if not data:
        return Rejection(type="NoImage", message="The request's image is empty.")
    if data[:1] not in b"{ \n\r\t":
        return data
    try:
        return base64.b64decode(_LENIENT.decode(data).data, validate=True)
    except msgspec.ValidationError:
        return Rejection(type="BadJson", message='The request\'s JSON has no text under "data".')
    except (ValueError, RecursionError):  # msgspec.DecodeError, binascii.Error and UnicodeDecodeError are ValueErrors
        return Rejection(type="BadJson", message="The request is not JSON with base64 in it.")
