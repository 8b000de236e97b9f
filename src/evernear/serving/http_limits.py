"""Limits on HTTP clients for servers on uvicorn, which limits neither bodies nor slow clients."""

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0
"""Time for the request line and the headers."""


class BodyLimits:
    """ASGI middleware that limits the size, the duration and the number of request bodies that are read.

    ``max_size_bytes`` applies to one body, ``max_total_size_bytes`` to those of all requests in flight, and
    ``timeout_s`` to the upload of one. Beyond a limit, the application's read raises an `HTTPException` with status
    413, 503 or 408, and the rest of the body is not read.
    """

    def __init__(self, app: ASGIApp, max_size_bytes: int, max_total_size_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_size_bytes = max_size_bytes
        self._max_total_size_bytes = max_total_size_bytes
        self._timeout_s = timeout_s
        self._total_size_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a ``receive`` that enforces the limits."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        size_bytes = 0
        complete = False

        async def limited_receive() -> Message:
            nonlocal size_bytes, complete
            if complete:  # the application awaits the client's disconnect
                return await receive()
            if int(declared) > self._max_size_bytes:
                raise self._too_large()
            message = await self._receive_in_time(receive, deadline_s)
            received_bytes = len(message.get("body", b""))
            size_bytes += received_bytes
            self._total_size_bytes += received_bytes
            if size_bytes > self._max_size_bytes:
                raise self._too_large()
            if self._total_size_bytes > self._max_total_size_bytes:
                raise _rejection(503, "The server is busy with other requests; try again in a second.", retry_after_s=1)
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, limited_receive, send)
        finally:
            self._total_size_bytes -= size_bytes

    async def _receive_in_time(self, receive: Receive, deadline_s: float) -> Message:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await receive()
        except TimeoutError:
            raise _rejection(408, f"The request's body did not arrive within {self._timeout_s:g} s.") from None

    def _too_large(self) -> HTTPException:
        return _rejection(413, f"The request is larger than the limit of {self._max_size_bytes} bytes.")


def _rejection(status: int, message: str, retry_after_s: int | None = None) -> HTTPException:
    headers = {"Connection": "close"}  # otherwise uvicorn reads the rest of the body
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return HTTPException(status, message, headers)


class HeadTimeoutProtocol(H11Protocol):
    """uvicorn's h11 protocol with a timeout for the head of a request.

    h11 rejects heads larger than 64 KiB. httptools, uvicorn's other protocol, reads heads and trailers of any size.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Stop the timer when the head is complete; start it with the first byte of the next one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self._stop_timer()
        elif self._head_timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
