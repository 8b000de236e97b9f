"""The format of the query log files, and functions to read them.

Those in the store are untrusted, because anyone with write access may have changed them.
"""

import base64
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime, Field

from evernear.common.frozen import Document, Frozen
from evernear.common.store import ObjectInfo, Store
from evernear.errors import IntegrityError
from evernear.release.drift_baseline import PROJECTED_DIM

MAX_CHARACTERS = 2**16
"""Maximum length of an embedding as text. Those of evernear's networks need less."""
_TYPE = np.dtype("<f2")


def encode_embedding(embedding: NDArray[np.float32]) -> str:
    """Encode as base64 of little-endian float16 values, for responses and the query log."""
    return base64.b64encode(embedding.astype(_TYPE).tobytes()).decode()


def decode_embedding(text: str) -> NDArray[np.float32] | None:
    """Decode an embedding of shape (D,) from untrusted text. None if it is empty or damaged."""
    try:
        vector = np.frombuffer(base64.b64decode(text, validate=True), _TYPE).astype(np.float32)
    except ValueError:  # includes binascii.Error
        return None
    return vector if vector.any() and np.isfinite(vector).all() else None


QUERIES = "queries/"
MAX_FILE_BYTES = 8 * 2**20
TIME_FORMAT = "%Y%m%dT%H%M%SZ"


class Period(Document, allow_inf_nan=False):
    """The first line of a log file: a summary of one worker's queries in one period."""

    version: str
    since: AwareDatetime
    until: AwareDatetime
    queries: int = Field(ge=1)
    unknown: int = Field(ge=0)


class LoggedQuery(Frozen, allow_inf_nan=False):
    at: AwareDatetime
    pred: str
    dist: float
    unknown: bool
    coordinates: tuple[float, ...] = Field(default=(), max_length=PROJECTED_DIM)
    """The projected embedding (`evernear.release.drift_baseline`). Empty if it is unknown."""
    image: str = ""
    """The preprocessed image in base64, for uncertain queries (``serving.query_log: images``)."""
    embedding: str = Field(default="", max_length=MAX_CHARACTERS)
    """The embedding of ``image`` (`encode_embedding`)."""
    candidates: tuple[str, ...] = ()
    """The labels of the nearest neighbors, nearest first, if the query has an image or a file."""
    neighbors: tuple[int, ...] = ()
    """Their rows in the release's gallery."""
    id: str = Field(default="", max_length=128)
    """The request's id, which is also the ``id`` of its response. Empty without TorchServe."""
    file: str = ""
    """The client's file in base64, if the query is in the uniform sample of files."""
    preprocessed: bool = False
    """Whether ``file`` is the preprocessed image, because the client sent its pixels, or a file
    larger than `evernear.serving.query_log.SENT_MAX_BYTES`."""


class LogFile(NamedTuple):
    period: Period
    queries: list[LoggedQuery]


class SampledQuery(NamedTuple):
    """A query from the uniform sample of files, and the answer from release ``version``."""

    id: str
    at: datetime
    version: str
    pred: str
    dist: float
    unknown: bool
    file: bytes
    preprocessed: bool


def parse_file(data: bytes, source: str) -> LogFile:
    """Parse an untrusted log file from ``source``.

    Raises:
        IntegrityError: ``data`` is invalid.
    """
    try:
        first, *rest = data[: MAX_FILE_BYTES + 1].splitlines()
        return LogFile(Period.from_json(first, source), [LoggedQuery.model_validate_json(line) for line in rest])
    except (IntegrityError, ValueError):  # includes pydantic's ValidationError
        raise IntegrityError(f"{source} is not a file of the query log.") from None


def read_log(store: Store, key: str) -> LogFile | None:
    """Read a log file. None if it was removed, or is damaged, which the watcher reports."""
    stored = store.find(key)
    try:
        return parse_file(stored[0], key) if stored else None
    except IntegrityError:
        return None


def sampled_queries(data: bytes, source: str) -> list[SampledQuery]:
    """The queries of an untrusted log file that contain a sampled file.

    Raises:
        IntegrityError: ``data`` is invalid.
    """
    period, rows = parse_file(data, source)
    try:
        return [
            SampledQuery(
                id=row.id,
                at=row.at,
                version=period.version,
                pred=row.pred,
                dist=row.dist,
                unknown=row.unknown,
                file=base64.b64decode(row.file, validate=True),
                preprocessed=row.preprocessed,
            )
            for row in rows
            if row.file
        ]
    except ValueError:  # includes binascii.Error
        raise IntegrityError(f"{source} is not a file of the query log.") from None


def closed_at(key: str) -> datetime | None:
    """When the log file ``key`` was closed, or None if it is not a log file."""
    try:
        return datetime.strptime(PurePosixPath(key).name[:16], TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None


def is_log(info: ObjectInfo) -> bool:
    """Whether ``info`` is a log file that is not too large to read."""
    return closed_at(info.key) is not None and info.size_bytes <= MAX_FILE_BYTES
