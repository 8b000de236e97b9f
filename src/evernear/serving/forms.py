"""The forms in which a request may carry its image: the body, a multipart field, or base64 in JSON."""

import base64
from collections.abc import Mapping

import msgspec

from evernear.serving.messages import Refusal

FIELDS = ("body", "data", "image", "file")


class _Json(msgspec.Struct):
    """Decoding to a schema builds nothing but the text; `json` would build whatever else a client sends."""

    data: str


_JSON = msgspec.json.Decoder(_Json)


def image_of(fields: Mapping[str, bytes]) -> bytes | Refusal:
    """The bytes of the image file in a request's fields, or why there are none.

    TorchServe calls a plain body ``body``. JSON is ``{"data": "<base64>"}``; it is told by its first byte, which
    begins no PNG or JPEG: a wrong content type does no harm.
    """
    data = next((bytes(fields[name]) for name in FIELDS if name in fields), None)
    if data is None:
        return Refusal(
            type="NoImage",
            message="The request holds no image; send it as the body with Content-Type image/png or image/jpeg, "
            'as a multipart field "data", or as JSON {"data": "<base64>"}.',
        )
    if not data:
        return Refusal(type="NoImage", message="The request's image is empty.")
    return _from_json(data) if data[:1] in b"{ \n\r\t" else data


def _from_json(data: bytes) -> bytes | Refusal:
    try:
        return base64.b64decode(_JSON.decode(data).data, validate=True)
    except msgspec.ValidationError:
        return Refusal(type="BadJson", message='The request\'s JSON has no text under "data".')
    except (ValueError, RecursionError):  # msgspec.DecodeError, binascii.Error and UnicodeDecodeError are ValueErrors
        return Refusal(type="BadJson", message="The request is no JSON with base64 in it.")
