"""An InferenceService's transformer decodes and resizes images for the predictor, without torch.

::

    python -m evernear.serving.kserve.transformer --model_dir DIRECTORY --http_port 8180 --grpc_port 8181 \\
        --predictor_host 127.0.0.1:8081 --predictor_protocol grpc-v2

It rejects unreadable images, so the predictor receives only prepared ones. Predictions name their
release. The transformer never returns those of a different one.
"""  # noqa: W505

import argparse
import logging
import os
import ssl
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import numpy as np
from grpc_interceptor.exceptions import DeadlineExceeded, GrpcException, InvalidArgument, ResourceExhausted, Unavailable
from kserve import InferenceGRPCClient, InferenceRESTClient, InferResponse, Model
from kserve import model as kserve_model
from kserve.inference_client import RESTConfig
from kserve.predictor_config import PredictorConfig
from pydantic import TypeAdapter

from evernear.common.output import printable, quantity
from evernear.data.preprocess import Pixels
from evernear.errors import SettingsError
from evernear.release.manifest import ReleaseManifest
from evernear.serving.client.grpc import Addresses, channel_options
from evernear.serving.decoding import encode_png
from evernear.serving.kserve.model import ReleaseModel
from evernear.serving.kserve.protocols import Images, Tensors, parse_response, v1_request, v2_request
from evernear.serving.kserve.server import arguments, predictor_config, release_source, run_command, serve_kserve
from evernear.serving.responses import Prediction, Rejection
from evernear.serving.tracing import TRACE_FIELD, trace_fields

CONNECT_TIMEOUT_S = 1.0
"""Timeout for each REST connection attempt. A failed one is retried."""
# KServe 0.21 does not forward trace headers to the predictor.
kserve_model._FORWARDABLE_HEADERS |= {TRACE_FIELD}  # pyright: ignore[reportPrivateUsage]
_PREDICTIONS = TypeAdapter(list[Prediction])
_log = logging.getLogger("kserve")


