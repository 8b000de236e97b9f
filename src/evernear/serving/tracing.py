"""OpenTelemetry traces of predictions: preprocessing server and TorchServe's handler, or KServe's two containers.

Off unless ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set. Then the SDK of the extra ``tracing`` is imported, and its other
variables apply as well: ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME`` ... Spans are
exported by a thread. If the collector is down, they are dropped, and predictions continue.
"""

import logging
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING

from evernear import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACE_FIELD = "traceparent"
"""W3C Trace Context, as an HTTP header or as an input of TorchServe's gRPC request, whose handlers see no metadata."""
_log = logging.getLogger(__name__)


@cache
def tracer(service: str) -> "Tracer | None":
    """The tracer of a server, named ``service`` unless ``OTEL_SERVICE_NAME`` is set; None if tracing is off."""
    if not os.environ.get(ENDPOINT_VARIABLE):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning("%s is set, but tracing is not installed: install evernear[tracing].", ENDPOINT_VARIABLE)
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("evernear", __version__)


@contextmanager
def request_span(
    tracer: "Tracer | None", parent: str, name: str = "request", **attributes: str
) -> "Generator[Span | None]":
    """A span around a request, a child of the client's if ``parent`` is its `TRACE_FIELD`; None if tracing is off."""
    if tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind

    with tracer.start_as_current_span(
        name, _context(parent), SpanKind.SERVER, attributes, record_exception=False
    ) as span:
        yield span


def describe_response(span: "Span | None", method: str, route: str, status: int, release: str) -> None:
    """Name the span of a request after its route, with attributes by OpenTelemetry's semantic conventions."""
    if span is None:
        return
    from opentelemetry.trace import StatusCode

    span.update_name(f"{method} {route}")
    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
    if release:
        span.set_attribute("evernear.release", release)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_status(StatusCode.ERROR)


@contextmanager
def span(tracer: "Tracer | None", name: str) -> Generator[None]:
    """A span around a part of the current request, if tracing is on."""
    if tracer is None:
        yield
        return
    with tracer.start_as_current_span(name):
        yield


def trace_id(span: "Span | None") -> str:
    """The trace of ``span`` in hexadecimal digits, for the log; empty if tracing is off."""
    return f"{span.get_span_context().trace_id:032x}" if span else ""


def trace_fields() -> dict[str, bytes]:
    """The `TRACE_FIELD` of the current span, to send along; empty without a span."""
    fields: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:  # else no span has been started
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(fields)
    return {name: value.encode() for name, value in fields.items() if name == TRACE_FIELD}


def record_prediction(
    tracer: "Tracer", parent: str, started_ns: int, stages_s: Mapping[str, float], **attributes: str | int
) -> None:
    """Record a prediction that was made in a batch as a child of ``parent``'s span, with a span for each stage.

    ``stages_s`` are the seconds of each stage of the batch, in their order. ``started_ns`` is Unix time.
    """
    from opentelemetry.trace import SpanKind, set_span_in_context

    whole = tracer.start_span("predict", _context(parent), SpanKind.SERVER, attributes, start_time=started_ns)
    span_context, now_ns = set_span_in_context(whole), started_ns
    for stage, seconds in stages_s.items():
        part = tracer.start_span(stage, span_context, start_time=now_ns)
        now_ns += round(seconds * 1e9)
        part.end(now_ns)
    whole.end(now_ns)


def _context(parent: str) -> "Context":
    """The context of a `TRACE_FIELD`; one without a span if it is empty or invalid."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACE_FIELD: parent}, Context())
