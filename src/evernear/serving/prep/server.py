import uvicorn

from evernear.serving.decoding import pool_size_bytes
from evernear.serving.endpoints import listening_socket
from evernear.serving.http_limits import limited_server
from evernear.serving.prep.app import create_app
from evernear.serving.prep.service import targets_of
from evernear.settings import Settings
from evernear.settings.prep import LARGE_DECODES, MAX_BODIES_SIZE_BYTES, UPLOAD_TIMEOUT_S

SHUTDOWN_TIMEOUT_S = 30
PROCESS_SIZE_BYTES = 128 * 2**20
"""Memory before the first request: 97 MiB (``benchmarks/hostile_traffic.py``), rounded up."""


def serve_prep(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish in-flight requests."""
    targets_of(settings)
    with listening_socket(settings.prep.host, settings.prep.port, "prep.port") as listener:
        create_server(settings).run(sockets=[listener])


def create_server(settings: Settings) -> uvicorn.Server:
    """The caller runs the server with listening sockets."""
    return limited_server(
        create_app(settings),
        max_size_bytes=settings.prep.max_request_size_bytes,
        upload_timeout_s=UPLOAD_TIMEOUT_S,
        shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
    )


def prep_memory_size_bytes(settings: Settings) -> int:
    """The most memory that the server uses: its pod's memory limit must not be lower. Each request
    body is in memory twice: as received, and after base64 decoding."""
    decoding = pool_size_bytes(LARGE_DECODES, settings.serving.max_pixels)
    return PROCESS_SIZE_BYTES + decoding + 2 * MAX_BODIES_SIZE_BYTES
