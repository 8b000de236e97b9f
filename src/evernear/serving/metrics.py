"""What the workers tell Prometheus: added up with each batch, handed on once a second.

TorchServe's own histograms have fixed buckets up to 10 (seconds, for what they are made) and take one value a
line of a worker's output. Counters by upper bound (``le``) say the same to Prometheus, with bounds that fit, and
cost a batch nothing.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

REQUESTS = "evernear_requests_total"
PREDICTIONS = "evernear_predictions_total"
STAGE_SECONDS = "evernear_stage_seconds_total"
BATCH_SIZE = "evernear_batch_size"
DISTANCE = "evernear_distance"
RELEASE = "evernear_release_info"
INDEX_AGE = "evernear_index_age_seconds"
THRESHOLD = "evernear_unknown_threshold"

BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# L2 between unit vectors is 2 sin(angle / 2): 0.1 is 6 degrees, 1.4 nearly a right angle, 2 the opposite.
DISTANCE_BOUNDS = (*(round(0.1 * tenth, 1) for tenth in range(1, 15)), 2.0)
FLUSH_EVERY_S = 1.0

Kind = Literal["counter", "gauge"]
Labels = tuple[str, ...]
Emit = Callable[[str, float, Labels], None]
"""Adds to a counter or sets a gauge: name, value, label values."""


@dataclass(frozen=True)
class Metric:
    """A time series: its kind, its unit and the names of its labels."""

    kind: Kind
    unit: str
    labels: Labels


def _histogram(name: str, unit: str) -> dict[str, Metric]:
    return {
        f"{name}_bucket": Metric("counter", "Count", ("version", "le")),
        f"{name}_sum": Metric("counter", unit, ("version",)),
        f"{name}_count": Metric("counter", "Count", ("version",)),
    }


METRICS: Mapping[str, Metric] = {
    REQUESTS: Metric("counter", "Count", ("version", "outcome")),
    PREDICTIONS: Metric("counter", "Count", ("version", "unknown")),
    STAGE_SECONDS: Metric("counter", "Seconds", ("version", "stage")),
    **_histogram(BATCH_SIZE, "Images"),
    **_histogram(DISTANCE, "L2"),
    RELEASE: Metric("gauge", "Count", ("version", "network")),
    INDEX_AGE: Metric("gauge", "Seconds", ("version",)),
    THRESHOLD: Metric("gauge", "L2", ("version",)),
}

_HOST = ["Level", "Hostname"]
_MODEL = ["model_name", "model_version", "hostname"]
_FRONTEND: dict[Kind, dict[str, tuple[str, list[str]]]] = {
    "counter": {
        "Requests2XX": ("Count", _HOST),
        "Requests4XX": ("Count", _HOST),
        "Requests5XX": ("Count", _HOST),
        "ts_inference_requests_total": ("Count", _MODEL),
        "ts_inference_latency_microseconds": ("Microseconds", _MODEL),
        "ts_queue_latency_microseconds": ("Microseconds", _MODEL),
    },
    "gauge": {
        "QueueTime": ("Milliseconds", _HOST),
        "WorkerThreadTime": ("Milliseconds", _HOST),
        "WorkerLoadTime": ("Milliseconds", ["WorkerName", *_HOST]),
    },
}


def metrics_file() -> dict[str, Any]:
    """The content of TorchServe's ``metrics.yaml``: its own series (``ts_metrics``) and ours."""
    return {
        "ts_metrics": {
            kind: [_entry(name, unit, labels) for name, (unit, labels) in series.items()]
            for kind, series in _FRONTEND.items()
        },
        "model_metrics": {
            kind: [
                _entry(name, metric.unit, list(metric.labels))
                for name, metric in METRICS.items()
                if metric.kind == kind
            ]
            for kind in ("counter", "gauge")
        },
    }


def _entry(name: str, unit: str, labels: list[str]) -> dict[str, Any]:
    return {"name": name, "unit": unit, "dimensions": list(labels)}


class Meter:
    """Adds up what happens to one release, until `flush` hands it to ``emit``.

    ``created_s`` is the release's Unix time, ``threshold`` the distance beyond which an image is unknown.
    """

    def __init__(self, emit: Emit, version: str, network_sha256: str, created_s: float, threshold: float) -> None:
        self._emit = emit
        self._version = version
        self._created_s = created_s
        self._lock = threading.Lock()
        self._clear()
        emit(RELEASE, 1, (version, network_sha256[:12]))
        emit(THRESHOLD, threshold, (version,))

    def start(self) -> None:
        """Flush once a second, in a thread that ends with the process."""
        threading.Thread(target=self._flush_for_ever, name="metrics", daemon=True).start()

    def batch(
        self, outcomes: Sequence[str], distances: Sequence[float], unknown: int, stages_s: Mapping[str, float]
    ) -> None:
        """Count a batch.

        ``outcomes`` has a word for each request, ``distances`` and ``unknown`` are those of the images that
        were predicted, ``stages_s`` tells what the time went into.
        """
        with self._lock:
            self._outcomes.update(outcomes)
            self._stages_s.update(stages_s)
            self._unknown += unknown
            self._batch_sizes.add(len(outcomes))
            for distance in distances:
                self._distances.add(distance)

    def flush(self) -> None:
        """Emit what was added up since the last time, and the index's age."""
        with self._lock:
            outcomes, stages_s, unknown = self._outcomes, self._stages_s, self._unknown
            batch_sizes, distances = self._batch_sizes, self._distances
            self._clear()
        emit, version = self._emit, self._version
        emit(INDEX_AGE, round(time.time() - self._created_s), (version,))
        for outcome, count in outcomes.items():
            emit(REQUESTS, count, (version, outcome))
        for stage, seconds in stages_s.items():
            emit(STAGE_SECONDS, round(seconds, 6), (version, stage))
        if distances.count:
            emit(PREDICTIONS, unknown, (version, "true"))
            emit(PREDICTIONS, distances.count - unknown, (version, "false"))
        batch_sizes.emit(emit, BATCH_SIZE, version)
        distances.emit(emit, DISTANCE, version)

    def _clear(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._stages_s: Counter[str] = Counter()
        self._unknown = 0
        self._batch_sizes = _Histogram(BATCH_SIZE_BOUNDS)
        self._distances = _Histogram(DISTANCE_BOUNDS)

    def _flush_for_ever(self) -> None:
        while True:
            self.flush()
            time.sleep(FLUSH_EVERY_S)


class _Histogram:
    """Counts of values by upper bound; the last is without one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self.count += 1

    def emit(self, emit: Emit, name: str, version: str) -> None:
        """Counts are cumulative, as Prometheus has it."""
        if not self.count:
            return
        below = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            emit(f"{name}_bucket", below, (version, bound))
        emit(f"{name}_sum", round(self._sum, 6), (version,))
        emit(f"{name}_count", self.count, (version,))
