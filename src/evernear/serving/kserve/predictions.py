"""The REST prediction endpoints of KServe's protocols, in front of KServe's application."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, cast

import msgspec
from kserve.constants.constants import PredictorProtocol
from kserve.errors import ModelNotReady
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.v1_endpoints import V1Endpoints
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from evernear.serving.kserve.http_protocol import ON_DISCONNECT
from evernear.serving.kserve.protocols import parse_infer_request

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
