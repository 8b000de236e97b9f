"""A sample of the live queries, for the watcher to see drift in: written beside the server, shipped to the store.

::

    TORCHSERVE_HOME/queries/<time>-<version>-<host>-<process>-<random>.jsonl    closed files of this machine
    queries/<day>/<the same name>                                               in the store

A worker keeps a uniform sample of each period in memory and closes a file at its end: a first line that counts all
queries, then one for each that was kept. Files are whole or not there, bounded in rows and bytes, and no name is used
twice, so any number of workers and pods write side by side. Nothing here can fail a prediction or make it wait for a
disk: a thread writes, and what it cannot write it drops.
"""

import base64
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import AwareDatetime, Field, ValidationError

from evernear.data.preprocess import Pixels
from evernear.disk import disk_errors, write_atomically
from evernear.errors import EvernearError, IntegrityError
from evernear.frozen import Frozen
from evernear.release.archive_reader import ReleaseParts
from evernear.release.drift_baseline import PROJECTED_DIM, DriftBaseline
from evernear.release.manifest import DRIFT_BASELINE_FILE
from evernear.serving.configuration import QUERY_LOG_VARIABLE, QueryLogConfiguration
from evernear.serving.messages import Prediction
from evernear.store import Store

QUERIES = "queries/"
MAX_FILE_BYTES = 8 * 2**20
SHIP_EVERY_S = 60.0
_TIME = "%Y%m%dT%H%M%SZ"
_IMAGE_BYTES = MAX_FILE_BYTES // 2  # of images in one file, before base64 makes them 4/3
_log = logging.getLogger(__name__)


class _Logged(Frozen, allow_inf_nan=False):
    """A value in the log."""


class Period(_Logged):
    """The first line of a file: all queries of one worker in one period."""

    format: Literal[1] = 1
    version: str
    since: AwareDatetime
    until: AwareDatetime
    queries: int = Field(ge=1)
    unknown: int = Field(ge=0)


class LoggedQuery(_Logged):
    """One query that was kept."""

    at: AwareDatetime
    pred: str
    dist: float
    unknown: bool
    coordinates: tuple[float, ...] = Field(default=(), max_length=PROJECTED_DIM)
    """The projected embedding, see `evernear.release.drift_baseline`; empty for a release without a reference."""
    image: str = ""
    """The image as the network saw it, PNG in base64; only with ``serving.query_log=images``."""


class QueryLog:
    """The log of one worker, which answers with one release."""

    def __init__(self, told: QueryLogConfiguration, parts: ReleaseParts) -> None:
        self._told = told
        self._version = parts.manifest.version
        self._projection = _projection(parts)
        self._random = random.Random()  # noqa: S311 - a sample, no secret
        self._lock = threading.Lock()
        self._clear()

    @staticmethod
    def of_environment(parts: ReleaseParts) -> "QueryLog | None":
        """The log that the server asks for; None where it asks for none, or cannot be understood."""
        path = os.environ.get(QUERY_LOG_VARIABLE)
        if not path or not Path(path).is_file():
            return None
        try:
            return QueryLog(QueryLogConfiguration.model_validate_json(Path(path).read_bytes()), parts)
        except (OSError, ValidationError, EvernearError) as error:
            _log.warning("Queries are not logged: %s", error)
            return None

    def start(self) -> None:
        """Close a file at the end of each period, in a thread that ends with the process."""
        threading.Thread(target=self._close_for_ever, name="query-log", daemon=True).start()

    def note(
        self, predictions: Sequence[Prediction], embeddings: NDArray[np.float32] | None, images: Pixels | None
    ) -> None:
        """Count a batch, and keep what the sample wants of it (algorithm R, Vitter 1985).

        Row by row, ``embeddings`` and ``images`` are those of ``predictions``.
        """
        with self._lock:
            for row, prediction in enumerate(predictions):
                self._queries += 1
                self._unknown += prediction.unknown
                place = len(self._kept)
                if place >= self._told.sample:
                    place = self._random.randrange(self._queries)
                if place < self._told.sample:
                    self._keep(place, prediction, row, embeddings, images)

    def close_file(self) -> Path | None:
        """Write what was gathered since the last time, and its path; None where there was nothing.

        Raises:
            StoreError: the directory cannot be written; what was gathered is lost.
        """
        with self._lock:
            since, queries, unknown, kept = self._since, self._queries, self._unknown, self._kept
            self._clear()
        if not queries:
            return None
        until = datetime.now(UTC)
        period = Period(version=self._version, since=since, until=until, queries=queries, unknown=unknown)
        directory = self._told.directory
        with disk_errors(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(directory, self._told.size_bytes)
        host = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:63]
        path = directory / f"{until:{_TIME}}-{self._version}-{host}-{os.getpid()}-{uuid4().hex[:8]}.jsonl"
        write_atomically(path, "".join(f"{line}\n" for line in self._lines(period, kept)))
        return path

    def _keep(
        self,
        place: int,
        prediction: Prediction,
        row: int,
        embeddings: NDArray[np.float32] | None,
        images: Pixels | None,
    ) -> None:
        # Copies: a view would hold the whole batch.
        embedding = embeddings[row].copy() if embeddings is not None and self._projection is not None else None
        image = images[row].copy() if images is not None and self._told.images else None
        self._kept[place : place + 1] = [(time.time(), prediction, embedding, image)]

    def _lines(self, period: Period, kept: list[tuple[float, Prediction, Any, Any]]) -> Generator[str]:
        yield period.model_dump_json()
        image_bytes = 0
        for at_s, prediction, embedding, pixels in kept:
            coordinates = () if embedding is None else np.round(embedding @ self._projection, 5).tolist()
            image = _png(pixels) if pixels is not None and image_bytes < _IMAGE_BYTES else b""
            image_bytes += len(image)
            yield LoggedQuery(
                at=datetime.fromtimestamp(at_s, UTC),
                pred=prediction.pred,
                dist=prediction.dist,
                unknown=prediction.unknown,
                coordinates=coordinates,
                image=base64.b64encode(image).decode(),
            ).model_dump_json()

    def _clear(self) -> None:
        self._since = datetime.now(UTC)
        self._queries = self._unknown = 0
        self._kept: list[tuple[float, Prediction, NDArray[np.float32] | None, Pixels | None]] = []

    def _close_for_ever(self) -> None:
        while True:
            time.sleep(self._told.period_s)
            try:
                self.close_file()
            except Exception as error:  # whatever it is, the predictions go on and so does the log
                _log.warning("Some queries were not logged: %s", error)


