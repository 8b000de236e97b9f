"""The routes of the application.

Images as files and in JSON, which ``/openapi.json`` documents, KServe's v1 protocol, and the Open
Inference Protocol (v2). v1 carries base64 in JSON. Each entry in the response is a prediction or an
error, so an invalid image does not affect the others::

    {"instances": [{"data": "<base64>"}, ...]}  ->  {"predictions": [<Prediction or Rejection>, ...]}
"""  # noqa: W505

from functools import partial
from operator import not_
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from starlette.routing import Route

from evernear import __version__
from evernear.errors import DataError
from evernear.serving.http import open_inference
from evernear.serving.http.decoder import Files
from evernear.serving.http.open_inference import HEADER_LENGTH, file_of, invalid, require_few_images
from evernear.serving.http.service import Service, parsed
from evernear.serving.request_parsing import compression, image_from_body, image_request_schema
from evernear.serving.responses import Metadata, Prediction, Rejection

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


async def _service(request: Request) -> Service:  # FastAPI runs a plain function in a thread
    return request.app.state.service


CurrentService = Annotated[Service, Depends(_service)]
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
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": image_request_schema()},
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
router = APIRouter(responses=UNAVAILABLE)
kserve_router = APIRouter(include_in_schema=False)


@router.get("/health")
async def health(service: CurrentService) -> Health:
    """Succeed if this server and its predictor can recognize an image."""
    return Health(version=(await service.backend.live_release()).version)


@router.get("/metadata")
async def metadata(service: CurrentService) -> Metadata:
    """Describe the live release."""
    return Metadata.of(await service.backend.live_release(), service.model)


@router.get("/label")
async def labels(service: CurrentService) -> Labels:
    """List all labels of the live release."""
    release = await service.backend.live_release()
    return Labels(labels=release.labels, version=release.version)


@router.get("/predict/test", responses=PREDICTED)
async def predict_test(request: Request, service: CurrentService) -> Prediction:
    """Recognize a test image that is stored in the release."""
    return await _recognize(request, service, await service.backend.test_image())


@router.get("/predict/test/label")
async def predict_test_label(request: Request, service: CurrentService) -> Label:
    """Recognize a test image that is stored in the release. Returns only the label."""
    return _label(await _recognize(request, service, await service.backend.test_image()))


@router.post("/predict", response_model=Prediction, responses=PREDICTED | REJECTED, openapi_extra=IMAGE_BODY)
async def predict(request: Request) -> Response:
    """Recognize an image. Returns the image's label and nearest neighbors."""
    return _json(await _recognize(request, await _service(request), await _image(request)))


@router.post("/predict/label", response_model=Label, responses=REJECTED, openapi_extra=IMAGE_BODY)
async def predict_label(request: Request) -> Response:
    """Recognize an image. Returns only the label."""
    return _json(_label(await _recognize(request, await _service(request), await _image(request))))


@router.get("/metrics", include_in_schema=False)
async def metrics(service: CurrentService) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(service.telemetry.registry), media_type=CONTENT_TYPE_LATEST)


@kserve_router.get("/")
async def alive() -> dict[str, str]:
    return {"status": "alive"}


@kserve_router.get("/v2")
async def server() -> dict[str, Any]:
    return {"name": "evernear", "version": __version__, "extensions": ["binary_tensor_data"]}


@kserve_router.get("/v2/health/live")
async def live() -> dict[str, bool]:
    return {"live": True}


@kserve_router.get("/v2/health/ready")
async def ready(service: CurrentService) -> dict[str, bool]:
    """Succeed if the server can recognize an image."""
    await service.backend.live_release()
    return {"ready": True}


@kserve_router.get("/v1/models")
@kserve_router.get("/v2/models")
async def models(service: CurrentService) -> dict[str, list[str]]:
    return {"models": [service.model]}


@kserve_router.get("/v2/models/{model}")
@kserve_router.get("/v2/models/{model}/versions/{version}")
async def model_metadata(service: CurrentService, model: str, version: str = "") -> dict[str, Any]:
    release = await service.release(model, version)
    return {"name": model, "versions": [release.version], "platform": ""} | open_inference.tensors(
        release, pixels=service.backend.accepts_pixels
    )


