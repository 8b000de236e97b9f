"""Assemble the ASGI application from pages and access control."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from evernear.console.access import Guard, SignIn
from evernear.console.backend import Backend
from evernear.console.pages.data import DataPage
from evernear.console.pages.live import LivePart
from evernear.console.pages.recognize import TryPage
from evernear.console.pages.reindex import ReindexPart
from evernear.console.pages.releases import ReleasesPage
from evernear.console.pages.review import ReviewPage
from evernear.console.predictor import Predictor
from evernear.console.warm_up import WarmUp
from evernear.console.web import error_response
from evernear.errors import EvernearError

PAGES = (TryPage, ReviewPage, ReindexPart, LivePart, DataPage, ReleasesPage)


def create_console_app(backend: Backend, sign_in: SignIn) -> Starlette:
    """Create the console as an ASGI application. The console recognizes images with `PrepService`,
    as the preprocessing server does."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        app.state.predictor = Predictor(backend.settings)
        app.state.warm_up.start()
        try:
            yield
        finally:
            await app.state.predictor.close()

    app = Starlette(
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
    app.state.warm_up = WarmUp(backend)
    return app


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok")


async def _first_page(_: Request) -> Response:
    return RedirectResponse("/try", 303)