def parse_file(data: bytes, place: str) -> tuple[Period, list[LoggedQuery]]:
    """A file of the log; ``data`` is a stranger's until it is parsed.

    Raises:
        IntegrityError: ``data``, which came from ``place``, is none.
    """
    try:
        first, *rest = data[: MAX_FILE_BYTES + 1].splitlines()
        return Period.model_validate_json(first), [LoggedQuery.model_validate_json(line) for line in rest]
    except ValueError:  # pydantic's is one
        raise IntegrityError(f"{place} is no file of the query log.") from None


def ship(directory: Path, store: Store) -> int:
    """Move the closed files of ``directory`` to the store, and tell how many; a repetition after a kill is harmless.

    Raises:
        StoreError: the store or the disk refuses; what is left is shipped the next time.
    """
    count = 0
    for path in sorted(directory.glob("*.jsonl")):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # another one ships too, or room was made
            continue
        store.put(f"{QUERIES}{path.name[:8]}/{path.name}", data)
        path.unlink(missing_ok=True)
        count += 1
    return count


def ship_until(ended: threading.Event, directory: Path, store: Store) -> None:
    """`ship` once a minute, and once more at the end; what fails is logged and tried again."""
    while True:
        at_end = ended.wait(SHIP_EVERY_S)
        try:
            ship(directory, store)
        except (EvernearError, OSError) as error:
            _log.warning("Logged queries are kept until they can be shipped: %s", error)
        if at_end:
            return


def closed_at(key: str) -> datetime | None:
    """When the file of that key was closed; None for what is no file of the log."""
    try:
        return datetime.strptime(PurePosixPath(key).name[:16], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


def _projection(parts: ReleaseParts) -> NDArray[np.float32] | None:
    if DRIFT_BASELINE_FILE not in parts.manifest.parts:
        return None
    return DriftBaseline.parse(parts.read(DRIFT_BASELINE_FILE), DRIFT_BASELINE_FILE).projection


def _make_room(directory: Path, size_bytes: int) -> None:
    """Remove the oldest files, so that with one more the others take at most ``size_bytes``."""
    files: list[tuple[str, Path, int]] = []
    for path in directory.glob("*.jsonl"):
        with suppress(FileNotFoundError):  # it was shipped meanwhile
            files.append((path.name, path, path.stat().st_size))
    left = sum(size for _, _, size in files)
    for _, path, size in sorted(files):
        if left <= size_bytes:
            break
        path.unlink(missing_ok=True)
        left -= size


def _png(image: Pixels) -> bytes:
    buffer = BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(buffer, format="PNG")
    return buffer.getvalue()
