"""Over HTTP: TorchServe's REST API, and the preprocessing server."""

import base64
import json
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import httpx
from pydantic import ValidationError

from evernear.errors import (
    PredictionRejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    ServingError,
    SettingsError,
)
from evernear.serving.client.target import Target, tls_context
from evernear.serving.messages import Metadata, Prediction, Refusal


class Http:
    """Ask over HTTP, and wait."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = httpx.Client(**_options(target))

    def predict(self, image: bytes, version: str | None) -> Prediction:
        """The answer for one image file."""
        with _errors(self._target):
            response = self._client.post(**_request(self._target, image, version))
        return _prediction(self._target, response)

    def metadata(self) -> Metadata:
        """What the preprocessing server says of the model behind it."""
        with _errors(self._target):
            response = self._client.get("/metadata")
        return _metadata(self._target, response)

    def close(self) -> None:
        """End the connections."""
        self._client.close()


class AsyncHttp:
    """Ask over HTTP from asyncio."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = httpx.AsyncClient(**_options(target))

    async def predict(self, image: bytes, version: str | None) -> Prediction:
        """The answer for one image file."""
        with _errors(self._target):
            response = await self._client.post(**_request(self._target, image, version))
        return _prediction(self._target, response)

    async def metadata(self) -> Metadata:
        """What the preprocessing server says of the model behind it."""
        with _errors(self._target):
            response = await self._client.get("/metadata")
        return _metadata(self._target, response)

    async def aclose(self) -> None:
        """End the connections."""
        await self._client.aclose()


def _options(target: Target) -> dict[str, Any]:
    return {
        "base_url": target.url,
        "timeout": target.timeout_s,
        "trust_env": False,  # a proxy of the environment has no business on loopback
        "verify": tls_context() if target.tls else False,
    }


def _request(target: Target, image: bytes, version: str | None) -> dict[str, Any]:
    token = target.token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if target.format == "prep":
        if version:
            raise SettingsError("The preprocessing server answers with the release that serves; name no version.")
        body = json.dumps({"data": base64.b64encode(image).decode()}).encode()
        return {"url": "/predict", "content": body, "headers": headers | {"Content-Type": "application/json"}}
    path = f"/predictions/{target.model}/{version}" if version else f"/predictions/{target.model}"
    return {"url": path, "content": image, "headers": headers | {"Content-Type": "application/octet-stream"}}


@contextmanager
def _errors(target: Target) -> Generator[None]:
    try:
        yield
    except (httpx.ReadTimeout, httpx.WriteTimeout):
        raise ServerTimeoutError(f"No answer from {target.url} within {target.timeout_s:g} s.") from None
    except (httpx.TransportError, httpx.InvalidURL, UnicodeError):
        raise ServerUnreachableError(f"No server answers at {target.url}; {target.hint}.") from None


def _prediction(target: Target, response: httpx.Response) -> Prediction:
    _require_success(target, response)
    try:
        return Prediction.model_validate_json(response.content)
    except ValidationError:
        raise ServingError(f"What answers at {target.url} is no evernear release.") from None


def _metadata(target: Target, response: httpx.Response) -> Metadata:
    _require_success(target, response)
    try:
        return Metadata.model_validate_json(response.content)
    except ValidationError:
        raise ServingError(f"What answers at {target.url} is no preprocessing server of evernear.") from None


def _require_success(target: Target, response: httpx.Response) -> None:
    if response.is_success:
        return
    reason = _reason(response)
    if response.status_code == HTTPStatus.GATEWAY_TIMEOUT:
        raise ServerTimeoutError(reason)
    if response.is_server_error:
        raise ServingError(f"{target.url} failed: {reason}")
    raise PredictionRejectedError(reason)


def _reason(response: httpx.Response) -> str:
    """The sentence of an error response, or its status line where it holds none."""
    try:
        return Refusal.model_validate_json(response.content).message
    except ValidationError:
        return f"{response.status_code} {response.reason_phrase}."
