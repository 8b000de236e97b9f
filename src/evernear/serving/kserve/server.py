"""A hardened KServe model server.

By default, KServe 0.21 listens on all addresses, accepts bodies of any size, and lets anyone unload
the model through ``/v2/repository``. A malformed request gets status 500 and logs a traceback.
"""

import argparse
import asyncio
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import error as StructError
from typing import Any, cast

import grpc
import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from grpc_interceptor.exceptions import GrpcException, InvalidArgument, PermissionDenied
from kserve import ModelServer, model_server
from kserve.constants.constants import PredictorProtocol
from kserve.errors import InferenceError, ModelNotReady
from kserve.predictor_config import PredictorConfig
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.interceptors import ExceptionToStatusInterceptor
from kserve.protocol.grpc.server import GRPCServer
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.server import RESTServer, _RefreshingServer  # pyright: ignore[reportPrivateUsage]
from kserve.protocol.rest.v1_endpoints import V1Endpoints
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from evernear.common.masking import mask_streams
from evernear.common.output import print_line
from evernear.errors import EvernearError, ServingError, SettingsError
from evernear.serving.endpoints import create_listener, host_and_port
from evernear.serving.http_limits import BodyLimits, DrainingServer
from evernear.serving.kserve.http_protocol import ON_DISCONNECT, LimitedHttpProtocol
from evernear.serving.kserve.model import ReleaseModel
from evernear.serving.kserve.protocols import parse_infer_request, require_few_tensors, require_uncompressed
from evernear.serving.release_source import ReleaseSource
from evernear.settings import ServingSettings
from evernear.settings.serving import (
    LARGE_DECODES,
    MAX_BODIES_SIZE_BYTES,
    MODEL_NAME,
    QUEUE_SIZE,
    RESPONSE_TIMEOUT_S,
    UPLOAD_TIMEOUT_S,
)

MAX_IMAGES = 1024
"""Maximum number of images in one request, because a tiny file can decode to a large array."""


