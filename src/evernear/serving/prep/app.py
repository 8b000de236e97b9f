"""The preprocessing server's HTTP: routes, errors, limits, metrics."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evernear import __version__
from evernear.errors import DataError, EvernearError, ServerTimeoutError
from evernear.serving.decoding import OverloadedError
from evernear.serving.http_limits import BoundedBodies
from evernear.serving.messages import Metadata, Prediction, Refusal
from evernear.serving.prep.requests import RequestError, schema
from evernear.serving.prep.service import LeftAlone, Service
from evernear.settings import Settings

EXAMPLE_VERSION = "20261120.162250.af2fb66c"
EXAMPLE_PREDICTION = {
    "pred": "7",
    "dist": 0.399,
    "unknown": False,
    "neighbors": [{"label": "7", "dist": 0.399}, {"label": "7", "dist": 0.441}],
    "version": EXAMPLE_VERSION,
}


class Label(BaseModel):
    """The label alone; of an unknown image it is only a guess."""

    label: str = Field(examples=["7"])
    unknown: bool = Field(examples=[False])
    version: str = Field(examples=[EXAMPLE_VERSION])


class Labels(BaseModel):
    """All labels that the release can answer with."""

    labels: tuple[str, ...] = Field(examples=[["0", "1", "2"]])
    version: str = Field(examples=[EXAMPLE_VERSION])


class Health(BaseModel):
    """This server and the predictor behind it answer, and agree."""

    status: str = Field(default="ok", examples=["ok"])
    version: str = Field(examples=[EXAMPLE_VERSION])


def create_app(settings: Settings) -> FastAPI:
    """The application; it makes its `Service` when it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        app.state.service = Service(settings)
        try:
            yield
        finally:
            await app.state.service.close()

    app = FastAPI(
        title="evernear preprocessing server",
        description="Prepares images as the serving release prescribes, and has TorchServe recognise them.",
        version=__version__,
        lifespan=lifespan,
    )
    app.add_middleware(Counted)
    app.add_middleware(
        BoundedBodies,
        max_size_bytes=settings.prep.max_request_size_bytes,
        max_total_size_bytes=settings.prep.max_bodies_size_bytes,
        timeout_s=settings.prep.upload_timeout_s,
    )
    for error in (EvernearError, HTTPException):
        app.add_exception_handler(error, _refuse)
    app.include_router(router)
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


TheService = Annotated[Service, Depends(_service)]


Responses = dict[int | str, dict[str, Any]]
ANSWERED: Responses = {200: {"content": {"application/json": {"example": EXAMPLE_PREDICTION}}}}
DOWN: Responses = {
    503: {"model": Refusal, "description": "The predictor or this server is busy or down; see Retry-After."},
    504: {"model": Refusal, "description": "The predictor takes too long."},
}
REFUSED: Responses = {
    400: {"model": Refusal, "description": "The image cannot be used."},
    408: {"model": Refusal, "description": "The request arrives too slowly."},
    413: {"model": Refusal, "description": "The request is too large."},
    422: {"model": Refusal, "description": "The request is not the JSON that is wanted."},
}
IMAGE_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema()}}}}
router = APIRouter(responses=DOWN)


@router.get("/health")
async def health(service: TheService) -> Health:
    """Whether a prediction comes out of this server and the predictor behind it."""
    return Health(version=(await service.serving()).version)


@router.get("/metadata")
async def metadata(service: TheService) -> Metadata:
    """What the release that serves takes and gives."""
    return await service.metadata()


@router.get("/label")
async def labels(service: TheService) -> Labels:
    """All labels of the release that serves."""
    serving = await service.serving()
    return Labels(labels=serving.labels, version=serving.version)


@router.get("/predict/test", responses=ANSWERED)
async def predict_test(service: TheService) -> Prediction:
    """The prediction for an image that the release was tested with."""
    return await service.test()


@router.get("/predict/test/label")
async def predict_test_label(service: TheService) -> Label:
    """The label of an image that the release was tested with."""
    return _label(await service.test())


@router.post("/predict", responses=ANSWERED | REFUSED, openapi_extra=IMAGE_BODY)
async def predict(request: Request, service: TheService) -> Prediction:
    """What an image shows, with its nearest neighbors."""
    return await service.predict(await _body(request))


@router.post("/predict/label", responses=REFUSED, openapi_extra=IMAGE_BODY)
async def predict_label(request: Request, service: TheService) -> Label:
    """What an image shows, as a label alone."""
    return _label(await service.predict(await _body(request)))


@router.get("/metrics", include_in_schema=False)
async def metrics(service: TheService) -> Response:
    """For Prometheus."""
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _body(request: Request) -> bytes:
    """The body; `Request.body` would keep it until the answer."""
    return b"".join([part async for part in request.stream()])


def _label(prediction: Prediction) -> Label:
    return Label(label=prediction.pred, unknown=prediction.unknown, version=prediction.version)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    """Every error as a `Refusal`, whoever raised it."""
    headers: dict[str, str] = {}
    match error:
        case HTTPException():
            status, message = error.status_code, str(error.detail)
            headers = dict(error.headers or {})
        case RequestError():
            status, message = 422, str(error)
        case DataError():
            status, message = 400, str(error)
        case ServerTimeoutError():
            status, message = 504, str(error)
        case _:
            status, message = 503, str(error)
            if isinstance(error, LeftAlone | OverloadedError):
                headers = {"Retry-After": str(error.retry_after_s)}
    refusal = Refusal(code=status, type=HTTPStatus(status).phrase.replace(" ", ""), message=message)
    return JSONResponse(refusal.model_dump(), status, headers)


class Counted:
    """Counts requests by route and status."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass ``scope`` on, and look at the response that goes out."""

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                # An unknown path is the client's word: it would make a metric of every such word.
                path = scope["route"].path if "route" in scope else "other"
                service: Service = scope["app"].state.service
                service.metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, seen if scope["type"] == "http" else send)
