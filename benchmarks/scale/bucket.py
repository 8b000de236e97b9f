"""A directory as a read-only S3 bucket on loopback, as slow as S3: GET and HEAD, with ranges.

Each request waits `LATENCY_S`, and each response is sent at no more than `CONNECTION_BYTES_PER_S`,
so only clients with several requests in flight are faster. Signatures are not verified. The files
are sent by the kernel, so the server takes little CPU time from the client beside it.
"""

import os
import re
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LATENCY_S = 0.02
CONNECTION_BYTES_PER_S = 90e6
"""AWS's performance guidelines expect 85 to 90 MB/s of a request."""
_PIECE_BYTES = 2**18


@contextmanager
def bucket(directory: Path) -> Generator[str]:
    """Serve the buckets in ``directory``, one folder each, and yield the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            self.answer()

        def answer(self) -> None:
            time.sleep(LATENCY_S)
            path = directory / unquote(urlsplit(self.path).path).lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            with path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                start, end = 0, status.st_size
                if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                    start = int(match[1])
                    end = min(end, int(match[2]) + 1) if match[2] else end
                self.send_response(206 if match else 200)
                if match:
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{status.st_size}")
                self.send_header("Content-Length", str(end - start))
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", f'"{status.st_ino:x}-{status.st_mtime_ns:x}"')
                self.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
                self.end_headers()
                if self.command == "GET":
                    self.send(file.fileno(), start, end)

        def send(self, file: int, start: int, end: int) -> None:
            began_s, position = time.monotonic(), start
            while position < end:
                position += os.sendfile(self.connection.fileno(), file, position, min(_PIECE_BYTES, end - position))
                time.sleep(max(0.0, began_s + (position - start) / CONNECTION_BYTES_PER_S - time.monotonic()))

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # clients close connections early

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
