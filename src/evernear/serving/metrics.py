"""Prometheus metrics in each worker, which passes their increments to TorchServe up to once a
second.

TorchServe's histograms have fixed buckets with bounds up to 10, and each observed value takes a
line of worker output. Here, histograms are exported as counters with an upper-bound label (``le``),
which look like a normal histogram to Prometheus. They have suitable bounds and cost little.
"""

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# The distance between unit vectors is 2 sin(angle / 2). A distance of 0.1 corresponds to 6
# degrees, 1.4 to nearly a right angle, and 2 to opposite directions.
DISTANCE_BOUNDS = (*(round(0.1 * tenth, 1) for tenth in range(1, 15)), 2.0)
# The bounds of evernear_request_seconds, which the frontend observes, because only it sees how long
# a request waits for a worker. They range from 5 ms to 40 s, each 1.5 times the previous one, which
# suffices to compare 99th percentiles.
SECONDS_BOUNDS = tuple(float(f"{0.005 * 1.5**step:.2g}") for step in range(23))
FLUSH_EVERY_S = 1.0
IDLE_FLUSH_EVERY_S = 60.0

Kind = Literal["counter", "gauge"]
Labels = tuple[str, ...]
Emit = Callable[[str, float, Labels], None]
"""Increments a counter or sets a gauge: metric name, value, and label values."""
Increments = defaultdict[tuple[str, Labels], float]
"""The increments of counters, by metric name and label values."""


class Metric(NamedTuple):
    """Kind, unit and label names of a metric."""

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
    "evernear_requests_total": Metric("counter", "Count", ("version", "outcome")),
    "evernear_predictions_total": Metric("counter", "Count", ("version", "unknown")),
    "evernear_neighbors_total": Metric("counter", "Count", ("version", "agrees")),
    "evernear_stage_seconds_total": Metric("counter", "Seconds", ("version", "stage")),
    **_histogram("evernear_batch_size", "Images"),
    **_histogram("evernear_distance", "L2"),
    "evernear_release_info": Metric("gauge", "Count", ("version", "network", "engine")),
    "evernear_index_age_seconds": Metric("gauge", "Seconds", ("version",)),
    "evernear_unknown_threshold": Metric("gauge", "L2", ("version",)),
    "evernear_test_accuracy": Metric("gauge", "Count", ("version",)),
    "evernear_reference_distance_ratio": Metric("gauge", "Count", ("version", "le")),
}

_HOST: Labels = ("Level", "Hostname")
_MODEL: Labels = ("model_name", "model_version", "hostname")
_TORCHSERVE_METRICS: Mapping[str, Metric] = {
    "Requests2XX": Metric("counter", "Count", _HOST),
    "Requests4XX": Metric("counter", "Count", _HOST),
    "Requests5XX": Metric("counter", "Count", _HOST),
    "ts_inference_requests_total": Metric("counter", "Count", _MODEL),
    "ts_inference_latency_microseconds": Metric("counter", "Microseconds", _MODEL),
    "ts_queue_latency_microseconds": Metric("counter", "Microseconds", _MODEL),
    "QueueTime": Metric("gauge", "Milliseconds", _HOST),
    "WorkerThreadTime": Metric("gauge", "Milliseconds", _HOST),
    "WorkerLoadTime": Metric("gauge", "Milliseconds", ("WorkerName", *_HOST)),
}


def metrics_file() -> dict[str, Any]:
    """TorchServe's metrics (``ts_metrics``) and evernear's (``model_metrics``)."""
    return {"ts_metrics": _by_kind(_TORCHSERVE_METRICS), "model_metrics": _by_kind(METRICS)}


def _by_kind(metrics: Mapping[str, Metric]) -> dict[str, list[dict[str, Any]]]:
    return {
        kind: [
            {"name": name, "unit": metric.unit, "dimensions": list(metric.labels)}
            for name, metric in metrics.items()
            if metric.kind == kind
        ]
        for kind in ("counter", "gauge")
    }


