"""The preprocessing server as a process."""

import errno
import socket

import uvicorn

from evernear.errors import PortInUseError, ServingError
from evernear.serving.decoding import pool_size_bytes
from evernear.serving.http_limits import PromptH11Protocol
from evernear.serving.prep.app import create_app
from evernear.serving.prep.service import target_of
from evernear.settings import Settings

SHUTDOWN_TIMEOUT_S = 30
PROCESS_SIZE_BYTES = 128 * 2**20
"""The process before its first request: 97 MiB, and some to spare (``benchmarks/hostile.py``)."""


def serve(settings: Settings) -> None:
    """Answer until SIGTERM or Ctrl-C; what is in flight then is finished.

    Raises:
        PortInUseError, ServingError: ``prep.host`` and ``prep.port`` cannot be bound.
        ServerUnreachableError: the predictor is to be that of the working directory, and none was started there.
    """
    target_of(settings)
    with bound(settings.prep.host, settings.prep.port) as listening:
        server_of(settings).run(sockets=[listening])


def server_of(settings: Settings) -> uvicorn.Server:
    """The server, which listens on the sockets that it is run with."""
    config = uvicorn.Config(
        create_app(settings),
        http=PromptH11Protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    return uvicorn.Server(config)


def memory_size_bytes(settings: Settings) -> int:
    """The most memory that the server takes: what a pod's limit must not be below.

    A body is held as it came, and its image as it was decoded from base64.
    """
    prep = settings.prep
    decoding = pool_size_bytes(prep.large_decodes, settings.serving.max_pixels)
    return PROCESS_SIZE_BYTES + decoding + 2 * prep.max_bodies_size_bytes


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one.

    Raises:
        PortInUseError, ServingError: it cannot be bound.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"Port {port} on {host} is in use by another program; stop that, or choose a free port with "
                "--set prep.port=NUMBER."
            ) from None
        raise ServingError(f"prep.host: {host}:{port} cannot be bound: {error.strerror}.") from None
