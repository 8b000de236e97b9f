"""The HTTP protocol of the servers: uvicorn's httptools protocol with additional limits.

uvicorn's other protocol, h11, limits request heads and discards trailers, but its Python parser
takes more CPU time per request than the rest of a server.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 10.0
"""Maximum time to receive the request line and the headers."""

MAX_HEAD_BYTES = 64 * 1024
"""Longest sequence of bytes without body data, such as a head or chunk extensions, as in h11."""
MAX_PIPELINED = 16
"""Maximum number of pipelined requests that wait on one connection for earlier ones."""
ON_DISCONNECT = "evernear.on_disconnect"
"""ASGI scope key of a callback for a client that disconnects before it receives the response."""


class HeadTimeout(asyncio.Protocol):
    """Base class for uvicorn's protocols: closes a connection if a request head does not arrive
    within `HEAD_TIMEOUT_S`."""

    loop: asyncio.AbstractEventLoop
    transport: Any
    cycle: Any
    _timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)

    def await_head(self) -> None:
        """A complete head stops the timer, and the first byte of the next one starts it again."""
        if self.is_busy:
            self.stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class H11WithHeadTimeout(HeadTimeout, H11Protocol):
    """h11 rejects heads larger than 64 KiB."""


class LimitedHttpProtocol(HeadTimeout, HttpToolsProtocol):
    """uvicorn's httptools protocol with limits for heads, their time, trailers and pipelining."""

    _in_head = False
    _bodiless_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._bodiless_bytes += len(data)
        try:
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess]
        except httptools.HttpParserUpgrade as upgrade:
            self._continue_with_h11(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        else:
            if self._bodiless_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head, the trailers or the chunks of the request are too large.")
            else:
                self.await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the application if its response is not complete."""
        super().connection_lost(exc)
        if self.is_busy and (leave := self.cycle.scope.get(ON_DISCONNECT)):
            leave()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Fields after the body (trailers) are dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless it must wait for an earlier one."""
        self._in_head = False
        self._bodiless_bytes = 0
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise httptools.HttpParserError("too many pipelined requests")

    def on_body(self, body: bytes) -> None:
        """The application limits the body's size."""
        self._bodiless_bytes = 0
        super().on_body(body)

    def _should_upgrade(self) -> bool:
        """`_continue_with_h11` handles every upgrade request."""
        return True

    def _continue_with_h11(self, rest: bytes) -> None:
        """Parse the last head and ``rest`` again with h11, because httptools drops the body of an
        upgrade request. Java's ``HttpClient`` sends these by default. h11 ignores the upgrade."""
        if self.is_busy:
            self.send_400_response("A pipelined request cannot ask for an upgrade.")
            return
        self.stop_timer()
        self.connections.discard(self)
        line = f"{self.scope['method']} {self.url.decode('ascii')} HTTP/{self.scope['http_version']}"
        fields = [b"%s: %s" % field for field in self.headers]
        protocol = H11WithHeadTimeout(self.config, self.server_state, self.app_state)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.data_received(b"\r\n".join([line.encode("ascii"), *fields, b"", rest]))
