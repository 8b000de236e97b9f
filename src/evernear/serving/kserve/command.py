"""The command line of the predictor and the transformer."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from kserve import model_server
from kserve.predictor_config import PredictorConfig

from evernear.common.masking import mask_streams
from evernear.common.output import print_line
from evernear.errors import EvernearError
from evernear.serving.release_source import ReleaseSource
from evernear.settings import ServingSettings
from evernear.settings.prep import LARGE_DECODES, MAX_BODIES_SIZE_BYTES, UPLOAD_TIMEOUT_S
from evernear.settings.serving import MODEL_NAME, QUEUE_SIZE, RESPONSE_TIMEOUT_S

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
    """Run a program. An `EvernearError` is printed to stderr, and sets the exit code."""
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
