"""A tracer provider whose spans are exported over OTLP by a separate thread.

The OpenTelemetry SDK's other variables also apply, such as ``OTEL_TRACES_SAMPLER``. If the
collector is down, spans are dropped, and predictions continue.
"""

import os

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from evernear import __version__


def exporting_provider(service: str) -> TracerProvider:
    """``service`` is the traces' service name unless ``OTEL_SERVICE_NAME`` is set."""
    name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
