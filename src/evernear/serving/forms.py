"""The forms in which a request may carry its image: the body, a multipart field, or base64 in JSON."""

import base64
import json
from collections.abc import Mapping

from evernear.errors import DataError

FIELDS = ("body", "data", "image", "file")


def image_of(fields: Mapping[str, bytes]) -> bytes:
    """The bytes of the image file in a request's fields; TorchServe calls a plain body ``body``.

    JSON is ``{"data": "<base64>"}``. It is told by its first byte, which begins no PNG or JPEG: a wrong
    content type does no harm.

    Raises:
        DataError: there is none; the message is a sentence for the client.
    """
    data = next((bytes(fields[name]) for name in FIELDS if name in fields), None)
    if data is None:
        raise DataError(
            "The request holds no image; send it as the body with Content-Type image/png or image/jpeg, "
            'as a multipart field "data", or as JSON {"data": "<base64>"}.'
        )
    if not data:
        raise DataError("The request's image is empty.")
    return _from_json(data) if data[:1] in b"{ \n\r\t" else data


def _from_json(data: bytes) -> bytes:
    try:
        encoded = json.loads(data)["data"]
        return base64.b64decode(encoded, validate=True)
    except (ValueError, RecursionError):  # binascii.Error and UnicodeDecodeError are ValueErrors
        raise DataError("The request is no JSON with base64 in it.") from None
    except (KeyError, TypeError):
        raise DataError('The request\'s JSON has no text under "data".') from None
