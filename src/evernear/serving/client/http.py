"""HTTP transport: TorchServe's REST API and the preprocessing server."""

import base64
import json
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from evernear.common.frozen import Frozen
from evernear.errors import (
    PredictionRejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    ServingError,
    SettingsError,
)
from evernear.serving.client import Target, tls_context, token_refused
from evernear.serving.responses import EMBEDDING_FIELD, Metadata, Prediction, Rejection

Document = TypeVar("Document", bound=Frozen)


class HttpTransport:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = httpx.Client(**_options(target))
        self.close = self._client.close

    def predict(self, image: bytes, version: str | None, *, embedding: bool = False) -> Prediction:
        with http_errors(self._target):
            response = self._client.post(**_request(self._target, image, version, embedding))
        return _parse(Prediction, self._target, response)

    def metadata(self) -> Metadata:
        with http_errors(self._target):
            response = self._client.get("/metadata")
        return _parse(Metadata, self._target, response)


class AsyncHttpTransport:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = httpx.AsyncClient(**_options(target))
        self.close = self._client.aclose

    async def predict(self, image: bytes, version: str | None, *, embedding: bool = False) -> Prediction:
        with http_errors(self._target):
            response = await self._client.post(**_request(self._target, image, version, embedding))
        return _parse(Prediction, self._target, response)

    async def metadata(self) -> Metadata:
        with http_errors(self._target):
            response = await self._client.get("/metadata")
        return _parse(Metadata, self._target, response)


def _options(target: Target) -> dict[str, Any]:
    return {
        "base_url": target.url,
        "timeout": target.timeout_s,
        "trust_env": False,  # requests to loopback must not pass through a proxy
        "verify": tls_context() if target.tls else False,
    }


def _request(target: Target, image: bytes, version: str | None, embedding: bool) -> dict[str, Any]:
    token = target.token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if embedding:
        headers[EMBEDDING_FIELD] = "1"
    if target.format == "prep":
        if version:
            raise SettingsError("The preprocessing server uses the live release; do not specify a version.")
        body = json.dumps({"data": base64.b64encode(image).decode()}).encode()
        return {"url": "/predict", "content": body, "headers": headers | {"Content-Type": "application/json"}}
    path = f"/predictions/{target.model}/{version}" if version else f"/predictions/{target.model}"
    return {"url": path, "content": image, "headers": headers | {"Content-Type": "application/octet-stream"}}


@contextmanager
def http_errors(target: Target) -> Generator[None]:
    try:
        yield
    except (httpx.ReadTimeout, httpx.WriteTimeout):
        raise ServerTimeoutError(f"No response from {target.url} within {target.timeout_s:g} s.") from None
    except httpx.ConnectError as error:
        if "SSL" not in str(error):
            raise ServerUnreachableError(f"No server answers at {target.url}; {target.hint}.") from None
        hint = "SSL_CERT_FILE may name its CA" if "CERTIFICATE" in str(error) else "if it has no TLS, omit --tls"
        raise ServerUnreachableError(f"No TLS with the server at {target.url} ({error}); {hint}.") from None
    except (httpx.TransportError, httpx.InvalidURL, UnicodeError):
        raise ServerUnreachableError(f"No server answers at {target.url}; {target.hint}.") from None


def _parse(kind: type[Document], target: Target, response: httpx.Response) -> Document:
    if not response.is_success:
        raise status_error(target, response)
    try:
        return kind.model_validate_json(response.content)
    except ValidationError:
        server = "a preprocessing server" if target.format == "prep" else "an evernear release"
        raise ServingError(f"The server at {target.url} is not {server}.") from None


class _KServeError(Frozen, extra="ignore"):
    error: str


def _reason(response: httpx.Response) -> str:
    """A sentence. TorchServe's own ones have no period."""
    for kind, field in ((Rejection, "message"), (_KServeError, "error")):
        with suppress(ValidationError):
            return getattr(kind.model_validate_json(response.content), field).rstrip(".") + "."
    return f"{response.status_code} {response.reason_phrase}."


def status_error(target: Target, response: httpx.Response) -> ServingError:
    reason = _reason(response)
    match response.status_code:
        case HTTPStatus.GATEWAY_TIMEOUT:
            return ServerTimeoutError(reason)
        case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
            return token_refused(target)
        case HTTPStatus.NOT_FOUND | HTTPStatus.METHOD_NOT_ALLOWED:  # also of a server that is another one
            return PredictionRejectedError(f"{target.url} answers: {reason}")
        case _:
            pass
    return (
        ServingError(f"{target.url} failed: {reason}") if response.is_server_error else PredictionRejectedError(reason)
    )
