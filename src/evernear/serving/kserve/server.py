"""A hardened KServe model server.

By default, KServe 0.21 listens on all addresses, accepts bodies of any size, and lets anyone unload
the model through ``/v2/repository``. A malformed request gets status 500 and logs a traceback.
"""

import argparse
import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from struct import error as StructError
from typing import Any, cast

import grpc
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from grpc_interceptor.exceptions import GrpcException, InvalidArgument, PermissionDenied
from kserve import ModelServer, model_server
from kserve.errors import InferenceError
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.interceptors import ExceptionToStatusInterceptor
from kserve.protocol.grpc.server import GRPCServer
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.server import RESTServer
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from evernear.errors import ServingError, SettingsError
from evernear.serving.endpoints import create_listener, host_and_port
from evernear.serving.http_limits import BodyLimits
from evernear.serving.kserve.command import predictor_config
from evernear.serving.kserve.http_protocol import LimitedHttpProtocol
from evernear.serving.kserve.model import ReleaseModel
from evernear.serving.kserve.predictions import Predictions
from evernear.serving.kserve.protocols import require_few_tensors, require_uncompressed

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
            self.servers.append(self._grpc_server.start(self.max_threads))
        self.register_signal_handler()
        with asyncio.Runner(loop_factory=rest.config.get_loop_factory()) as runner:
            runner.run(self._serve())


class _RestServer(RESTServer):
    listener: socket.socket
    timed = False

    def _add_middlewares(self, app: FastAPI) -> None:
        if self.timed:  # timing logs at level INFO and costs as much as a small prediction
            super()._add_middlewares(app)

    async def start(self) -> None:
        self.create_application()
        await self._server.serve(sockets=[self.listener])


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
