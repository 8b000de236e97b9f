"""Start the containers of an InferenceService."""

import argparse
import logging
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evernear.common.output import log_to_stderr
from evernear.common.processes import exempt_loaded_objects
from evernear.serving.client import Target
from evernear.serving.endpoints import host_and_port, listening_socket
from evernear.serving.http.app import create_server
from evernear.serving.http.grpc_service import start_grpc
from evernear.serving.http.limits import require_usable_tls
from evernear.serving.http.pods import V1, V2, GrpcV2, Pod
from evernear.serving.http.remote import Releases, Remote
from evernear.serving.http.service import MAX_IMAGES, Service
from evernear.serving.http.telemetry import Telemetry
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

MAX_TIMEOUT_S = 3600.0
MAX_MESSAGE_BYTES = 2**31 - 1  # of gRPC
MakeBackend = Callable[[Telemetry], Any]
"""Creates the backend in the event loop of the server."""


def arguments() -> argparse.ArgumentParser:
    """The arguments with the names of KServe's SDK, and those that specify the release and the
    limits."""
    parser = argparse.ArgumentParser(
        prog="python -m evernear.serving.http",
        description="A container of an InferenceService: the predictor, or with --predictor_host its transformer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, serving = parser.add_argument, ServingSettings()
    port, count = _number(int, 1, 65535), _number(int, 1)
    seconds = _number(float, 0.001, MAX_TIMEOUT_S)
    boolean: dict[str, Any] = {"type": str.lower, "choices": ("true", "false")}
    add("--model_name", default=MODEL_NAME, help="Name of the model in URLs.")
    add("--model_dir", "--model-dir", default="/mnt/models", help="A .mar, or a directory with one.")
    add("--store", default="", help="Registry to use instead: s3://bucket/prefix, file:///path.")
    add("--release", default="", help="Version in --store; if empty, the champion.")
    add("--host", default=serving.host, help="Address to bind; 0.0.0.0 in a pod.")
    add("--http_port", type=port, default=8080, help="Port of REST.")
    add("--grpc_port", type=port, default=8081, help="Port of gRPC.")
    add("--enable_grpc", default="true", **boolean, help="Whether to serve gRPC.")
    add("--ssl_certfile", type=Path, default=None, help="Certificate of REST, in PEM.")
    add("--ssl_keyfile", type=Path, default=None, help="Private key of the certificate.")
    add("--predictor_host", type=_address, default=None, help="Host and port of the predictor to call.")
    add("--predictor_protocol", choices=("v1", "v2", "grpc-v2"), default="v1", help="Protocol for calling it.")
    add("--predictor_use_ssl", default="false", **boolean, help="Whether to use TLS to the predictor.")
    add("--predictor_request_timeout_seconds", type=seconds, default=RESPONSE_TIMEOUT_S, help="Time for its answer.")
    add(
        "--predictor_request_retries",
        type=_number(int, 0),
        default=0,
        help="Further attempts to connect to the predictor.",
    )
    add(
        "--max_request_size_bytes",
        type=_number(int, 1, MAX_MESSAGE_BYTES),
        default=serving.max_request_size_bytes,
        help="Size of a request.",
    )
    add("--max_images", type=count, default=MAX_IMAGES, help="Images in one request.")
    add("--batch_size", type=count, default=serving.batch_size, help="Images of concurrent requests in a batch.")
    add("--queue_size", type=count, default=QUEUE_SIZE, help="Images that may wait; further requests get 503.")
    add("--max_pixels", type=count, default=serving.max_pixels, help="Pixels of an image; the release may allow fewer.")
    add("--max_bodies_size_bytes", type=count, default=MAX_BODIES_SIZE_BYTES, help="Size of all bodies in flight.")
    add("--upload_timeout_seconds", type=seconds, default=UPLOAD_TIMEOUT_S, help="Time limit for receiving a body.")
    add("--enable_access_log", action="store_true", help="Log each prediction.")
    add("--large_decodes", type=count, default=LARGE_DECODES, help="Concurrent decodes of images above a megapixel.")
    return parser


def serve_container(args: argparse.Namespace) -> None:
    """Load the release, then serve until SIGTERM or SIGINT, and finish in-flight requests."""
    require_usable_tls({"--ssl_certfile": args.ssl_certfile, "--ssl_keyfile": args.ssl_keyfile})
    log_to_stderr(logging.INFO if args.enable_access_log else logging.WARNING, "text")
    role = "transformer" if args.predictor_host else "predictor"
    make_backend = _remote(args) if args.predictor_host else _local(args)

    @asynccontextmanager
    async def open_service() -> AsyncGenerator[Service]:
        telemetry = Telemetry(role, args.model_name)
        async with aclosing(make_backend(telemetry)) as backend:
            service = Service(backend, telemetry, args.model_name, args.max_images)
            if args.enable_grpc == "true":
                address = host_and_port(args.host, args.grpc_port)
                server.stop_others = await start_grpc(service, address, args.max_request_size_bytes)
            yield service

    server = create_server(
        open_service,
        f"evernear {role}",
        max_size_bytes=args.max_request_size_bytes,
        max_total_size_bytes=args.max_bodies_size_bytes,
        upload_timeout_s=args.upload_timeout_seconds,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
    )
    if args.enable_grpc == "true":
        listening_socket(args.host, args.grpc_port, "--grpc_port").close()
    with listening_socket(args.host, args.http_port, "--http_port") as listener:
        exempt_loaded_objects()
        server.run(sockets=[listener])


def _local(args: argparse.Namespace) -> MakeBackend:
    from evernear.serving.core import Predictor
    from evernear.serving.http.local import Local

    with _source(args).unpacked() as release:
        predictor = Predictor.open(release)
        test_image = release.smoke_queries()[0][0]
    limits = (args.max_pixels, args.large_decodes)
    return lambda telemetry: Local(predictor, test_image, telemetry, limits, args.batch_size, args.queue_size)


def _remote(args: argparse.Namespace) -> MakeBackend:
    releases, timeout_s = Releases(_source(args), follow=False), args.predictor_request_timeout_seconds
    limits = (args.max_pixels, args.large_decodes)
    return lambda telemetry: Remote([_pod(args)], releases, telemetry, limits, timeout_s)


def _pod(args: argparse.Namespace) -> Pod:
    """Without a port in ``--predictor_host``, the default port of HTTP or HTTPS."""
    host, port = args.predictor_host
    target = Target(
        host=host,
        port=port or (443 if args.predictor_use_ssl == "true" else 80),
        model=args.model_name,
        tls=args.predictor_use_ssl == "true",
        timeout_s=args.predictor_request_timeout_seconds,
        attempts=args.predictor_request_retries + 1,
    )
    return {"v1": V1, "v2": V2, "grpc-v2": GrpcV2}[args.predictor_protocol](target)


def _address(text: str) -> tuple[str, int | None] | None:
    """A host and its port, or None without a host."""
    with suppress(ValueError):  # the port is no number
        url = urlsplit(f"//{text}")
        if url.netloc == text:
            return (url.hostname, url.port) if url.hostname else None
    raise argparse.ArgumentTypeError(f"{text!r} is not HOST or HOST:PORT")


def _number(kind: Callable[[str], float], lowest: float, highest: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with suppress(ValueError):
            if lowest <= (value := kind(text)) <= highest:
                return value
        bounds = f"of at least {lowest}" if math.isinf(highest) else f"from {lowest} to {highest}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")

    return parse


def _source(args: argparse.Namespace) -> ReleaseSource:
    return ReleaseSource(args.store, args.release, Path(args.model_dir))
