"""The preprocessing server's HTTP: routes, errors, limits, metrics."""

import base64
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evernear import __version__
from evernear.errors import DataError, EvernearError, Timeout
from evernear.serving.messages import Metadata, Prediction, Refusal
from evernear.serving.prep.releases import as_png
from evernear.serving.prep.service import LeftAlone, Service
from evernear.settings import Settings

EXAMPLE_IMAGE = base64.b64encode(as_png(Image.new("L", (8, 8)))).decode()
EXAMPLE_VERSION = "20261120.162250.af2fb66c"
EXAMPLE_PREDICTION = {
    "pred": "7",
    "dist": 0.399,
    "unknown": False,
    "neighbors": [{"label": "7", "dist": 0.399}, {"label": "7", "dist": 0.441}],
    "version": EXAMPLE_VERSION,
}


class ImageRequest(BaseModel):
    """An image to be recognised."""

    model_config = ConfigDict(extra="forbid")

    data: str = Field(
        min_length=1, description="A PNG or JPEG file of any size, grey or colour, in base64.", examples=[EXAMPLE_IMAGE]
    )


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
    app.add_middleware(BoundedBody, max_size_bytes=settings.prep.max_request_size_bytes)
    for error in (EvernearError, RequestValidationError, StarletteHTTPException):
        app.add_exception_handler(error, _refuse)
    app.include_router(router)
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


TheService = Annotated[Service, Depends(_service)]


Responses = dict[int | str, dict[str, Any]]
ANSWERED: Responses = {200: {"content": {"application/json": {"example": EXAMPLE_PREDICTION}}}}
DOWN: Responses = {
    503: {"model": Refusal, "description": "The predictor is down, or its release is not known here."},
    504: {"model": Refusal, "description": "The predictor takes too long."},
}
REFUSED: Responses = {
    400: {"model": Refusal, "description": "The image cannot be used."},
    413: {"model": Refusal, "description": "The request is too large."},
    422: {"model": Refusal, "description": "The request is not the JSON that is wanted."},
}
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


@router.post("/predict", responses=ANSWERED | REFUSED)
async def predict(request: ImageRequest, service: TheService) -> Prediction:
    """What an image shows, with its nearest neighbours."""
    return await service.predict(_decoded(request))


@router.post("/predict/label", responses=REFUSED)
async def predict_label(request: ImageRequest, service: TheService) -> Label:
    """What an image shows, as a label alone."""
    return _label(await service.predict(_decoded(request)))


@router.get("/metrics", include_in_schema=False)
async def metrics(service: TheService) -> Response:
    """For Prometheus."""
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _decoded(request: ImageRequest) -> bytes:
    try:
        return base64.b64decode(request.data, validate=True)
    except ValueError:
        raise DataError('The text under "data" is not base64.') from None


def _label(prediction: Prediction) -> Label:
    return Label(label=prediction.pred, unknown=prediction.unknown, version=prediction.version)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    """Every error as a `Refusal`, whoever raised it."""
    headers: dict[str, str] = {}
    match error:
        case StarletteHTTPException():
            status, message = error.status_code, str(error.detail)
            headers = dict(error.headers or {})
        case RequestValidationError():
            fault = error.errors()[0]
            where = ".".join(str(word) for word in fault["loc"])
            status, message = 422, f'The request is not {{"data": "<base64>"}}: {where}: {fault["msg"]}.'
        case DataError():
            status, message = 400, str(error)
        case Timeout():
            status, message = 504, str(error)
        case _:
            status, message = 503, str(error)
            if isinstance(error, LeftAlone):
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


class BoundedBody:
    """Stops reading a request's body where it is too large: what is declared, and what arrives without that."""

    def __init__(self, app: ASGIApp, max_size_bytes: int) -> None:
        self._app = app
        self._max_size_bytes = max_size_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass ``scope`` on, with a ``receive`` that counts."""
        declared = next((value for name, value in scope.get("headers", []) if name == b"content-length"), b"0")
        received = 0

        async def counted() -> Message:
            nonlocal received
            if int(declared) > self._max_size_bytes:
                raise self._too_large()
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_size_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted if scope["type"] == "http" else receive, send)

    def _too_large(self) -> HTTPException:
        sentence = f"The request is larger than the {self._max_size_bytes} bytes that are taken."
        return HTTPException(413, sentence, {"Connection": "close"})  # else uvicorn would read on to the end of it