@kserve_router.get("/v1/models/{model}")
@kserve_router.get("/v2/models/{model}/ready")
@kserve_router.get("/v2/models/{model}/versions/{version}/ready")
async def model_ready(service: CurrentService, model: str, version: str = "") -> dict[str, Any]:
    """Succeed if the model can recognize an image."""
    await service.release(model)
    await service.backend.live_release()
    await service.release(model, version)
    return {"name": model, "ready": True}


async def predict_v1(request: Request) -> Response:
    service = await _service(request)
    release = await service.release(request.path_params["model"])
    files = await parsed(partial(_files_of, service.max_images), await _body(request))
    results = await service.recognize(files)
    request.state.release = release.version
    rejected = [result for result in results if isinstance(result, Rejection)]
    if rejected and len(rejected) == len(results):
        raise invalid(rejected[0].message)
    predictions = ",".join([result.model_dump_json() for result in results])
    return Response(f'{{"predictions":[{predictions}]}}', media_type="application/json")


async def infer(request: Request) -> Response:
    service, names, body = await _service(request), request.path_params, await _body(request)
    infer = await parsed(lambda body: open_inference.parse_rest(body, request.headers.get(HEADER_LENGTH)), body)
    release = await service.release(names["model"], names.get("version", ""))
    shape, pixels = release.preprocessing, service.backend.accepts_pixels
    images = await parsed(lambda _: open_inference.images_of(infer, shape, service.max_images, pixels=pixels), body)
    results = await service.recognize(images)
    request.state.release = release.version
    content, head_size = open_inference.rest_response(infer, service.model, release.version, results)
    if head_size is None:
        return Response(content, media_type="application/json")
    return Response(content, headers={HEADER_LENGTH: str(head_size)}, media_type="application/octet-stream")


KSERVE_PREDICTIONS = [
    Route("/v1/models/{model}:predict", predict_v1, methods=["POST"]),
    Route("/v2/models/{model}/infer", infer, methods=["POST"]),
    Route("/v2/models/{model}/versions/{version}/infer", infer, methods=["POST"]),
]
PREDICTIONS = [
    *KSERVE_PREDICTIONS,
    *(route for route in router.routes if isinstance(route, Route) and route.endpoint in (predict, predict_label)),
]
"""The routes that `evernear.serving.http.app` answers without FastAPI."""


async def _body(request: Request) -> bytes:
    """`Request.body` would keep the body in memory until the response is sent."""
    return b"".join([part async for part in request.stream()])


async def _image(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "").lower()
    return await parsed(partial(image_from_body, media_type), await _body(request))


async def _recognize(request: Request, service: Service, image: bytes) -> Prediction:
    """Recognize an image, and record the release that made the prediction for the request log."""
    (result,) = await service.recognize([image])
    if isinstance(result, Rejection):
        raise DataError(result.message)
    request.state.release = result.version
    return result


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _label(prediction: Prediction) -> Label:
    return Label(label=prediction.pred, unknown=prediction.unknown, version=prediction.version, id=prediction.id)


class _Instances(msgspec.Struct):
    instances: list[msgspec.Raw]


class _Instance(msgspec.Struct):
    data: str


_INSTANCES = msgspec.json.Decoder(_Instances)
_INSTANCE = msgspec.json.Decoder(_Instance)
_EXPECTED = 'send {"instances": [{"data": "<base64>"}]}.'


def _files_of(max_images: int, body: bytes) -> Files:
    if compressed := compression(body):
        raise invalid(compressed)
    try:
        instances = _INSTANCES.decode(body).instances
    except msgspec.ValidationError:
        raise invalid(f'The request has no list "instances"; {_EXPECTED}') from None
    except (ValueError, RecursionError):  # msgspec.DecodeError and UnicodeDecodeError are ValueErrors
        raise invalid(f"The request is not JSON; {_EXPECTED}") from None
    require_few_images(len(instances), max_images)
    return [_file_of(instance) for instance in instances]


def _file_of(instance: msgspec.Raw) -> bytes | Rejection:
    try:
        return file_of(_INSTANCE.decode(instance).data)
    except (ValueError, RecursionError):
        return Rejection(message='The instance has no text under "data".')
