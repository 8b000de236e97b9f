"""What the console's endpoints share: templates, forms, images, errors and the predictor."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, lru_cache
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import parse_qs

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from evernear.common.output import printable, quantity
from evernear.errors import (
    BusyError,
    ConflictError,
    DataError,
    EvernearError,
    MissingObjectError,
    ServerUnreachableError,
    SettingsError,
)
from evernear.evaluation.headline import headline
from evernear.serving.decoding import OverloadedError
from evernear.serving.http.remote import Remote, torchserve_backend
from evernear.serving.http.telemetry import Telemetry
from evernear.serving.responses import Prediction, Rejection
from evernear.settings import Settings
from evernear.settings.serving import MODEL_NAME

MAX_FORM_BYTES = 256 * 2**10
Form = Mapping[str, list[str]]
_printable = lru_cache(10_000)(printable)
"""Caches printable values, because most of a page's thousands of values were also on the previous
page."""


def page(request: Request, template: str, **values: Any) -> HTMLResponse:
    return HTMLResponse(render(template, request=request, **values))


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def action(handle: Callable[[Request, Form], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Create an endpoint for a form. ``handle`` is called with the form in a worker thread."""

    async def endpoint(request: Request) -> Response:
        body = await request.body()
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(413, "The form is too large.")
        fields = parse_qs(body.decode(errors="replace"))
        return await run_in_threadpool(handle, request, fields)

    return endpoint


def field(form: Form, name: str) -> str:
    """The last value of a form field, stripped of surrounding whitespace, or an empty string if the
    field is missing."""
    return (form.get(name) or [""])[-1].strip()


def page_number(request: Request) -> int:
    """The number of the page of a list, from 1."""
    number = request.query_params.get("page", "1")
    return max(1, int(number)) if number.isdecimal() and len(number) < 6 else 1


def list_page(request: Request, total: int, size: int) -> tuple[int, int]:
    """The number of the page of a list of ``total`` items, and the number of pages. Beyond the end
    is the last page, because a list becomes shorter while users answer."""
    pages = max(1, -(-total // size))
    return min(page_number(request), pages), pages


def png(image: bytes) -> Response:
    """A PNG response that browsers may cache, because the URL identifies the content."""
    return Response(image, media_type="image/png", headers={"Cache-Control": "private, max-age=604800, immutable"})


async def error_response(request: Request, error: Exception) -> Response:
    """Render an error as one sentence: plain text for scripts, a page for browsers."""
    match error:
        case HTTPException():
            status, sentence = error.status_code, str(error.detail)
        case MissingObjectError():
            status, sentence = 404, str(error)
        case ConflictError() | BusyError():
            status, sentence = 409, str(error)
        case OverloadedError():
            status, sentence = 503, str(error)
        case DataError() | SettingsError():
            status, sentence = 400, str(error)
        case EvernearError():
            status, sentence = 503, str(error)
        case _:
            raise error
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if request.method != "GET" or "hx-request" in request.headers:
        return Response(printable(sentence), status, headers, "text/plain")
    title = HTTPStatus(status).phrase
    content = render("error.html.j2", request=request, title=title, sentence=sentence)
    return HTMLResponse(content, status, headers)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("evernear.console"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup | int | float) else _printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cast(dict[str, Any], environment.globals).update(quantity=quantity)
    environment.filters.update(name=_isolated, headline=headline, time=lambda at: f"{at:%Y-%m-%d %H:%M} UTC")
    return environment


def _isolated(name: str) -> Markup:
    """A class or file name, which does not reverse the text around it if it is written from right
    to left."""
    return Markup("<bdi>{}</bdi>").format(_printable(name))


class Predictor:
    """Creates a `Remote` on demand, because the console may start before the servers. If a server
    becomes unreachable, the `Remote` is replaced, because the server may restart on a different
    port."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._telemetry = Telemetry("prep", MODEL_NAME)
        self._remote: Remote | None = None
        self._lock = asyncio.Lock()

    async def predict(self, image: bytes) -> Prediction:
        """Recognize an image file. Raises the errors of `Remote.recognize`, and `DataError`.

        A request whose server is unreachable closes the connections of the others, so each is sent
        once more.
        """
        try:
            return await self._predict(image)
        except ServerUnreachableError:
            return await self._predict(image)

    async def _predict(self, image: bytes) -> Prediction:
        async with self._lock:
            if self._remote is None:  # bound to this event loop
                self._remote = torchserve_backend(self._settings, self._telemetry, embeddings=True)
            remote = self._remote
        try:
            (result,) = await remote.recognize([image])
        except ServerUnreachableError:
            async with self._lock:
                if self._remote is remote:
                    self._remote = None
            await remote.aclose()
            raise
        if isinstance(result, Rejection):
            raise DataError(result.message)
        return result

    async def close(self) -> None:
        if self._remote is not None:
            await self._remote.aclose()
