"""What the preprocessing server tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "evernear_prep_requests", "Requests by path and status.", ("path", "status"), registry=self.registry
        )
        self.prepare_s = Histogram(
            "evernear_prep_prepare_seconds", "Decode, resize, encode.", registry=self.registry, buckets=SECONDS
        )
        self.predictor_s = Histogram(
            "evernear_prep_predictor_seconds",
            "A call of the predictor, its retries included.",
            registry=self.registry,
            buckets=SECONDS,
        )
        self.failures = Counter(
            "evernear_prep_predictor_failures",
            "Calls of the predictor that failed.",
            ("reason",),
            registry=self.registry,
        )
        self.in_flight = Gauge("evernear_prep_in_flight", "Requests at the predictor.", registry=self.registry)
        self.breaker_open = Gauge(
            "evernear_prep_breaker_open", "1 while the predictor is left alone.", registry=self.registry
        )
        self.release = Info("evernear_prep_release", "The release that answers.", registry=self.registry)
