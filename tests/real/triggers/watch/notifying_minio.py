"""A MinIO reduced to ListenBucketNotification, as cmd/listen-notification-handlers.go of its source
answers it.

It checks the signature as botocore computes it, the bucket, and the three query parameters; then it
streams a blank every half second and a JSON line for each event.
"""

import json
import queue
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

KEYS = ("tester", "not-a-secret")
BLANK_EVERY_S = 0.5
_END = None


@dataclass
class Minio:
    """The streams that it serves, and their filters."""

    url: str = ""
    bucket: str = "images"
    kind: str = "minio"
    """Or ``list``: a server that answers with a list of objects; ``not implemented``;
    ``denied``."""
    streams: list[queue.Queue[dict[str, Any] | None]] = field(default_factory=list[Any])
    filters: list[dict[str, list[str]]] = field(default_factory=list[Any])

    def notify(self, key: str, name: str = "s3:ObjectCreated:Put") -> None:
        """Send an event to the listeners of that key."""
        for stream, filters in zip(list(self.streams), list(self.filters), strict=True):
            if key.startswith(filters.get("prefix", [""])[0]):
                stream.put({"eventName": name, "s3": {"bucket": {"name": self.bucket}, "object": {"key": key}}})

    def end_streams(self) -> None:
        for stream in self.streams:
            stream.put(_END)


@contextmanager
def notifying_minio(kind: str = "minio") -> Generator[Minio]:
    minio = Minio(kind=kind)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_state: ClassVar[Minio] = minio

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, keep_blank_values=True)
            filters = {name: values for name, values in query.items() if not name.startswith("X-Amz-")}
            if not _is_signed(self):
                return self._refuse(403, "SignatureDoesNotMatch")
            if parts.path != f"/{minio.bucket}":
                return self._refuse(404, "NoSuchBucket")
            if minio.kind == "denied":
                return self._refuse(403, "AccessDenied")
            if minio.kind == "not implemented":
                return self._refuse(501, "NotImplemented")
            if minio.kind == "list":
                return self._answer(200, "application/xml", b"<ListBucketResult/>")
            if set(filters) != {"prefix", "suffix", "events"} or not all(
                event.startswith("s3:Object") for event in filters["events"]
            ):
                return self._refuse(400, "InvalidArgument")
            return self._stream(filters)

        def _stream(self, filters: dict[str, list[str]]) -> None:
            events: queue.Queue[dict[str, Any] | None] = queue.Queue()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            minio.filters.append(filters)
            minio.streams.append(events)
            while True:
                try:
                    event = events.get(timeout=BLANK_EVERY_S)
                except queue.Empty:
                    self._chunk(b" ")
                    continue
                if event is _END:
                    return self._chunk(b"")
                self._chunk(json.dumps({"Records": [event]}).encode() + b"\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def _refuse(self, status: int, code: str) -> None:
            body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
            self._answer(status, "application/xml", body.encode())

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A listener has closed its connection."""

    with Server(("127.0.0.1", 0), Handler) as server:
        minio.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield minio
        finally:
            minio.end_streams()
            server.shutdown()
            thread.join()


def _is_signed(request: BaseHTTPRequestHandler) -> bool:
    """Whether botocore computes the signature of the presigned URL."""
    path, _, query = request.path.partition("?")
    signed, _, signature = query.partition("&X-Amz-Signature=")
    if not signature:
        return False
    host = request.headers["Host"]
    again = AWSRequest(method="GET", url=f"http://{host}{path}")
    again.context["timestamp"] = parse_qs(query)["X-Amz-Date"][0]
    auth = SigV4Auth(Credentials(*KEYS), "s3", "us-east-1")
    sorted_query = "&".join(sorted(signed.split("&")))
    canonical = "\n".join(["GET", path, sorted_query, f"host:{host}", "", "host", "UNSIGNED-PAYLOAD"])
    return auth.signature(auth.string_to_sign(again, canonical), again) == signature
