"""The text of a label or a group that another program stored."""

import json
import math
from decimal import Decimal

from evernear.errors import DataError

_MAX_SHOWN = 60
_JSON_KINDS: dict[type, str] = {dict: "object", float: "number"}


def field_text(value: object, what: str, kind: str = "") -> str:
    """The text of a value that is a label, a split or a group.

    A value is text, text in UTF-8 as bytes, a whole number, or a list of one such value. pandas
    stores the whole numbers of a column with missing values as floating-point numbers, so 3.0
    becomes 3. Booleans become true and false, as in JSON. A missing value (null, NaN or an empty
    list) becomes an empty string.

    Args:
        value: The value in Python.
        what: The field and its place, for messages.
        kind: The type of the field in its file. By default, the type is that of a JSON
            value.
    """
    match value:
        case str() if _is_utf8(value):
            return value
        case None | []:
            return ""
        case [single]:
            return field_text(single, what, kind)
        case bool():
            return json.dumps(value)
        case int():
            return str(value)
        case float() | Decimal() if math.isnan(value):
            return ""
        case float() | Decimal() if value % 1 == 0:
            return str(int(value))
        case bytes():
            try:
                return value.rstrip(b"\0").decode()  # NumPy pads texts of different lengths
            except UnicodeDecodeError:
                pass
        case _:
            pass
    shown = repr(value) if len(repr(value)) <= _MAX_SHOWN else f"{repr(value)[:_MAX_SHOWN]}..."
    kind = kind or _JSON_KINDS.get(type(value), type(value).__name__)
    raise DataError(
        f"{what} contains {shown}, which is neither one text nor a whole number (its type is {kind}); write one text"
        " for each image."
    )


def _is_utf8(text: str) -> bool:
    """Whether text is free of lone surrogates, which JSON allows."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
