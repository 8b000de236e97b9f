"""The ASGI application of all servers that recognize images: routes, errors, log and metrics."""

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from evernear import __version__
from evernear.common.output import log_fields
from evernear.errors import EvernearError
from evernear.serving.http.limits import DrainingServer, limited_server
from evernear.serving.http.protocol import ON_DISCONNECT
from evernear.serving.http.routes import KSERVE_PREDICTIONS, PREDICTIONS, kserve_router, router
from evernear.serving.http.service import Service, status_of
from evernear.serving.responses import Rejection
from evernear.serving.tracing import TRACE_FIELD, describe_response, request_span, trace_id

REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
SHUTDOWN_TIMEOUT_S = 30
KEEP_ALIVE_S = 65
"""Time before an idle connection is closed: longer than the 60 s of common proxies, which would
otherwise use connections that close."""
Open = Callable[[], AbstractAsyncContextManager[Service]]
"""Opens the service in the event loop of the server."""
_log = logging.getLogger(__name__)


def create_server(open_service: Open, title: str, **limits: Any) -> DrainingServer:
    """The caller runs the server with listening sockets. ``limits`` are those of
    `limited_server`."""
    server = limited_server(
        Application(open_service, title),
        shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        server=DrainingServer,
        **limits,
    )
    return cast(DrainingServer, server)


class Application:
    """Answers predictions itself, and passes other requests to FastAPI, whose routing and
    middleware take more CPU time than a prediction.

    It counts and logs all requests. The id of a request is the client's ``X-Request-Id`` if it is
    short and printable, otherwise a new one. The response repeats it. If the client disconnects,
    the request is cancelled, as in `grpc.aio`.
    """

    def __init__(self, open_service: Open, title: str) -> None:
        self._app = _create_app(open_service, title)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        task, is_present = cast(asyncio.Task[Any], asyncio.current_task()), True

        def leave() -> None:
            nonlocal is_present
            is_present = False
            task.cancel()

        scope[ON_DISCONNECT] = leave
        try:
            await self._answer_logged(scope, receive, send)
        except asyncio.CancelledError:
            if is_present:
                raise

    async def _answer_logged(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.monotonic()
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn leaves out the body
        service: Service = self._app.state.service
        headers: dict[bytes, bytes] = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else os.urandom(16).hex().encode()
        parent = headers.get(TRACE_FIELD.encode(), b"").decode("latin-1")

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-request-id", request_id))
                # The metric label is the route: with the path, clients could create an unlimited
                # number of time series.
                route = scope.get("route")
                path = route.path if route else "other"
                service.telemetry.requests.labels(path, message["status"]).inc()
                release = scope.get("state", {}).get("release", "")
                describe_response(span, scope["method"], path, message["status"], release)
                if (path.startswith("/predict") or route in PREDICTIONS) and _log.isEnabledFor(logging.INFO):
                    duration_s = round(time.monotonic() - started_s, 4)
                    with log_fields(release=release, path=path, status=message["status"], duration_s=duration_s):
                        _log.info("%s %s: %d", scope["method"], path, message["status"])
            await send(message)

        with (
            request_span(service.telemetry.tracer, parent, **{"evernear.request": request_id.decode()}) as span,
            log_fields(request=request_id.decode(), trace=trace_id(span)),
        ):
            await self._answer(scope, receive, counting_send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            for route in PREDICTIONS:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found, app=self._app, route=route)
                    request = Request(scope, receive)
                    try:
                        response = await route.endpoint(request)
                    except (EvernearError, HTTPException) as error:
                        response = await _error_response(request, error)
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _create_app(open_service: Open, title: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with open_service() as service:
            app.state.service = service
            yield

    app = FastAPI(
        title=title,
        description="Prepares images as the live release prescribes, and recognizes them.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
    )
    for error in (EvernearError, HTTPException):
        app.add_exception_handler(error, _error_response)
    app.include_router(router)
    app.include_router(kserve_router)
    app.router.routes.extend(KSERVE_PREDICTIONS)
    return app


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    """In KServe's format on its paths, otherwise a `Rejection`, as TorchServe's."""
    status, message, headers = status_of(error)
    if request.url.path.startswith(("/v1/", "/v2/")):
        return JSONResponse({"error": message}, status, headers)
    rejection = Rejection(code=status, type=HTTPStatus(status).phrase.replace(" ", ""), message=message)
    return JSONResponse(rejection.model_dump(), status, headers)
