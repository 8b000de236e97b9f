"""The Try page: recognize an image, and submit the image for review."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.console.access import require
from evernear.console.backend import Backend
from evernear.console.predictor import Predictor
from evernear.console.web import page
from evernear.serving.responses import Prediction

SHOWN_NEIGHBORS = 6
FORGOTTEN = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 96 96" role="img" aria-label="forgotten">
<rect width="96" height="96" fill="#8884"/>
<text x="48" y="52" text-anchor="middle" font-family="sans-serif" font-size="14" fill="#888">forgotten</text></svg>"""
"""Placeholder for an image that the store no longer has."""


class TryPage:
    """The Try page. The application's state contains the `Predictor` that recognizes images."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/try", self._show),
            Route("/try/neighbor/{version}/{row:int}", self._neighbor),
            Route("/try", self._recognize, methods=["POST"]),
            Route("/try/review", self._send, methods=["POST"]),
        ]

    def _show(self, request: Request) -> Response:
        champion = self._backend.releases.champion()
        return page(request, "try.html.j2", champion=champion)

    async def _recognize(self, request: Request) -> Response:
        prediction = await _predict(request, await _image(request))
        record = await run_in_threadpool(self._backend.releases.record, prediction.version)
        return page(
            request,
            "answer.html.j2",
            prediction=prediction,
            neighbors=prediction.neighbors[:SHOWN_NEIGHBORS],
            threshold=record.manifest.threshold,
        )

    async def _send(self, request: Request) -> Response:
        user = require(request, "label")
        image = await _image(request)
        prediction = await _predict(request, image)
        await run_in_threadpool(self._backend.submissions.add, image, prediction, user.name, self._backend.now())
        return page(request, "sent.html.j2")

    def _neighbor(self, request: Request) -> Response:
        found = self._backend.gallery.find(request.path_params["version"], request.path_params["row"])
        if found is None:
            return Response(FORGOTTEN, 404, media_type="image/svg+xml")
        return Response(found.png(), media_type="image/png")  # not cacheable: the image may be forgotten


async def _image(request: Request) -> bytes:
    """Read the request body, which is an image file. `Request.body` is not used, because it would
    keep the file in memory until the response is sent."""
    return b"".join([part async for part in request.stream()])


async def _predict(request: Request, image: bytes) -> Prediction:
    predictor: Predictor = request.app.state.predictor
    return await predictor.predict(image)