class Meter:
    """Records metrics for one release's batches. `flush` passes their increments to ``emit``.

    ``created_s`` is the Unix time at which the release was created. ``threshold`` is the distance
    beyond which an image is unknown. ``engine`` is what runs the network. Two optional arguments
    are also emitted, for comparison with live queries: ``test_accuracy``, label right on the test
    split, and ``reference``, the distances in the drift baseline, as a cumulative distribution at
    the `DISTANCE_BOUNDS`.
    """

    def __init__(
        self,
        emit: Emit,
        version: str,
        network_sha256: str,
        created_s: float,
        threshold: float,
        engine: str,
        test_accuracy: float | None = None,
        reference: Sequence[float] = (),
    ) -> None:
        self._emit = emit
        self._version = version
        self._created_s = created_s
        self._batch_size = _Buckets("evernear_batch_size", BATCH_SIZE_BOUNDS, version)
        self._distance = _Buckets("evernear_distance", DISTANCE_BOUNDS, version)
        self._lock = threading.Lock()
        self._recorded = threading.Event()
        self._increments = Increments(float, self._batch_size.zeros | self._distance.zeros)
        emit("evernear_release_info", 1, (version, network_sha256[:12], engine))
        emit("evernear_unknown_threshold", threshold, (version,))
        if test_accuracy is not None:
            emit("evernear_test_accuracy", test_accuracy, (version,))
        for bound in DISTANCE_BOUNDS if reference else ():
            share = sum(distance <= bound for distance in reference) / len(reference)
            emit("evernear_reference_distance_ratio", share, (version, str(bound)))

    def start(self) -> None:
        """Start a daemon thread that calls `flush` at most once a second, when batches were
        recorded, and otherwise once a minute, for the age of the index."""
        threading.Thread(target=self._flush_forever, name="metrics", daemon=True).start()

    def record_batch(
        self,
        outcomes: Sequence[str],
        distances: Sequence[float],
        unknown: int,
        stages_s: Mapping[str, float],
        neighbors: Sequence[bool] = (),
    ) -> None:
        """``outcomes`` has an entry for each request, and ``distances`` one for each image with a
        prediction. ``stages_s`` contains the duration of each stage. For each neighbor of a known
        image, ``neighbors`` says whether its label equals the predicted one."""
        version = self._version
        with self._lock:
            counts = self._increments
            self._batch_size.observe(len(outcomes), counts)
            for outcome in outcomes:
                counts["evernear_requests_total", (version, outcome)] += 1
            for stage, seconds in stages_s.items():
                counts["evernear_stage_seconds_total", (version, stage)] += seconds
            for distance in distances:
                self._distance.observe(distance, counts)
            if neighbors:
                counts["evernear_neighbors_total", (version, "true")] += sum(neighbors)
                counts["evernear_neighbors_total", (version, "false")] += len(neighbors) - sum(neighbors)
            if distances:
                counts["evernear_predictions_total", (version, "true")] += unknown
                counts["evernear_predictions_total", (version, "false")] += len(distances) - unknown
        if not self._recorded.is_set():
            self._recorded.set()

    def flush(self) -> None:
        """Emit all increments since the last flush, and the age of the index."""
        self._recorded.clear()
        with self._lock:
            increments, self._increments = self._increments, Increments(float)
        for (name, labels), value in increments.items():
            self._emit(name, round(value, 6), labels)
        self._emit("evernear_index_age_seconds", round(time.time() - self._created_s), (self._version,))

    def _flush_forever(self) -> None:
        while True:
            self.flush()
            time.sleep(FLUSH_EVERY_S)
            self._recorded.wait(IDLE_FLUSH_EVERY_S)


class _Buckets:
    """A histogram's cumulative counters."""

    def __init__(self, name: str, bounds: Sequence[float], version: str) -> None:
        self._bounds = bounds
        self._buckets = [(f"{name}_bucket", (version, str(float(bound)))) for bound in bounds]
        self._every = [(f"{name}_bucket", (version, "+Inf")), (f"{name}_count", (version,))]
        self._sum = f"{name}_sum", (version,)
        self.zeros: dict[tuple[str, Labels], float] = dict.fromkeys([*self._buckets, *self._every, self._sum], 0)

    def observe(self, value: float, counts: Increments) -> None:
        counts[self._sum] += value
        for key in (*self._buckets[bisect_left(self._bounds, value) :], *self._every):
            counts[key] += 1
