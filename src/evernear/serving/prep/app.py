"""HTTP API of the preprocessing server: routes, errors and metrics."""

import logging
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from operator import not_
from typing import Annotated, Any
from uuid import uuid4

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evernear import __version__
from evernear.common.output import log_fields
from evernear.errors import DataError, EvernearError, ServerTimeoutError, ServerUnreachableError
from evernear.serving.decoding import OverloadedError, pool_size_bytes
from evernear.serving.endpoints import listening_socket
from evernear.serving.http_limits import DrainingServer, limited_server
from evernear.serving.prep.service import PrepService, targets_of
from evernear.serving.request_parsing import RequestError, image_request_schema
from evernear.serving.responses import Metadata, Prediction, Rejection
from evernear.serving.tracing import TRACE_FIELD, describe_response, request_span, trace_id
from evernear.settings import Settings
from evernear.settings.serving import LARGE_DECODES, MAX_BODIES_SIZE_BYTES, UPLOAD_TIMEOUT_S

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger(__name__)

EXAMPLE_VERSION = "20261120.162250.af2fb66c"
EXAMPLE_PREDICTION = {
    "pred": "7",
    "dist": 0.399,
    "unknown": False,
    "neighbors": [{"label": "7", "dist": 0.399, "row": 212}, {"label": "7", "dist": 0.441, "row": 31}],
    "version": EXAMPLE_VERSION,
    "id": "7f7c4f0e-7b1c-4c8e-9d8e-0a3c8f0d9f1a",
}


class Label(BaseModel):
    """Only the label. For an unknown image, the label is only a guess."""

    label: str = Field(examples=["7"])
    unknown: bool = Field(examples=[False])
    version: str = Field(examples=[EXAMPLE_VERSION])
    id: str = Field(default="", exclude_if=not_, examples=[EXAMPLE_PREDICTION["id"]])


class Labels(BaseModel):
    """All labels of the live release."""

    labels: tuple[str, ...] = Field(examples=[["0", "1", "2"]])
    version: str = Field(examples=[EXAMPLE_VERSION])


class Health(BaseModel):
    """The response if this server and the predictor are ready and use the same release."""

    status: str = Field(default="ok", examples=["ok"])
    version: str = Field(examples=[EXAMPLE_VERSION])


def create_app(settings: Settings) -> FastAPI:
    """The application creates its `PrepService` at startup."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        app.state.service = PrepService(settings)
        try:
            yield
        finally:
            await app.state.service.close()

    app = FastAPI(
        title="evernear preprocessing server",
        description="Prepares images as the live release prescribes, and has TorchServe recognize them.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
    )
    app.add_middleware(RequestLog)
    for error in (EvernearError, HTTPException):
        app.add_exception_handler(error, _error_response)
    app.include_router(router)
    return app


async def _service(request: Request) -> PrepService:  # FastAPI runs a plain function in a thread
    return request.app.state.service


CurrentService = Annotated[PrepService, Depends(_service)]
Responses = dict[int | str, dict[str, Any]]
PREDICTED: Responses = {200: {"content": {"application/json": {"example": EXAMPLE_PREDICTION}}}}
UNAVAILABLE: Responses = {
    503: {"model": Rejection, "description": "The predictor or this server is busy or down; see Retry-After."},
    504: {"model": Rejection, "description": "The predictor takes too long."},
}
REJECTED: Responses = {
    400: {"model": Rejection, "description": "The image cannot be used."},
    408: {"model": Rejection, "description": "The request arrives too slowly."},
    413: {"model": Rejection, "description": "The request is too large."},
    422: {"model": Rejection, "description": "The request is not the expected JSON."},
}
IMAGE_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": image_request_schema()}}}}
router = APIRouter(responses=UNAVAILABLE)


@router.get("/health")
async def health(service: CurrentService) -> Health:
    """Succeed if this server and its predictor can recognize an image."""
    return Health(version=(await service.live_release()).version)


@router.get("/metadata")
async def metadata(service: CurrentService) -> Metadata:
    """Describe the live release."""
    return await service.metadata()


@router.get("/label")
async def labels(service: CurrentService) -> Labels:
    """List all labels of the live release."""
    release = await service.live_release()
    return Labels(labels=release.labels, version=release.version)


@router.get("/predict/test", responses=PREDICTED)
async def predict_test(request: Request, service: CurrentService) -> Prediction:
    """Recognize a test image that is stored in the release."""
    return _record_release(request, await service.test())


@router.get("/predict/test/label")
async def predict_test_label(request: Request, service: CurrentService) -> Label:
    """Recognize a test image that is stored in the release. Returns only the label."""
    return _label(_record_release(request, await service.test()))


@router.post("/predict", responses=PREDICTED | REJECTED, openapi_extra=IMAGE_BODY)
async def predict(request: Request, service: CurrentService) -> Prediction:
    """Recognize an image. Returns the image's label and nearest neighbors."""
    return _record_release(request, await service.predict(await _body(request)))


