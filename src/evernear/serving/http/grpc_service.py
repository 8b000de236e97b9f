"""The Open Inference Protocol over gRPC."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from starlette.exceptions import HTTPException

from evernear.errors import EvernearError
from evernear.serving.http import open_inference, routes
from evernear.serving.http import open_inference_pb2 as pb
from evernear.serving.http.app import SHUTDOWN_TIMEOUT_S
from evernear.serving.http.service import Service, status_of
from evernear.serving.tracing import TRACE_FIELD, describe_response, request_span

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
MAX_RPCS = 64
"""Maximum number of concurrent calls, each with a message of up to the maximum size."""
_STATUS = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 413: "RESOURCE_EXHAUSTED", 504: "DEADLINE_EXCEEDED"}
"""For all other errors, UNAVAILABLE."""


async def start_grpc(service: Service, address: str, max_request_size_bytes: int) -> Callable[[], Awaitable[None]]:
    """Answer calls. Returns a function that stops, and lets calls in flight finish."""
    server = grpc.aio.server(
        maximum_concurrent_rpcs=MAX_RPCS, options=[("grpc.max_receive_message_length", max_request_size_bytes)]
    )
    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            _answered(
                service, method.name, answer, getattr(pb, method.input_type.name), getattr(pb, method.output_type.name)
            ),
            response_serializer=getattr(pb, method.output_type.name).SerializeToString,
        )
        for method, answer in zip(SERVICE.methods, _methods(service), strict=True)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    server.add_insecure_port(address)
    await server.start()
    return lambda: server.stop(SHUTDOWN_TIMEOUT_S)


def _methods(service: Service) -> list[Callable[[Any], Awaitable[Any]]]:
    """What answers the methods of `SERVICE`, in their order: most as over REST."""

    async def infer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        parsed = open_inference.parse_grpc(request)
        release = await service.release(request.model_name, request.model_version)
        images = open_inference.images_of(
            parsed, release.preprocessing, service.max_images, pixels=service.backend.accepts_pixels
        )
        results = await service.recognize(images)
        return open_inference.grpc_response(parsed, request.model_name, release.version, results)

    return [
        lambda _: routes.live(),
        lambda _: routes.ready(service),
        lambda request: routes.model_ready(service, request.name, request.version),
        lambda _: routes.server(),
        lambda request: routes.model_metadata(service, request.name, request.version),
        infer,
    ]


def _answered(
    service: Service, name: str, method: Callable[[Any], Awaitable[Any]], request_type: Any, response_type: Any
) -> Callable[[bytes, Any], Awaitable[Any]]:
    """Parse the requests of a method, trace and count it, and convert its errors to statuses."""
    telemetry = service.telemetry

    async def call(request: bytes, context: Any) -> Any:
        parent = next((value for key, value in context.invocation_metadata() or () if key == TRACE_FIELD), "")
        with request_span(telemetry.tracer, parent) as span:
            response, status, reason = None, 200, ""
            try:
                response = await method(_parsed(request_type, request))
            except (EvernearError, HTTPException) as error:
                status, reason, _ = status_of(error)
            telemetry.requests.labels(name, status).inc()
            describe_response(span, "gRPC", name, status, getattr(response, "model_version", ""))
        if isinstance(response, dict):  # REST's answers have more fields
            return ParseDict(response, response_type(), ignore_unknown_fields=True)
        if response is None and name.endswith("Ready") and status == 503:
            return response_type(ready=False)
        if response is None:
            await context.abort(grpc.StatusCode[_STATUS.get(status, "UNAVAILABLE")], reason)
        return response

    return call


def _parsed(kind: Any, data: bytes) -> Any:
    """gRPC itself would answer a malformed message with a traceback in the log."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise open_inference.invalid(f"The message is no {kind.DESCRIPTOR.full_name}.") from None
