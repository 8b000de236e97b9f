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

from evernear.errors import EvernearError
from evernear.triggers.console.access import Access, Guard
from evernear.triggers.console.pages.data import DataPage
from evernear.triggers.console.pages.live import LivePart
from evernear.triggers.console.pages.recognize import TryPage
from evernear.triggers.console.pages.reindex import ReindexPart
from evernear.triggers.console.pages.releases import ReleasesPage
from evernear.triggers.console.pages.review import ReviewPage
from evernear.triggers.console.predictor import Predictor
from evernear.triggers.console.services import Services
from evernear.triggers.console.warm_up import WarmUp
from evernear.triggers.console.web import error_response

PAGES = (TryPage, ReviewPage, ReindexPart, LivePart, DataPage, ReleasesPage)


def create_console_app(services: Services, access: Access) -> Starlette:
    """Create the console as an ASGI application. The console recognizes images with `PrepService`,
    as the preprocessing server does."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        app.state.predictor = Predictor(services.settings)
        app.state.warm_up.start()
        try:
            yield
        finally:
            await app.state.predictor.close()

    app = Starlette(
        routes=[
            Route("/health", _health),
            Route("/", _first_page),
            *(route for page in PAGES for route in page(services).routes()),
            Mount("/static", StaticFiles(directory=str(resources.files("evernear.triggers.console") / "static"))),
        ],
        middleware=[Middleware(Guard, access=access)],
        exception_handlers={EvernearError: error_response, HTTPException: error_response},
        lifespan=lifespan,
    )
    app.state.warm_up = WarmUp(services)
    return app


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok")


async def _first_page(_: Request) -> Response:
    return RedirectResponse("/try", 303)
