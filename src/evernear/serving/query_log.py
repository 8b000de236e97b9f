"""The log of sampled live queries, from which the watcher detects drift.

Its files are written on the server's machine and then shipped to the store.

::

    TORCHSERVE_HOME/queries/<time>-<version>-<host>-<process>-<random>.jsonl    finished files on this machine
    queries/<day>/<same name>                                                   in the store

Each worker samples the queries of a period uniformly in memory, and writes a log file at the end of
the period, and when the worker itself ends.
The first line contains the total number of queries, and each other line a sampled query. If
``serving.query_log`` is ``images``, uncertain queries also contain the preprocessed image and its
embedding, and those in a smaller uniform sample (`SampledFiles`) the file that the client sent. Log
files are written atomically, and have a limited number of rows and bytes. Their names are unique,
so any number of workers and pods may write them. Logging never makes a prediction fail or wait for
a disk. A separate thread writes the files, and queries that cannot be written are dropped.
"""  # noqa: W505

import atexit
import base64
import heapq
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors, write_atomically
from evernear.common.store import Store
from evernear.data.preprocess import Pixels
from evernear.errors import EvernearError
from evernear.release.archive_reader import ReleaseParts
from evernear.release.drift_baseline import DriftBaseline
from evernear.release.manifest import DRIFT_BASELINE_FILE
from evernear.serving.configuration import QUERY_LOG_VARIABLE, QueryLogConfiguration
from evernear.serving.decoding import encode_png
from evernear.serving.query_log_files import QUERIES, TIME_FORMAT, LoggedQuery, Period, encode_embedding
from evernear.serving.responses import Prediction

SHIP_EVERY_S = 60.0
_IMAGE_BYTES = 3 * 2**20  # largest total size of the images in a file, before base64 adds a third
_SENT_BYTES = 3 * 2**19  # largest total size of the clients' files in a file, before base64 adds a third
SENT_MAX_BYTES = 2**19
"""Above this size, the preprocessed image replaces the client's file. Otherwise, three large files
would fill the sample."""
SENT_MAX_FILES = 20
UNCERTAIN_SHARE = 0.9
_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """An answered request, with its id and the file that the client sent, None if it sent
    pixels."""

    id: str
    file: bytes | None


class _Sample(NamedTuple):
    at_s: float
    prediction: Prediction
    coordinates: NDArray[np.float32] | None
    pixels: Pixels | None
    embedding: str
    id: str


class _File(NamedTuple):
    data: bytes
    preprocessed: bool


_NO_FILE = _File(b"", preprocessed=False)


class SampledFiles:
    """A uniform sample of files, limited in number and total size.

    It consists of the files with the smallest random priorities. Only the priority decides whether
    a file is dropped, so a small file is no more likely to remain than a large one.
    """

    def __init__(self) -> None:
        self._files: list[tuple[float, _File]] = []  # a heap with the largest priority first, as negative numbers
        self._bytes = 0
        self._limit = 1.0

    def admits(self, priority: float) -> bool:
        """Whether ``priority`` (0 to 1) is smaller than the priorities of all dropped files."""
        return priority < self._limit

    def add(self, priority: float, file: _File) -> None:
        """Add a file whose priority the sample `admits`, and drop those beyond the bounds."""
        heapq.heappush(self._files, (-priority, file))
        self._bytes += len(file.data)
        while self._bytes > _SENT_BYTES or len(self._files) > SENT_MAX_FILES:
            negative, dropped = heapq.heappop(self._files)
            self._bytes -= len(dropped.data)
            self._limit = -negative

    def by_priority(self) -> dict[float, _File]:
        return {-negative: file for negative, file in self._files}


