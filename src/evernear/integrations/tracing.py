"""Exports the spans of `evernear.serving.tracing` if ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set.

A separate thread sends them over OTLP. The OpenTelemetry SDK's other variables also apply, such as
``OTEL_TRACES_SAMPLER``. If the collector is down, spans are dropped, and predictions continue.
"""

import os
from typing import TYPE_CHECKING

from evernear import __version__
from evernear.common.plugins import Plugin

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def _tracer_provider(service: str) -> "TracerProvider | None":
    """``service`` is the traces' service name unless ``OTEL_SERVICE_NAME`` is set."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


PLUGIN = Plugin(install="evernear[tracing]", tracer_provider=_tracer_provider)
