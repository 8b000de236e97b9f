"""The counter values of the TorchServe pods, read from their metrics ports."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import urllib3
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from evernear.evaluation.bake import Figures
from evernear.release.bake import PodCounters
from evernear.serving.endpoints import host_and_port

Address = tuple[str, int]
TIMEOUT_S = 3.0
MAX_BYTES = 2**22
REFUSALS = ("Overloaded", "GalleryUnavailable")
"""The outcomes in `evernear.serving.core` that have a status of 500 or more."""
PODS_SERVICE_SUFFIX = "-pods"
"""Suffix of the pods' headless Service in ``deploy/base/prep.yaml``. The Service is named after the
Deployment."""


def addresses(host: str, port: int) -> list[Address]:
    """The addresses of the ready pods of a headless Service. Empty without ready pods."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({(str(entry[4][0]), port) for entry in found})


class PodMetrics:
    """Reads the metrics of the pods that ``find`` returns. A pod that does not respond in time is
    left out."""

    def __init__(self, find: Callable[[], Sequence[Address]]) -> None:
        self._find = find
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(total=TIMEOUT_S))

    def __call__(self) -> dict[str, PodCounters]:
        """The counter values of each pod, keyed by address."""
        pods = [host_and_port(*address) for address in self._find()]
        if not pods:
            return {}
        with ThreadPoolExecutor(min(8, len(pods)), "pod-metrics") as threads:
            counters = threads.map(self._read, pods)
            return {pod: its for pod, its in zip(pods, counters, strict=True) if its is not None}

    def _read(self, pod: str) -> PodCounters | None:
        try:
            response = self._http.request("GET", f"http://{pod}/metrics", preload_content=False)
            try:
                text = response.read(MAX_BYTES).decode()
            finally:
                response.release_conn()
            return parse_counters(text) if response.status == 200 else None
        except (urllib3.exceptions.HTTPError, ValueError):
            return None


def parse_counters(text: str) -> PodCounters | None:
    """The counter values in a TorchServe response, or None if the response does not contain exactly
    one release.

    Raises:
        ValueError: the text is not in Prometheus text format.
    """
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    versions = {sample.labels["version"] for sample in samples if sample.name == "evernear_release_info"}
    if len(versions) != 1:
        return None

    def count(name: str, accept: Callable[[Sample], bool] = lambda _: True) -> int:
        return round(sum(sample.value for sample in samples if sample.name == name and accept(sample)))

    bounds = [sample for sample in samples if sample.name == "evernear_request_seconds_bucket"]
    figures = Figures(
        answered=count("evernear_requests_total"),
        refused=count("evernear_requests_total", lambda sample: sample.labels["outcome"] in REFUSALS),
        failed=count("Requests5XX"),
        predictions=count("evernear_predictions_total"),
        unknown=count("evernear_predictions_total", lambda sample: sample.labels["unknown"] == "true"),
        timed=count("evernear_request_seconds_count"),
        within={float(sample.labels["le"]): round(sample.value) for sample in bounds if sample.labels["le"] != "+Inf"},
    )
    return PodCounters(version=versions.pop(), figures=figures)