def arguments(description: str) -> argparse.ArgumentParser:
    """KServe's own arguments, and those that specify the release and the limits."""
    parser = argparse.ArgumentParser(
        parents=[model_server.parser],
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    serving = ServingSettings()
    parser.set_defaults(
        enable_latency_logging=False,  # the metrics have the same figures, and logging them delays each response
        model_name=MODEL_NAME,
        predictor_request_timeout_seconds=RESPONSE_TIMEOUT_S,
        grpc_max_receive_message_length=serving.max_request_size_bytes,
    )
    add = parser.add_argument
    add("--host", default=serving.host, help="Address to bind; 0.0.0.0 in a pod.")
    add("--model_dir", "--model-dir", default="/mnt/models", help="A .mar, or a directory with one.")
    add("--store", default="", help="Registry to use instead: s3://bucket/prefix, file:///path.")
    add("--release", default="", help="Version in --store; if empty, the champion.")
    add("--max_request_size_bytes", type=int, default=serving.max_request_size_bytes, help="Size of a body.")
    add("--max_images", type=int, default=MAX_IMAGES, help="Images in one request.")
    add("--batch_size", type=int, default=serving.batch_size, help="Images of concurrent requests in a batch.")
    add("--queue_size", type=int, default=QUEUE_SIZE, help="Images that may wait; further requests get 503.")
    add("--max_pixels", type=int, default=serving.max_pixels, help="Pixels of an image; the release may allow fewer.")
    add("--max_bodies_size_bytes", type=int, default=MAX_BODIES_SIZE_BYTES, help="Size of all bodies in flight.")
    add("--upload_timeout_seconds", type=float, default=UPLOAD_TIMEOUT_S, help="Time limit for receiving a body.")
    add("--enable_access_log", action="store_true", help="Log each request, which delays its answer by 0.2 ms.")
    add("--large_decodes", type=int, default=LARGE_DECODES, help="Concurrent decodes of images above a megapixel.")
    return parser


def run_command(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Run a program. An `EvernearError` is printed to stderr, and sets the exit code.

    SIGTERM ends it at any time: uvicorn handles the signal while it serves, and raises it again
    afterwards. The kernel ignores it in process 1, which has no handler of its own before.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    mask_streams()
    try:
        main(parser.parse_args())
    except EvernearError as error:
        print_line(f"evernear: {error}", sys.stderr)
        sys.exit(error.exit_code)


def release_source(args: argparse.Namespace) -> ReleaseSource:
    return ReleaseSource(args.store, args.release, Path(args.model_dir))


def predictor_config(args: argparse.Namespace) -> PredictorConfig:
    """The configuration of the predictor that a transformer calls."""
    return PredictorConfig(
        predictor_host=args.predictor_host,
        predictor_protocol=args.predictor_protocol,
        predictor_use_ssl=args.predictor_use_ssl,
        predictor_request_timeout_seconds=args.predictor_request_timeout_seconds,
        predictor_request_retries=args.predictor_request_retries,
    )


MAX_RPCS = 64
"""Maximum number of concurrent gRPC calls, each with a message of up to the maximum size."""
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 413,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


def serve_kserve(model: ReleaseModel, args: argparse.Namespace) -> None:
    """Serve a loaded model until SIGTERM or SIGINT, then finish in-flight requests."""
    if args.workers != 1:
        raise SettingsError("--workers must be 1: a release is loaded once, and KServe scales by replicas.")
    _Server(args).start([model])


class _Server(ModelServer):
    """A `ModelServer` that listens on one address and enforces limits."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(
            http_port=args.http_port,
            grpc_port=args.grpc_port,
            enable_grpc=args.enable_grpc,
            enable_latency_logging=args.enable_latency_logging,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            predictor_config=predictor_config(args),
        )
        if not args.enable_access_log:
            logging.getLogger("uvicorn.access").handlers.clear()  # uvicorn then does not format the lines either
        self._args = args
        self.dataplane = _DataPlane(self.registered_models)
        self.model_repository_extension = _SealedRepository(self.registered_models)

    def start(self, models: list[Any]) -> None:
        """`ModelServer.start` has no parameter for the address."""
        self._register_and_check_atleast_one_model_is_ready(models)
        app = model_server.app
        app.add_exception_handler(GrpcException, _grpc_error_response)
        app.add_exception_handler(RequestValidationError, _validation_error_response)
        for status in (408, 413, 503):
            app.add_exception_handler(status, _http_error_response)
        predictions = Predictions(app, self.dataplane, self.model_repository_extension)
        listener = _listen(self._args.host, self.http_port)
        rest = _RestServer(
            "kserve.model_server:app",
            self.dataplane,
            self.model_repository_extension,
            self.http_port,
            access_log_format=self.access_log_format,
            grace_period=self.grace_period,
            timeout_keep_alive=self.timeout_keep_alive,
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
        )
        rest.listener = listener
        rest.timed = self._args.enable_latency_logging
        rest.config.app = BodyLimits(
            predictions,
            max_size_bytes=self._args.max_request_size_bytes,
            max_total_size_bytes=self._args.max_bodies_size_bytes,
            timeout_s=self._args.upload_timeout_seconds,
        )
        rest.config.http = LimitedHttpProtocol
        rest.config.ws = "none"
        self.servers = [rest.start()]
        if self.enable_grpc:
            _listen(self._args.host, self.grpc_port).close()
            self._grpc_server = _GrpcServer(
                self.grpc_port, self.dataplane, self.model_repository_extension, vars(self._args), self.grace_period
            )
            rest.grpc = self._grpc_server
            self.servers.append(self._grpc_server.start(self.max_threads))
        with asyncio.Runner(loop_factory=rest.config.get_loop_factory()) as runner:
            runner.run(self._serve())


class _RestServer(RESTServer):
    listener: socket.socket
    timed = False
    grpc: GRPCServer | None = None

    def _add_middlewares(self, app: FastAPI) -> None:
        if self.timed:  # timing logs at level INFO and costs as much as a small prediction
            super()._add_middlewares(app)

    async def start(self) -> None:
        self.create_application()
        self._server = _DrainingServer(self.config)
        self._server.grpc = self.grpc
        await self._server.serve(sockets=[self.listener])


class _DrainingServer(DrainingServer, _RefreshingServer):
    grpc: GRPCServer | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """REST and gRPC finish their requests at the same time, within one grace period."""
        others = [self.grpc.stop()] if self.grpc else []
        await asyncio.gather(super().shutdown(sockets), *others)


class _GrpcServer(GRPCServer):
    async def start(self, max_workers: int) -> None:
        self._server = grpc.aio.server(
            ThreadPoolExecutor(max_workers),
            interceptors=[ExceptionToStatusInterceptor()],
            maximum_concurrent_rpcs=MAX_RPCS,
            options=[
                (f"grpc.{name}", self._kwargs[f"grpc_{name}"])
                for name in ("max_send_message_length", "max_receive_message_length")
            ],
        )
        add_GRPCInferenceServiceServicer_to_server(
            _Servicer(self._data_plane, self._model_repository_extension), self._server
        )
        self._server.add_insecure_port(host_and_port(self._kwargs["host"], self._port))
        await self._server.start()
        await self._server.wait_for_termination()


class _Servicer(InferenceServicer):
    """Limits the number of tensors before it creates their objects."""

    @classmethod
    def validate_grpc_request(cls, request: ModelInferRequest) -> None:
        require_few_tensors(len(request.inputs), len(request.outputs))
        super().validate_grpc_request(request)


class _DataPlane(DataPlane):
    """Rejects requests that it cannot decode, and is ready only if its model can answer."""

    def decode(self, body: Any, headers: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if isinstance(body, bytes):
            require_uncompressed(body)
        try:
            return super().decode(body, headers, *args, **kwargs)
        except (InferenceError, LookupError, ValueError, TypeError, AttributeError, StructError) as error:
            raise InvalidArgument(f"The request cannot be read ({error}).") from None

    async def model_metadata(self, model_name: str) -> dict[str, Any]:
        model = cast(ReleaseModel, self.get_model_from_registry(model_name))
        return {**await super().model_metadata(model_name), "versions": [model.manifest.version]}

    async def ready(self) -> bool:
        models = cast(dict[str, ReleaseModel], self.model_registry.get_models())
        return bool(models) and all([await model.can_predict() for model in models.values()])

    async def model_ready(self, model_name: str, disable_predictor_health_check: bool = False) -> bool:
        model = cast(ReleaseModel, self.get_model_from_registry(model_name))
        # KServe also calls this before each request, which itself shows whether the model works.
        return model.ready if disable_predictor_health_check else await model.can_predict()


class _SealedRepository(ModelRepositoryExtension):
    """Requests can neither load nor unload a model. To change it, deploy a new release."""

    async def load(self, model_name: str) -> None:
        raise PermissionDenied("Models cannot be loaded by request; deploy another release.")

    async def unload(self, model_name: str) -> None:
        raise PermissionDenied("Models cannot be unloaded by request; stop the server.")


async def _grpc_error_response(_: Request, error: Exception) -> JSONResponse:
    rejection = cast(GrpcException, error)
    return JSONResponse({"error": rejection.details}, _HTTP_STATUS.get(rejection.status_code, 500))


async def _http_error_response(_: Request, error: Exception) -> JSONResponse:
    rejection = cast(HTTPException, error)
    return JSONResponse({"error": rejection.detail}, rejection.status_code, rejection.headers)


async def _validation_error_response(_: Request, error: Exception) -> JSONResponse:
    fault = cast(RequestValidationError, error).errors()[0]
    field = ".".join(str(part) for part in fault["loc"])
    sentence = f"The request does not conform to the Open Inference Protocol: {field}: {fault['msg']}."
    return JSONResponse({"error": sentence}, 400)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return create_listener(host, port)
    except OSError as error:
        raise ServingError(f"Port {port} on {host} cannot be bound: {error.strerror}; choose another one.") from None


_PATH = re.compile(r"/v1/models/([^/]+):predict|/v2/models/([^/]+)(/versions/[^/]+)?/infer")
_BINARY_HEADER = "inference-header-content-length"


class Predictions:
    """Answers prediction requests and passes all others to KServe's ASGI application.

    There, middleware, routing and parameter handling take more CPU time than a prediction, and its
    v2 endpoint needs 3 GB of memory for a request with 6 MB of errors.
    """

    def __init__(self, app: Starlette, dataplane: DataPlane, repository: ModelRepositoryExtension) -> None:
        self._app = app
        self._dataplane = dataplane
        self._v1 = V1Endpoints(dataplane, repository)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """When the client disconnects, the request is cancelled, as in `grpc.aio`."""
        path = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if path is None:
            await self._app(scope, receive, send)
            return
        client = _Client(cast(asyncio.Task[Any], asyncio.current_task()).cancel)
        scope[ON_DISCONNECT] = client.leave
        try:
            response = await self._answer(Request(scope, receive), *path.groups())
            await response(scope, receive, send)
        except asyncio.CancelledError:
            if client.present:
                raise

    async def _answer(self, request: Request, v1_model: str | None, v2_model: str, version: str | None) -> Response:
        try:
            return await (self._predict(request, v1_model) if v1_model else self._infer(request, v2_model, version))
        except Exception as error:
            handlers = cast(dict[Any, Any], self._app.exception_handlers)
            key = (
                error.status_code
                if isinstance(error, HTTPException)
                else next(kind for kind in type(error).__mro__ if kind in handlers)
            )
            return await handlers[key](request, error)

    async def _predict(self, request: Request, model_name: str) -> Response:
        return cast(Response, await self._v1.predict(model_name, request))

    async def _infer(self, request: Request, model_name: str, version: str | None) -> Response:
        dataplane, headers = self._dataplane, dict(request.headers)
        if not await dataplane.model_ready(model_name, True):
            raise ModelNotReady(model_name)
        body = await request.body()
        payload = body if _BINARY_HEADER in headers else parse_infer_request(body, model_name)
        if version:
            raise NotImplementedError("The model has one version; send the request to /v2/models/NAME/infer.")
        tensors, _ = dataplane.decode(payload, headers, PredictorProtocol.REST_V2.value, model_name)
        answer, _ = await dataplane.infer(model_name, tensors, headers)
        content, added = dataplane.encode(model_name, answer, headers, {})
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        return Response(body, headers=added, media_type="application/json")


class _Client:
    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self.present = True

    def leave(self) -> None:
        self.present = False
        self._cancel()
