"""Bounds on what HTTP clients send, for the servers that run on uvicorn, which has none for bodies and slow clients."""

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0
"""For the request line and the headers."""


class BoundedBodies:
    """ASGI middleware that stops reading a body which is too large or too slow, or more than the server can hold.

    ``max_size_bytes`` is for one body, ``max_total_size_bytes`` for those of all requests that are being answered,
    ``timeout_s`` for the arrival of one. What is refused raises an `HTTPException` where the application reads the
    body: 413, 503 or 408, before the rest of it is read.
    """

    def __init__(self, app: ASGIApp, max_size_bytes: int, max_total_size_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_size_bytes = max_size_bytes
        self._max_total_size_bytes = max_total_size_bytes
        self._timeout_s = timeout_s
        self._total_size_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass ``scope`` on, with a ``receive`` that counts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        size_bytes = 0
        complete = False

        async def bounded() -> Message:
            nonlocal size_bytes, complete
            if complete:  # what is awaited then is the client's hanging up
                return await receive()
            if int(declared) > self._max_size_bytes:
                raise self._too_large()
            message = await self._in_time(receive, deadline_s)
            received_bytes = len(message.get("body", b""))
            size_bytes += received_bytes
            self._total_size_bytes += received_bytes
            if size_bytes > self._max_size_bytes:
                raise self._too_large()
            if self._total_size_bytes > self._max_total_size_bytes:
                raise _refusal(503, "The server is busy with other requests; try again in a second.", retry_after_s=1)
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._total_size_bytes -= size_bytes

    async def _in_time(self, receive: Receive, deadline_s: float) -> Message:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await receive()
        except TimeoutError:
            raise _refusal(408, f"The request's body did not arrive within {self._timeout_s:g} s.") from None

    def _too_large(self) -> HTTPException:
        return _refusal(413, f"The request is larger than the {self._max_size_bytes} bytes that are allowed.")


def _refusal(status: int, sentence: str, retry_after_s: int | None = None) -> HTTPException:
    headers = {"Connection": "close"}  # else uvicorn would read on to the end of the body
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return HTTPException(status, sentence, headers)


class PromptH11Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 on h11, whose clients have `HEAD_TIMEOUT_S` to say what they want.

    h11 ends a request whose head is larger than 64 KiB; httptools, uvicorn's other choice, reads heads and trailers
    of any size.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock for the first request."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Stop the clock when the head is complete; start it with the first byte of the next one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self._stop_waiting()
        elif self._head_timer is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
