"""The base class and the limits that the settings sections share."""

import re
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from evernear.common.environment import server_parts
from evernear.common.frozen import Frozen

MAX_PIXELS = 89_478_485
"""Upper bound of ``max_pixels``: Pillow treats larger images as decompression bombs."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PixelLimit = Annotated[int, Field(ge=64, le=MAX_PIXELS, description="Largest width times height of an image.")]
Port = Annotated[int, Field(ge=1, le=65535)]


def host_name(text: str) -> str:
    """A host name or IP address. Brackets around IPv6 are optional.

    Raises:
        ValueError: it is another text, such as a URL.
    """
    host = text.removeprefix("[").removesuffix("]")
    if re.fullmatch(r"[\w.-]*", host):
        return host
    try:
        return str(IPv6Address(host))
    except AddressValueError:
        raise ValueError("it is not a host name; leave out the scheme and the port") from None


Host = Annotated[str, AfterValidator(host_name)]


def _server_url(text: str) -> str:
    if text and server_parts(text) is None:
        raise ValueError("it is not of the form https://host:port/path")
    return text


ServerUrl = Annotated[str, AfterValidator(_server_url)]
"""The URL of a server, or an empty string."""


def expanded(path: Path) -> Path:
    """Expand ``~``, which a shell expands only at the start of a word.

    Raises:
        ValueError: no user has the name that follows ``~``.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"no user has the home directory {path.parts[0]}") from None


def absolute(path: str) -> Path:
    """Like `expanded`, but also resolve ``path`` against the current directory."""
    return expanded(Path(path)).absolute()


LocalPath = Annotated[Path, AfterValidator(expanded)]


class Section(Frozen, coerce_numbers_to_str=True, allow_inf_nan=False):
    """A group of settings. Unknown keys are rejected."""
