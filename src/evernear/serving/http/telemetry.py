"""Metrics and traces of a server."""

from collections.abc import Callable
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from evernear.serving.metrics import BATCH_SIZE_BOUNDS
from evernear.serving.responses import Prediction, Rejection
from evernear.serving.tracing import tracer

Role = Literal["prep", "predictor", "transformer"]
"""The preprocessing server, or a container of an InferenceService."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Telemetry:
    """The histograms of seconds have KServe's names and label, for the dashboards of its platform.

    The prefix of the preprocessing server distinguishes its metrics from those of the predictor.
    """

    def __init__(self, role: Role, model: str) -> None:
        self.registry = registry = CollectorRegistry()
        self.tracer = tracer(f"evernear-{role}")
        prefix = "evernear_prep" if role == "prep" else "evernear"

        def metric(kind: Callable[..., Any], name: str, text: str, **options: Any) -> Any:
            return kind(name, text, ("model_name",), registry=registry, **options).labels(model)

        self.requests = Counter(f"{prefix}_requests", "Requests by path.", ("path", "status"), registry=registry)
        self.prepare_s = metric(
            Histogram, "request_preprocess_seconds", "Decode and resize the images of a request.", buckets=SECONDS
        )
        self.predict_s = metric(
            Histogram, "request_predict_seconds", "Recognize prepared images, here or remotely.", buckets=SECONDS
        )
        self.in_flight = metric(Gauge, f"{prefix}_in_flight", "Requests at the predictor.")
        self.release = metric(Info, f"{prefix}_release", "The live release.")
        name, text = f"{prefix}_batch_images", "Images recognized together."
        self.batch_images = metric(Histogram, name, text, buckets=BATCH_SIZE_BOUNDS)
        name, text = f"{prefix}_predictor_failures", "Failed calls of the predictor."
        self.failures = Counter(name, text, ("reason",), registry=registry)
        self._images = Counter(f"{prefix}_images", "Images by outcome.", ("model_name", "outcome"), registry=registry)
        self._model = model

    def count_images(self, results: list[Prediction | Rejection]) -> None:
        for result in results:
            outcome = "refused" if isinstance(result, Rejection) else "unknown" if result.unknown else "known"
            self._images.labels(self._model, outcome).inc()
