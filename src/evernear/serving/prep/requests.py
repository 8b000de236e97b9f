"""What a client of the preprocessing server sends."""

import base64
from typing import Annotated, Any

import msgspec
from PIL import Image

from evernear.data.image_file import EncodedImage
from evernear.errors import DataError, EvernearError
from evernear.serving.decoding import inspect_image
from evernear.serving.prep.releases import as_png

EXAMPLE_IMAGE = base64.b64encode(as_png(Image.new("L", (8, 8)))).decode()
_MAX_REASON_LENGTH = 200


class RequestError(EvernearError):
    """A request's body is not the JSON that is expected."""


class ImageRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An image to be recognized."""

    data: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            description="A PNG or JPEG file of any size, gray or color, in base64.",
            examples=[EXAMPLE_IMAGE],
        ),
    ]


# Decoding to a schema builds nothing but the text, where `json` would build 25 times the size of the body.
_DECODER = msgspec.json.Decoder(ImageRequest)


def schema() -> dict[str, Any]:
    """The JSON Schema of `ImageRequest`."""
    (_, components) = msgspec.json.schema_components([ImageRequest])
    return components["ImageRequest"]


def inspect_request(body: bytes, max_pixels: int) -> EncodedImage:
    """The image in a request's body, `{"data": "<base64>"}`.

    Raises:
        RequestError: the body is no such JSON.
        DataError: its text is not base64, or the image cannot be used.
    """
    try:
        request = _DECODER.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError and UnicodeDecodeError are ValueErrors
        reason = str(error)[:_MAX_REASON_LENGTH]
        raise RequestError(f'The request is not {{"data": "<base64>"}}: {reason}.') from None
    try:
        image = base64.b64decode(request.data, validate=True)
    except ValueError:
        raise DataError('The text under "data" is not base64.') from None
    return inspect_image(image, max_pixels)
