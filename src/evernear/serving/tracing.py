"""OpenTelemetry traces of predictions, in the preprocessing server, TorchServe's handler and
KServe's containers.

This module needs only OpenTelemetry's API. Unless an integration exports spans
(`evernear.integrations.tracing`), none is created, and the client's trace is logged and passed on.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from http import HTTPStatus

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    NoOpTracerProvider,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    TracerProvider,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from evernear import __version__
from evernear.common.plugins import tracer_providers

TRACE_FIELD = "traceparent"
"""The HTTP header, or the input in a TorchServe gRPC request, that carries the W3C Trace Context.
It is an input because TorchServe's handlers receive no gRPC metadata."""


@cache
def tracer(service: str) -> Tracer:
    """Does nothing unless an integration exports traces."""
    provider: TracerProvider = next(filter(None, tracer_providers(service)), NoOpTracerProvider())
    return provider.get_tracer("evernear", __version__)


def request_span(tracer: Tracer, parent: str, name: str = "request", **attributes: str) -> AbstractContextManager[Span]:
    """A span around a request: a child of the client's if ``parent`` is a valid trace field."""
    if isinstance(tracer, NoOpTracer) and not parent:
        # Even a no-op span takes as much CPU time as a small prediction.
        return nullcontext(INVALID_SPAN)
    return tracer.start_as_current_span(name, _context(parent), SpanKind.SERVER, attributes, record_exception=False)


def describe_response(span: Span, method: str, route: str, status: int, release: str) -> None:
    """Name a request's span after the route, and add the attributes of the semantic conventions."""
    span.update_name(f"{method} {route}")
    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
    if release:
        span.set_attribute("evernear.release", release)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_status(StatusCode.ERROR)


def span(tracer: Tracer, name: str) -> AbstractContextManager[object]:
    """A span around a part of the current request."""
    return nullcontext() if isinstance(tracer, NoOpTracer) else tracer.start_as_current_span(name)


def trace_id(span: Span) -> str:
    """The trace id in hexadecimal digits, for the log. Empty without a trace."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def trace_fields() -> dict[str, bytes]:
    """The current span's `TRACE_FIELD`, for a request to the next server. Empty without a span."""
    fields: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(fields)
    return {name: value.encode() for name, value in fields.items() if name == TRACE_FIELD}


def record_prediction(
    tracer: Tracer, parent: str, started_ns: int, stages_s: Mapping[str, float], **attributes: str | int
) -> None:
    """Record one request's prediction as a child span of ``parent``, with a span for each stage.

    ``stages_s`` maps the batch's stages, in order, to durations. ``started_ns`` is Unix time.
    """
    if isinstance(tracer, NoOpTracer):
        return
    whole = tracer.start_span("predict", _context(parent), SpanKind.SERVER, attributes, start_time=started_ns)
    span_context, now_ns = set_span_in_context(whole), started_ns
    for stage, seconds in stages_s.items():
        part = tracer.start_span(stage, span_context, start_time=now_ns)
        now_ns += round(seconds * 1e9)
        part.end(now_ns)
    whole.end(now_ns)


def _context(parent: str) -> Context:
    """The context of a `TRACE_FIELD`, without a span if the field is empty or invalid."""
    return TraceContextTextMapPropagator().extract({TRACE_FIELD: parent}, Context())