class QueryLog:
    """The query log of one worker, which serves one release."""

    def __init__(self, configuration: QueryLogConfiguration, release: ReleaseParts) -> None:
        self._configuration = configuration
        self._version = release.manifest.version
        self._threshold = release.manifest.threshold
        self._projection = _projection(release)
        self._random = random.Random()  # noqa: S311 - sampling, not cryptography
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._clear()

    @staticmethod
    def from_environment(release: ReleaseParts) -> "QueryLog | None":
        """None if the log is off or its configuration is unreadable."""
        path = os.environ.get(QUERY_LOG_VARIABLE)
        if not path or not Path(path).is_file():
            return None
        try:
            return QueryLog(QueryLogConfiguration.load(Path(path)), release)
        except EvernearError as error:
            _log.warning("Queries are not logged: %s", error)
            return None

    def start(self) -> None:
        """Start a daemon thread that writes a file at the end of each period. The last file is
        written when the process exits."""
        threading.Thread(target=self._write_forever, name="query-log", daemon=True).start()
        atexit.register(self._try_to_write)

    def record(
        self,
        predictions: Sequence[Prediction],
        embeddings: NDArray[np.float32] | None,
        images: Pixels | None,
        requests: Sequence[Request] = (),
    ) -> None:
        """Count a batch's queries, and sample those with the smallest random priorities.

        ``embeddings`` and ``images`` have one row for each prediction. ``requests`` is empty, or
        has one entry for each prediction.
        """
        size = self._configuration.sample
        with self._lock:
            for row, prediction in enumerate(predictions):
                self._queries += 1
                self._unknown += prediction.unknown
                priority = self._random.random()
                if len(self._samples) >= size and -priority <= self._samples[0][0]:
                    continue
                request = requests[row] if requests else Request("", b"")
                sample = self._sample(prediction, row, embeddings, images, request.id)
                heapq.heappush(self._samples, (-priority, self._queries, sample))
                if len(self._samples) > size:
                    heapq.heappop(self._samples)
                if self._configuration.images and request.file != b"" and self._files.admits(priority):
                    self._files.add(priority, _stored_file(request.file, images, row))

    def write_file(self) -> Path | None:
        """Write the queries sampled since the last file, and return its path, None without any.

        Raises:
            StoreError: the directory is not writable. The queries are lost.
        """
        with self._writing:  # the exit of the process waits for a file that is being written
            return self._write_file()

    def _write_file(self) -> Path | None:
        with self._lock:
            since, queries, unknown = self._since, self._queries, self._unknown
            samples, files = self._samples, self._files.by_priority()
            self._clear()
        if not queries:
            return None
        until = datetime.now(UTC)
        period = Period(version=self._version, since=since, until=until, queries=queries, unknown=unknown)
        directory = self._configuration.directory
        with disk_errors(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_oldest(directory, self._configuration.size_bytes)
        host = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:63]
        path = directory / f"{until:{TIME_FORMAT}}-{self._version}-{host}-{os.getpid()}-{uuid4().hex[:8]}.jsonl"
        write_atomically(path, "".join(f"{line}\n" for line in _lines(period, samples, files)))
        return path

    def _sample(
        self, prediction: Prediction, row: int, embeddings: NDArray[np.float32] | None, images: Pixels | None, id_: str
    ) -> _Sample:
        coordinates = None if embeddings is None else embeddings[row] @ self._projection
        # A view would keep the whole batch in memory.
        wanted = self._configuration.images and is_uncertain(prediction, self._threshold)
        pixels = images[row].copy() if images is not None and wanted else None
        embedding = "" if embeddings is None or pixels is None else encode_embedding(embeddings[row])
        return _Sample(time.time(), prediction, coordinates, pixels, embedding, id_)

    def _clear(self) -> None:
        self._since = datetime.now(UTC)
        self._queries = self._unknown = 0
        self._samples: list[tuple[float, int, _Sample]] = []  # a heap of (negative priority, query number, sample)
        self._files = SampledFiles()

    def _write_forever(self) -> None:
        while True:
            time.sleep(self._configuration.period_s)
            self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self.write_file()
        except EvernearError as error:
            _log.warning("Some queries were not logged: %s", error)
        except Exception:  # neither predictions nor the thread must stop
            _log.exception("Some queries were not logged")


