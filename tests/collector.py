"""An OTLP collector on loopback."""

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

CLIENT_SPAN = "b7ad6b7169203331"


def parent(trace: str) -> dict[str, str]:
    """The header of a client's span."""
    return {"traceparent": f"00-{trace}-{CLIENT_SPAN}-01"}


def attributes(span: Span) -> dict[str, str | int]:
    """The attributes of a span by name."""
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


class Collector:
    """Received spans; servers with the variables of ``environment`` export to it."""

    def __init__(self, port: int) -> None:
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        self._received: queue.Queue[tuple[str, Span]] = queue.Queue()
        self._spans: dict[str, dict[str, tuple[str, Span]]] = defaultdict(dict)

    def add(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            (service,) = (a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._received.put((service, span))

    def wait_for(self, trace: str, *names: str) -> dict[str, tuple[str, Span]]:
        """Service and span of a trace by name, also after its service's, once all ``names`` have
        arrived."""
        while not self._spans[trace].keys() >= set(names):
            service, span = self._received.get(timeout=60)
            for name in (span.name, f"{service} {span.name}"):
                self._spans[span.trace_id.hex()][name] = (service, span)
        return self._spans[trace]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector until the end of the context."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.add(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
