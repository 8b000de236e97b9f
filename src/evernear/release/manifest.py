"""What a release says of itself: ``manifest.json`` inside the archive and in the registry."""

import re
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from evernear.data.preprocess import Preprocessing
from evernear.errors import IntegrityError

VERSION_PATTERN = r"^\d{8}\.\d{6}\.[0-9a-f]{8}$"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[str, Field(pattern=VERSION_PATTERN)]
PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(_Frozen):
    """One file of a release."""

    sha256: Sha256
    size_bytes: int = Field(ge=0)


class ReleaseManifest(_Frozen):
    """Everything that is known of a release; it never changes once it is archived.

    ``network_sha256`` is that of the TorchScript file, which also made the index's vectors. ``threshold`` is
    the L2 distance beyond which an image is unknown. ``parent`` is the champion that this release was
    measured against, and ``metrics`` are those of that measurement.
    """

    format: Literal[1] = 1
    version: Version
    created: AwareDatetime
    parts: dict[PartName, Part]
    network_sha256: Sha256
    dataset_name: str
    dataset_digest: str
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    max_pixels: int = Field(gt=0)
    embedding_dim: int = Field(gt=0)
    threshold: float
    metrics: dict[str, float]
    verdict_sha256: Sha256
    parent: Version | None
    evernear_version: str
    git_commit: str

    def to_json(self) -> bytes:
        """The manifest as it is stored."""
        return self.model_dump_json(indent=2).encode() + b"\n"


def parse_manifest(data: bytes, place: str) -> ReleaseManifest:
    """A stored manifest.

    Raises:
        IntegrityError: ``data``, which came from ``place``, is no release manifest.
    """
    try:
        return ReleaseManifest.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "the whole"
        raise IntegrityError(f"{place} is no release manifest: {where}: {fault['msg']}.") from None


def new_version(created: datetime, content_sha256: str) -> str:
    """A version that sorts by time, tells content apart and stands in a URL: ``20261120.140501.1a2b3c4d``.

    ``created`` is put in UTC; the last part is the beginning of ``content_sha256``.
    """
    return f"{created.astimezone(UTC):%Y%m%d.%H%M%S}.{content_sha256[:8]}"


def is_version(text: str) -> bool:
    """Whether ``text`` has the form of a version."""
    return re.fullmatch(VERSION_PATTERN.strip("^$"), text) is not None
