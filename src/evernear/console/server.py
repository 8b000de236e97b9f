"""The console as an ASGI application, and as a server process."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from ipaddress import ip_address

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from evernear.console.access import Guard, SignIn
from evernear.console.backend import Backend
from evernear.console.class_page import ClassPage
from evernear.console.mistakes_page import MistakesPage
from evernear.console.pages import DataPage, ReleasesPage, TryPage
from evernear.console.review_page import ReviewPage
from evernear.console.runs_page import RunsPage
from evernear.console.web import Predictor, error_response
from evernear.errors import EvernearError, SettingsError
from evernear.serving.endpoints import host_and_port, listening_socket
from evernear.serving.http.limits import limited_server, require_usable_tls
from evernear.settings.serving import MAX_BODIES_SIZE_BYTES
from evernear.settings.triggers import ConsoleSettings

SHUTDOWN_TIMEOUT_S = 5
UPLOAD_TIMEOUT_S = 60.0
"""Time limit for receiving an image: the largest one at 9 Mbit/s."""
PAGES = (TryPage, ReviewPage, DataPage, ClassPage, MistakesPage, RunsPage, ReleasesPage)


def require_private(settings: ConsoleSettings) -> None:
    """Require that the token is never sent over a network in plaintext."""
    try:
        is_loopback = settings.host == "localhost" or ip_address(settings.host).is_loopback
    except ValueError:
        is_loopback = False
    if not (is_loopback or settings.certificate or settings.identity_header):
        raise SettingsError(
            f"console.host = {settings.host} is reachable from the network, so the token needs TLS: set "
            "console.certificate and console.private_key, or console.identity_header behind a proxy."
        )


def serve_console(app: Starlette, settings: ConsoleSettings, on_bound: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. ``on_bound`` receives the URL."""
    require_private(settings)
    require_usable_tls({"console.certificate": settings.certificate, "console.private_key": settings.private_key})
    server = create_server(app, settings)
    with listening_socket(settings.host, settings.port, "console.port") as listener:
        address, port = listener.getsockname()[:2]
        on_bound(f"{'https' if settings.certificate else 'http'}://{host_and_port(address, port)}")
        server.run(sockets=[listener])


def create_server(app: Starlette, settings: ConsoleSettings) -> uvicorn.Server:
    """The caller runs the server with listening sockets."""
    return limited_server(
        app,
        max_size_bytes=MAX_BODIES_SIZE_BYTES,
        upload_timeout_s=UPLOAD_TIMEOUT_S,
        shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
    )


def create_console_app(backend: Backend, sign_in: SignIn) -> Starlette:
    """Create the console as an ASGI application, which recognizes images as the preprocessing
    server does."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        app.state.predictor = Predictor(backend.settings)
        try:
            yield
        finally:
            await app.state.predictor.close()

    return Starlette(
        routes=[
            Route("/health", _health),
            Route("/", _first_page),
            *(route for page in PAGES for route in page(backend).routes()),
            Mount("/static", StaticFiles(directory=str(resources.files("evernear.console") / "static"))),
        ],
        middleware=[Middleware(Guard, sign_in=sign_in)],
        exception_handlers={EvernearError: error_response, HTTPException: error_response},
        lifespan=lifespan,
    )


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok")


async def _first_page(_: Request) -> Response:
    return RedirectResponse("/try", 303)
