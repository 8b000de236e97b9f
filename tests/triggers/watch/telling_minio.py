"""A MinIO reduced to ListenBucketNotification, as cmd/listen-notification-handlers.go of its source answers it.

It checks the signature as botocore computes it, the bucket, and the three query parameters; then it streams: a blank
every half second, a JSON line for each event.
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
    """What it was asked, and what it is to say."""

    url: str = ""
    bucket: str = "images"
    kind: str = "minio"
    """Or ``list``: one that takes the request for a listing; ``not implemented``; ``denied``."""
    streams: list[queue.Queue[dict[str, Any] | None]] = field(default_factory=list[Any])
    asked: list[dict[str, list[str]]] = field(default_factory=list[Any])

    def tell(self, key: str, name: str = "s3:ObjectCreated:Put") -> None:
        """An event to all who listen to that key."""
        for stream, asked in zip(list(self.streams), list(self.asked), strict=True):
            if key.startswith(asked.get("prefix", [""])[0]):
                stream.put({"eventName": name, "s3": {"bucket": {"name": self.bucket}, "object": {"key": key}}})

    def end_streams(self) -> None:
        for stream in self.streams:
            stream.put(_END)


@contextmanager
def telling_minio(kind: str = "minio") -> Generator[Minio]:
    minio = Minio(kind=kind)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_state: ClassVar[Minio] = minio

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            asked = parse_qs(parts.query, keep_blank_values=True)
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
            if set(asked) != {"prefix", "suffix", "events"} or not all(
                event.startswith("s3:Object") for event in asked["events"]
            ):
                return self._refuse(400, "InvalidArgument")
            return self._stream(asked)

        def _stream(self, asked: dict[str, list[str]]) -> None:
            events: queue.Queue[dict[str, Any] | None] = queue.Queue()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            minio.asked.append(asked)
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
            """A listener that went away."""

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
    """Whether botocore, given the same request at the same time, signs it alike."""
    told = request.headers.get("Authorization", "")
    signed = told.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    again = AWSRequest(
        method="GET",
        url=f"http://{request.headers['Host']}{request.path}",
        headers={name: request.headers[name] for name in signed},
    )
    again.context["timestamp"] = request.headers["x-amz-date"]
    auth = SigV4Auth(Credentials(*KEYS), "s3", "us-east-1")
    canonical = "\n".join(
        [
            "GET",
            urlsplit(request.path).path,
            "&".join(sorted(urlsplit(request.path).query.split("&"))),
            *(f"{name}:{' '.join(request.headers[name].split())}" for name in signed),
            "",
            ";".join(signed),
            request.headers["x-amz-content-sha256"],
        ]
    )
    signature = auth.signature(auth.string_to_sign(again, canonical), again)
    return told.endswith(f"Signature={signature}")
