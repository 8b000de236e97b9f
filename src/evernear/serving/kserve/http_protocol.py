"""HTTP for KServe's servers: uvicorn's httptools protocol, with limits.

h11, uvicorn's other protocol, limits heads and discards trailers, but its parser in
Python takes more CPU time for a request than all that this server does for it.
"""

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from evernear.serving.http_limits import HeadTimeoutProtocol, HeadTimer

MAX_HEAD_BYTES = 64 * 1024
"""Bytes that may arrive without any of a body: of a head, of trailers,
or of extensions of chunks. h11 has the same.
"""
MAX_PIPELINED = 16
"""Requests of a connection that may wait for the response to an earlier one."""
ON_DISCONNECT = "evernear.on_disconnect"
"""An entry of the ASGI scope: a function to call when the client disconnects before it
has the response.
"""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with a timeout for heads,
    and with limits for heads, trailers and pipelining.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer = HeadTimer(self.loop)
        self._in_head = False
        self._bodiless_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._head_timer.start(transport)

    def data_received(self, data: bytes) -> None:
        """Stop the timer when the head is complete;
        start it with the first byte of the next one.
        """
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
            elif self._is_busy:
                self._head_timer.stop()
            else:
                self._head_timer.start(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and tell the application if it is still making the
        response.
        """
        self._head_timer.stop()
        super().connection_lost(exc)
        if self._is_busy and (leave := self.cycle.scope.get(ON_DISCONNECT)):
            leave()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field to the head; fields after the body are dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless it has to wait for an earlier one."""
        self._in_head = False
        self._bodiless_bytes = 0
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise httptools.HttpParserError("too many pipelined requests")

    def on_body(self, body: bytes) -> None:
        """Add to the body, which the application limits."""
        self._bodiless_bytes = 0
        super().on_body(body)

    def _should_upgrade(self) -> bool:
        """Leave every request for an upgrade to `_continue_with_h11`."""
        return True

    def _continue_with_h11(self, rest: bytes) -> None:
        """Parse the last head and ``rest`` again:
        httptools drops the body of a request for an upgrade.

        Java's HttpClient sends such requests by default. h11 ignores the upgrade.
        """
        if self._is_busy:
            self.send_400_response("A pipelined request cannot ask for an upgrade.")
            return
        self._head_timer.stop()
        self.connections.discard(self)
        line = f"{self.scope['method']} {self.url.decode('ascii')} HTTP/{self.scope['http_version']}"
        fields = [b"%s: %s" % field for field in self.headers]
        protocol = HeadTimeoutProtocol(self.config, self.server_state, self.app_state)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.data_received(b"\r\n".join([line.encode("ascii"), *fields, b"", rest]))
