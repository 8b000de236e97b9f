"""The transformer of an InferenceService: decodes and resizes images as the release wants them, without torch.

::

    python -m evernear.serving.kserve.transformer --model_dir DIRECTORY --http_port 8180 --grpc_port 8181 \\
        --predictor_host 127.0.0.1:8081 --predictor_protocol grpc-v2

Images that cannot be read are refused here; the predictor sees only prepared ones. Its answers name their
release, and those of another one than the transformer's are never passed on.
"""

import argparse
import logging
from io import BytesIO
from typing import Any

import grpc
import httpx
import numpy as np
from grpc_interceptor.exceptions import (
    DeadlineExceeded,
    GrpcException,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from kserve import InferenceGRPCClient, InferResponse, Model
from PIL import Image
from pydantic import TypeAdapter

from evernear.data.preprocess import Pixels
from evernear.errors import SettingsError
from evernear.output import printable
from evernear.release.manifest import ReleaseManifest
from evernear.serving.kserve.messages import Images, Tensors, ask_v1, ask_v2, read_answers
from evernear.serving.kserve.model import ReleaseModel
from evernear.serving.kserve.server import arguments, predictor_of, run, serve
from evernear.serving.kserve.sources import manifest_of_release
from evernear.serving.messages import Prediction, Refusal

MAX_RECONNECT_BACKOFF_MS = 1000
_PREDICTIONS = TypeAdapter(list[Prediction])
_log = logging.getLogger("kserve")


class Transformer(ReleaseModel):
    """The release's preprocessing as a KServe model, in front of a predictor of the same release."""

    def __init__(self, manifest: ReleaseManifest, args: argparse.Namespace) -> None:
        super().__init__(manifest, args)
        self._predictor = predictor_of(args)
        self._client: InferenceGRPCClient | None = None

    async def can_answer(self) -> bool:
        """Whether the predictor answers a blank image, and is of this release."""
        blank = np.zeros((1, self.shape.height_px, self.shape.width_px, self.shape.channels), np.uint8)
        try:
            await self._ask(blank, None)
        except GrpcException as error:
            _log.warning("Not ready: %s", printable(str(error.details)))
            return False
        return True

    async def prepare(self, images: Images) -> list[Pixels | Refusal]:
        """The images as pixels (H, W, C) of uint8."""
        if not isinstance(images, list):
            raise InvalidArgument("Send image files; pixels are for the predictor.")
        return await self.decode(images)

    async def answer(
        self, prepared: list[Pixels | Refusal], headers: dict[str, str] | None
    ) -> list[Prediction | Refusal]:
        """Ask the predictor for those that could be read."""
        pixels = [image for image in prepared if not isinstance(image, Refusal)]
        predictions = iter(await self._ask(np.stack(pixels), headers) if pixels else [])
        return [image if isinstance(image, Refusal) else next(predictions) for image in prepared]

    def get_input_types(self) -> Tensors:
        """Image files alone."""
        return super().get_input_types()[:1]

    @property
    def _grpc_client(self) -> InferenceGRPCClient:
        """KServe's client, on a channel that tries again soon: by default a predictor that was away for a while
        stays away for up to two minutes more.
        """
        if self._client is None:
            self._client = InferenceGRPCClient(
                self._predictor.predictor_host,
                use_ssl=self._predictor.predictor_use_ssl,
                timeout=self._predictor.predictor_request_timeout_seconds,
                retries=self._predictor.predictor_request_retries,
                channel_args=[
                    ("grpc.max_send_message_length", -1),
                    ("grpc.max_receive_message_length", -1),
                    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
                ],
            )
        return self._client

    async def _ask(self, pixels: Pixels, headers: dict[str, str] | None) -> list[Prediction]:
        """The predictor's answers for pixels (N, H, W, C).

        Raises:
            Unavailable: it does not answer, or is not of this release.
            DeadlineExceeded: it takes too long.
            ResourceExhausted: the request is too large for it.
        """
        protocol = self._predictor.predictor_protocol
        # v1 has no tensors: a PNG keeps every pixel, and the predictor's own preprocessing leaves it as it is.
        request = (
            ask_v1([_png(each) for each in pixels])
            if protocol == "v1"
            else ask_v2(pixels, self.name, binary=protocol == "grpc-v2")
        )
        response = await self._call(request, headers)
        try:
            if isinstance(response, InferResponse):
                predictions = read_answers(response)
            else:
                predictions = _PREDICTIONS.validate_python(response["predictions"])
        except (ValueError, KeyError, TypeError):
            raise Unavailable("What answers as the predictor is no evernear release of this version.") from None
        self._require_same_release(predictions, len(pixels))
        return predictions

    async def _call(self, request: Any, headers: dict[str, str] | None) -> Any:
        host = self._predictor.predictor_host
        try:
            return await Model.predict(self, request, headers or {})
        except httpx.HTTPStatusError as error:
            raise _refused(error.response.status_code == 413, str(error)) from None
        except httpx.TimeoutException:
            raise _too_slow(host) from None
        except httpx.HTTPError as error:
            raise _unreachable(host, str(error)) from None
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _too_slow(host) from None
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise _unreachable(host, error.details() or "") from None
            raise _refused(error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error.details() or "") from None

    def _require_same_release(self, predictions: list[Prediction], count: int) -> None:
        ours, theirs = self.manifest.version, {prediction.version for prediction in predictions}
        if theirs != {ours}:
            raise Unavailable(
                f"The predictor answers with release {', '.join(sorted(theirs))}, but images are prepared for {ours}; "
                "wait for the rollout to end, or deploy both of one release."
            )
        if len(predictions) != count:
            raise Unavailable(f"The predictor gave {len(predictions)} answers for {count} images.")


def _png(pixels: Pixels) -> bytes:
    buffer = BytesIO()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _refused(too_large: bool, reason: str) -> GrpcException:
    """What the predictor refuses is never the client's image, which was prepared here."""
    if too_large:
        return ResourceExhausted("The prepared images are too large for the predictor; send fewer at once.")
    return Unavailable(f"The predictor refuses prepared images ({reason}).")


def _unreachable(host: str, reason: str) -> GrpcException:
    return Unavailable(f"The predictor at {host} cannot be reached ({reason}).")


def _too_slow(host: str) -> GrpcException:
    return DeadlineExceeded(f"The predictor at {host} takes too long.")


def main(args: argparse.Namespace) -> None:
    """Read the release's manifest, then listen."""
    if not args.predictor_host:
        raise SettingsError("The transformer needs --predictor_host HOST:PORT.")
    manifest = manifest_of_release(args)
    serve(Transformer(manifest, args), args)


if __name__ == "__main__":
    run(main, arguments("KServe transformer: prepares images for the predictor of the same release."))