class TransformerModel(ReleaseModel):
    """Preprocesses images and forwards them to a predictor with the same release."""

    service = "evernear-transformer"
    spans = ("transform", "prepare", "call predictor")

    def __init__(self, manifest: ReleaseManifest, args: argparse.Namespace) -> None:
        super().__init__(manifest, args)
        self._predictor = predictor_config(args)
        self._addresses = Addresses(*_host_and_port(self._predictor))
        self._client: tuple[str, InferenceGRPCClient | None] = "", None
        self._rest_client: InferenceRESTClient | None = None

    async def can_predict(self) -> bool:
        """Whether the predictor recognizes a blank image with this release."""
        blank = np.zeros((1, self.shape.height_px, self.shape.width_px, self.shape.channels), np.uint8)
        try:
            await self._request_predictions(blank, None)
        except GrpcException as error:
            _log.warning("Not ready: %s", printable(str(error.details)))
            return False
        return True

    async def prepare(self, images: Images) -> list[Pixels | Rejection]:
        """Decode image files to uint8 arrays of shape (H, W, C)."""
        if not isinstance(images, list):
            raise InvalidArgument("Send image files; only the predictor accepts pixels.")
        return await self.decode(images)

    async def recognize(
        self, prepared: list[Pixels | Rejection], headers: dict[str, str] | None
    ) -> list[Prediction | Rejection]:
        """Request predictions for the images that were decoded successfully."""
        pixels = [image for image in prepared if not isinstance(image, Rejection)]
        predictions = iter(await self._request_predictions(np.stack(pixels), headers) if pixels else [])
        return [image if isinstance(image, Rejection) else next(predictions) for image in prepared]

    def get_input_types(self) -> Tensors:
        """A transformer accepts only image files."""
        return super().get_input_types()[:1]

    @property
    def _http_client(self) -> InferenceRESTClient:
        """KServe's REST client without the environment's proxy, which leads out of the cluster."""
        if self._rest_client is None:
            authorities = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
            verify = ssl.create_default_context(cafile=authorities) if authorities else True
            retries = self._predictor.predictor_request_retries
            self._rest_client = InferenceRESTClient(
                RESTConfig(
                    # httpx ignores proxies if a transport is set.
                    transport=httpx.AsyncHTTPTransport(verify=verify, retries=retries),
                    protocol=self._predictor.predictor_protocol,
                    timeout=httpx.Timeout(self._predictor.predictor_request_timeout_seconds, connect=CONNECT_TIMEOUT_S),
                    retries=retries,
                )
            )
        return self._rest_client

    @property
    def _grpc_client(self) -> InferenceGRPCClient:
        """KServe's gRPC client for the predictor's current addresses. Only calls in flight still
        reference an earlier client, which closes when the last of them completes."""
        address, client = self._client
        if client is None or address != self._addresses.target:
            address, config = self._addresses.target, self._predictor
            client = InferenceGRPCClient(
                address,
                use_ssl=config.predictor_use_ssl,
                timeout=config.predictor_request_timeout_seconds,
                channel_args=[
                    ("grpc.max_send_message_length", -1),
                    ("grpc.max_receive_message_length", -1),
                    *channel_options(config.predictor_host, config.predictor_request_retries + 1),
                ],
            )
            self._client = address, client
        return client

    async def _request_predictions(self, pixels: Pixels, headers: dict[str, str] | None) -> list[Prediction]:
        """Request predictions from the predictor for ``pixels`` of shape (N, H, W, C).

        Raises:
            Unavailable: the predictor is unreachable, or serves a different release.
            DeadlineExceeded: the predictor does not respond in time.
            ResourceExhausted: the request is too large for the predictor.
        """
        protocol = self._predictor.predictor_protocol
        # v1 has no tensors. PNG is lossless, and the predictor's preprocessing does not change
        # images that are already prepared.
        request = (
            v1_request([encode_png(image) for image in pixels])
            if protocol == "v1"
            else v2_request(pixels, self.name, binary=protocol == "grpc-v2")
        )
        response = await self._call(request, headers)
        try:
            if isinstance(response, InferResponse):
                predictions = parse_response(response)
            else:
                predictions = _PREDICTIONS.validate_python(response["predictions"])
        except (ValueError, KeyError, TypeError):
            raise Unavailable("The predictor is not an evernear release of a compatible version.") from None
        self._require_same_release(predictions, len(pixels))
        return predictions

    async def _call(self, request: Any, headers: dict[str, str] | None) -> Any:
        host = self._predictor.predictor_host
        trace = {name: value.decode() for name, value in trace_fields().items()}
        try:
            return await Model.predict(self, request, (headers or {}) | trace)
        except httpx.HTTPStatusError as error:
            raise _rejected(error.response.status_code == 413, str(error)) from None
        except httpx.TimeoutException:
            raise _too_slow(host) from None
        except httpx.HTTPError as error:
            raise _unreachable(host, str(error)) from None
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _too_slow(host) from None
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise _unreachable(host, error.details() or "") from None
            raise _rejected(error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error.details() or "") from None

    def _require_same_release(self, predictions: list[Prediction], count: int) -> None:
        version, versions = self.manifest.version, {prediction.version for prediction in predictions}
        if versions != {version}:
            raise Unavailable(
                f"The predictor answers with release {', '.join(sorted(versions))}, but images are prepared for "
                f"{version}; wait for the rollout to end, or deploy the same release to both."
            )
        if len(predictions) != count:
            raise Unavailable(
                f"The predictor returned {quantity(len(predictions), 'prediction')} for {quantity(count, 'image')}."
            )


def _host_and_port(predictor: PredictorConfig) -> tuple[str, int]:
    """Without a port in ``--predictor_host``, the default port of HTTP or HTTPS."""
    url = urlsplit(f"//{predictor.predictor_host}")
    return url.hostname or "", url.port or (443 if predictor.predictor_use_ssl else 80)


def _rejected(too_large: bool, reason: str) -> GrpcException:
    """The predictor rejected prepared images, so the client's images are not to blame."""
    if too_large:
        return ResourceExhausted("The prepared images are too large for the predictor; send fewer per request.")
    return Unavailable(f"The predictor rejects prepared images ({reason}).")


def _unreachable(host: str, reason: str) -> GrpcException:
    return Unavailable(f"The predictor at {host} cannot be reached ({reason}).")


def _too_slow(host: str) -> GrpcException:
    return DeadlineExceeded(f"The predictor at {host} takes too long.")


def main(args: argparse.Namespace) -> None:
    """Read the release manifest, then serve requests."""
    if not args.predictor_host:
        raise SettingsError("The transformer needs --predictor_host HOST:PORT.")
    serve_kserve(TransformerModel(release_source(args).manifest(), args), args)


if __name__ == "__main__":
    run_command(main, arguments("KServe transformer: prepares images for the predictor of the same release."))