def is_uncertain(prediction: Prediction, threshold: float) -> bool:
    """Whether a query needs manual review: it is unknown, or near the threshold or another class.

    "Near" means that the distance to the nearest neighbor exceeds the share `UNCERTAIN_SHARE` of
    the threshold, or of the distance to the nearest neighbor with a different label.
    """
    others = [neighbor.dist for neighbor in prediction.neighbors if neighbor.label != prediction.pred]
    return prediction.unknown or prediction.dist > UNCERTAIN_SHARE * min([threshold, *others])


def ship_query_log(directory: Path, store: Store) -> int:
    """Move the files to the store, and return how many. A killed call can be repeated."""
    count = 0
    for path in sorted(directory.glob("*.jsonl")):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # shipped by a different process, or removed as the oldest file
            continue
        store.put(f"{QUERIES}{path.name[:8]}/{path.name}", data)
        path.unlink(missing_ok=True)
        count += 1
    return count


def ship_until(ended: threading.Event, directory: Path, store: Store) -> None:
    """Call `ship_query_log` every minute, and once after ``ended``. Failures are only logged."""
    while True:
        at_end = ended.wait(SHIP_EVERY_S)
        try:
            ship_query_log(directory, store)
        except (EvernearError, OSError) as error:
            _log.warning("Logged queries wait until they can be shipped: %s", error)
        if at_end:
            return


def _projection(release: ReleaseParts) -> NDArray[np.float32]:
    return DriftBaseline.parse(release.read(DRIFT_BASELINE_FILE), DRIFT_BASELINE_FILE).projection


def _lines(period: Period, samples: list[tuple[float, int, _Sample]], files: dict[float, _File]) -> Generator[str]:
    """Yield the lines of a log file, with the queries in order of arrival."""
    yield period.model_dump_json()
    image_bytes = 0
    for negative_priority, _, sample in sorted(samples, key=lambda entry: entry[1]):
        file = files.get(-negative_priority, _NO_FILE)
        image = encode_png(sample.pixels) if sample.pixels is not None and image_bytes < _IMAGE_BYTES else b""
        image_bytes += len(image) + len(sample.embedding)
        yield LoggedQuery(
            at=datetime.fromtimestamp(sample.at_s, UTC),
            pred=sample.prediction.pred,
            dist=sample.prediction.dist,
            unknown=sample.prediction.unknown,
            coordinates=() if sample.coordinates is None else tuple(sample.coordinates.round(5).tolist()),
            image=base64.b64encode(image).decode(),
            embedding=sample.embedding if image else "",
            candidates=_labels(sample.prediction) if image or file.data else (),
            neighbors=_rows(sample.prediction) if image or file.data else (),
            id=sample.id,
            file=base64.b64encode(file.data).decode(),
            preprocessed=file.preprocessed,
        ).model_dump_json()


def _stored_file(sent: bytes | None, images: Pixels | None, row: int) -> _File:
    if images is not None and (sent is None or len(sent) > SENT_MAX_BYTES):
        return _File(encode_png(images[row]), preprocessed=True)
    return _File(sent or b"", preprocessed=False)


def _labels(prediction: Prediction) -> tuple[str, ...]:
    return tuple(dict.fromkeys([prediction.pred, *(neighbor.label for neighbor in prediction.neighbors)]))


def _rows(prediction: Prediction) -> tuple[int, ...]:
    return tuple(neighbor.row for neighbor in prediction.neighbors)


def _remove_oldest(directory: Path, size_bytes: int) -> None:
    """Remove the oldest files until the rest take at most ``size_bytes``.

    A file with a future date was written before the clock was set back, so it counts as the oldest.
    """
    files: list[tuple[bool, str, Path, int]] = []
    now = f"{datetime.now(UTC):{TIME_FORMAT}}"
    for path in directory.glob("*.jsonl"):
        with suppress(FileNotFoundError):  # already shipped
            files.append((path.name[: len(now)] <= now, path.name, path, path.stat().st_size))
    remaining = sum(size for *_, size in files)
    for _, _, path, size in sorted(files):
        if remaining <= size_bytes:
            break
        path.unlink(missing_ok=True)
        remaining -= size
