"""Limits for HTTP clients: uvicorn limits neither size nor upload time of request bodies.

`limited_server` enforces them for all servers of evernear in Python.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evernear.errors import SettingsError
from evernear.serving.http.protocol import LimitedHttpProtocol
from evernear.settings.serving import MAX_BODIES_SIZE_BYTES

MAX_DISCARDED_BYTES = 64 * 2**20
"""Most bytes of a rejected body to discard, which lets the client receive the response."""
DISCARD_PAUSE_S = 2.0
"""A longer pause while a rejected body arrives closes the connection. Apache uses the same time."""
DRAIN_S = 2.0
"""Maximum time for clients to leave their persistent connections when a pod stops."""


class DrainingServer(uvicorn.Server):
    """At shutdown, ask clients to leave their persistent connections (``Connection: close``) before
    these are closed. uvicorn closes idle ones at once, and so resets a request on its way."""

    drain_s = DRAIN_S
    stop_others: Callable[[], Awaitable[None]] | None = None
    """Stops what serves beside it, at the same time."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state, loop = self.server_state, asyncio.get_running_loop()
        others = asyncio.ensure_future(self.stop_others()) if self.stop_others else None
        state.default_headers = [*state.default_headers, (b"connection", b"close")]
        deadline_s = loop.time() + self.drain_s
        while state.connections and loop.time() < deadline_s and not self.force_exit:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)
        if others:
            await others


def limited_server(
    app: ASGIApp,
    *,
    max_size_bytes: int,
    upload_timeout_s: float,
    shutdown_timeout_s: int,
    max_total_size_bytes: int = MAX_BODIES_SIZE_BYTES,
    server: type[uvicorn.Server] = uvicorn.Server,
    **options: Any,
) -> uvicorn.Server:
    """A server for ``app`` with limits for heads and bodies. The caller runs it with listening
    sockets. At shutdown, it finishes in-flight requests for up to ``shutdown_timeout_s``."""
    config = uvicorn.Config(
        BodyLimits(app, max_size_bytes, max_total_size_bytes, upload_timeout_s),
        http=LimitedHttpProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=shutdown_timeout_s,
        **options,
    )
    return server(config)


def require_usable_tls(files: Mapping[str, Path | None]) -> None:
    """Require that ``files``, a certificate and its key, are readable and unencrypted, and belong
    together. OpenSSL prompts for the password of an encrypted file. The keys are the settings."""
    (certificate_name, certificate), (key_name, key) = files.items()
    for name, path in files.items():
        try:
            content = path.read_bytes() if path else b""
        except OSError as error:
            raise SettingsError(f"{name} = {path} cannot be read: {error.strerror}.") from None
        if b"ENCRYPTED" in content:
            raise SettingsError(
                f"{name} = {path} needs a password; `openssl pkey -in {path} -out PLAIN_KEY` writes it without one."
            )
    if not (certificate or key):
        return
    if not certificate:
        raise SettingsError(f"{key_name} = {key} needs {certificate_name}.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is an OSError
        raise SettingsError(
            f"{certificate_name} and {key_name} cannot be used ({error}); they are PEM files of a certificate and of "
            "the key to it."
        ) from None


class BodyLimits:
    """ASGI middleware that limits the size and the upload time of each request body, and the total
    size of all in-flight bodies.

    If a body exceeds a limit, the application's next ``receive`` call raises an `HTTPException`
    with status 413 (``max_size_bytes``), 503 (``max_total_size_bytes``) or 408 (``timeout_s``).
    After the response, the middleware discards the rest of the body, within the limits
    ``timeout_s``, `DISCARD_PAUSE_S` and `MAX_DISCARDED_BYTES`. Closing a connection with unread
    data resets it, and a client that sends its whole body before it reads would lose the response.
    """

    def __init__(self, app: ASGIApp, max_size_bytes: int, max_total_size_bytes: int, timeout_s: float) -> None:
        self._app = app
        self.max_size_bytes = max_size_bytes
        self.max_total_size_bytes = max_total_size_bytes
        self.timeout_s = timeout_s
        self.total_size_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _LimitedBody(self, dict(scope["headers"]), receive)

        async def send_and_discard(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and body.rejected:
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            await self._app(scope, body.receive, send_and_discard)
        finally:
            body.release()


class _LimitedBody:
    def __init__(self, limits: BodyLimits, headers: dict[bytes, bytes], receive: Receive) -> None:
        self._limits = limits
        self._receive = receive
        self._declared_bytes = int(headers.get(b"content-length", b"0"))
        self._awaits_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        self._deadline_s = asyncio.get_running_loop().time() + limits.timeout_s
        self._size_bytes = 0
        self._complete = False
        self.rejected = False

    async def receive(self) -> Message:
        if self._complete:  # the application awaits the client's disconnect
            return await self._receive()
        try:
            return await self._receive_limited()
        except HTTPException:
            self.rejected = True
            self.release()
            raise

    async def discard(self) -> None:
        loop = asyncio.get_running_loop()
        discarded_bytes = 0
        with suppress(TimeoutError):
            # While a client awaits "100 Continue", any read would make the server request the body.
            while not (self._complete or self._awaits_continue) and discarded_bytes < MAX_DISCARDED_BYTES:
                async with asyncio.timeout_at(min(self._deadline_s, loop.time() + DISCARD_PAUSE_S)):
                    message = await self._receive()
                discarded_bytes += len(self._note(message).get("body", b""))

    def release(self) -> None:
        """Subtract this body from the total size of in-flight bodies."""
        self._limits.total_size_bytes -= self._size_bytes
        self._size_bytes = 0

    async def _receive_limited(self) -> Message:
        limits = self._limits
        if self._declared_bytes > limits.max_size_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = self._note(await self._receive())
        except TimeoutError:
            raise _rejection(408, f"The request's body did not arrive within {limits.timeout_s:g} s.") from None
        received_bytes = len(message.get("body", b""))
        self._size_bytes += received_bytes
        limits.total_size_bytes += received_bytes
        if self._size_bytes > limits.max_size_bytes:
            raise self._too_large()
        if limits.total_size_bytes > limits.max_total_size_bytes:
            raise _rejection(503, "The server is busy with other requests; try again in a second.", retry_after_s=1)
        return message

    def _note(self, message: Message) -> Message:
        """Record whether the body is complete. The client no longer awaits "100 Continue"."""
        self._complete = not message.get("more_body", False)
        self._awaits_continue = False
        return message

    def _too_large(self) -> HTTPException:
        return _rejection(413, f"The request is larger than the limit of {self._limits.max_size_bytes} bytes.")


def _rejection(status: int, message: str, retry_after_s: int | None = None) -> HTTPException:
    headers = {"Connection": "close"}  # otherwise uvicorn reads the rest of the body
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return HTTPException(status, message, headers)
