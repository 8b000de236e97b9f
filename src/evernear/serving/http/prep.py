"""The preprocessing server: the application in front of TorchServe, without torch."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager

import uvicorn

from evernear.common.processes import exempt_loaded_objects
from evernear.serving.decoding import pool_size_bytes
from evernear.serving.endpoints import host_and_port, listening_socket
from evernear.serving.http.app import create_server
from evernear.serving.http.remote import targets_of, torchserve_backend
from evernear.serving.http.service import Service
from evernear.serving.http.telemetry import Telemetry
from evernear.settings import Settings
from evernear.settings.serving import LARGE_DECODES, MAX_BODIES_SIZE_BYTES, MODEL_NAME, UPLOAD_TIMEOUT_S

PROCESS_SIZE_BYTES = 128 * 2**20
"""Memory before the first request: 97 MiB (``benchmarks/hostile_traffic.py``), rounded up."""


def serve_prep(settings: Settings, on_bound: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish in-flight requests. ``on_bound`` receives the
    URL."""
    targets_of(settings)
    with listening_socket(settings.prep.host, settings.prep.port, "prep.port") as listener:
        server = create_prep_server(settings)
        on_bound(f"http://{host_and_port(settings.prep.host, settings.prep.port)}")
        exempt_loaded_objects()
        server.run(sockets=[listener])


def create_prep_server(settings: Settings) -> uvicorn.Server:
    """The caller runs the server with listening sockets."""

    @asynccontextmanager
    async def open_service() -> AsyncGenerator[Service]:
        telemetry = Telemetry("prep", MODEL_NAME)
        async with aclosing(torchserve_backend(settings, telemetry)) as backend:
            yield Service(backend, telemetry)

    return create_server(
        open_service,
        "evernear preprocessing server",
        max_size_bytes=settings.prep.max_request_size_bytes,
        upload_timeout_s=UPLOAD_TIMEOUT_S,
    )


def prep_memory_size_bytes(settings: Settings) -> int:
    """The most memory that the server uses: its pod's memory limit must not be lower. Each request
    body is in memory twice: as received, and after base64 decoding."""
    decoding = pool_size_bytes(LARGE_DECODES, settings.serving.max_pixels)
    return PROCESS_SIZE_BYTES + decoding + 2 * MAX_BODIES_SIZE_BYTES