@router.post("/predict/label", responses=REJECTED, openapi_extra=IMAGE_BODY)
async def predict_label(request: Request, service: CurrentService) -> Label:
    """Recognize an image. Returns only the label."""
    return _label(_record_release(request, await service.predict(await _body(request))))


@router.get("/metrics", include_in_schema=False)
async def metrics(service: CurrentService) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _body(request: Request) -> bytes:
    """`Request.body` would keep the body in memory until the response is sent."""
    return b"".join([part async for part in request.stream()])


def _record_release(request: Request, prediction: Prediction) -> Prediction:
    """Record the release that made a prediction for the request log."""
    request.state.release = prediction.version
    return prediction


def _label(prediction: Prediction) -> Label:
    return Label(label=prediction.pred, unknown=prediction.unknown, version=prediction.version, id=prediction.id)


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    """Convert any error to a response with a `Rejection`."""
    message, headers = str(error), {}
    match error:
        case HTTPException():
            status, message, headers = error.status_code, str(error.detail), dict(error.headers or {})
        case RequestError():
            status = HTTPStatus.UNPROCESSABLE_ENTITY.value
        case DataError():
            status = HTTPStatus.BAD_REQUEST.value
        case ServerTimeoutError():
            status = HTTPStatus.GATEWAY_TIMEOUT.value
        case _:
            status = HTTPStatus.SERVICE_UNAVAILABLE.value
            match error:
                case OverloadedError():
                    headers = {"Retry-After": str(error.retry_after_s)}
                case ServerUnreachableError():
                    headers = {"Retry-After": "1"}
                case _:
                    pass
    rejection = Rejection(code=status, type=HTTPStatus(status).phrase.replace(" ", ""), message=message)
    return JSONResponse(rejection.model_dump(), status, headers)


class RequestLog:
    """ASGI middleware that counts requests by route and status, and logs predictions.

    The id is the client's ``X-Request-Id`` if it is short and printable, otherwise a new one. The
    response repeats it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid4().hex

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                # The metric label is the route: with the path, clients could create an unlimited
                # number of time series.
                path = scope["route"].path if "route" in scope else "other"
                service: PrepService = scope["app"].state.service
                service.metrics.requests.labels(path, message["status"]).inc()
                release = scope.get("state", {}).get("release", "")
                describe_response(span, scope["method"], path, message["status"], release)
                if path.startswith("/predict"):
                    self._log_prediction(scope, path, message["status"], time.monotonic() - started_s)
            await send(message)

        tracer, parent = scope["app"].state.service.tracer, headers.get(TRACE_FIELD, "")
        with (
            request_span(tracer, parent, **{"evernear.request": request_id}) as span,
            log_fields(request=request_id, trace=trace_id(span)),
        ):
            await self._app(scope, receive, counting_send)

    @staticmethod
    def _log_prediction(scope: Scope, path: str, status: int, duration_s: float) -> None:
        release = scope.get("state", {}).get("release", "")
        with log_fields(release=release, path=path, status=status, duration_s=round(duration_s, 4)):
            _log.info("%s %s: %d", scope["method"], path, status)


SHUTDOWN_TIMEOUT_S = 30
PROCESS_SIZE_BYTES = 128 * 2**20
"""Memory before the first request: 97 MiB (``benchmarks/hostile_traffic.py``), rounded up."""


def serve_prep(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish in-flight requests."""
    targets_of(settings)
    with listening_socket(settings.prep.host, settings.prep.port, "prep.port") as listener:
        create_server(settings).run(sockets=[listener])


def create_server(settings: Settings) -> uvicorn.Server:
    """The caller runs the server with listening sockets."""
    return limited_server(
        create_app(settings),
        max_size_bytes=settings.prep.max_request_size_bytes,
        upload_timeout_s=UPLOAD_TIMEOUT_S,
        shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
        server=DrainingServer,
    )


def prep_memory_size_bytes(settings: Settings) -> int:
    """The most memory that the server uses: its pod's memory limit must not be lower. Each request
    body is in memory twice: as received, and after base64 decoding."""
    decoding = pool_size_bytes(LARGE_DECODES, settings.serving.max_pixels)
    return PROCESS_SIZE_BYTES + decoding + 2 * MAX_BODIES_SIZE_BYTES
