"""Blocking and asyncio clients for a model server, which need neither torch nor FAISS."""

import weakref
from pathlib import Path
from typing import Any

from evernear.common.disk import open_regular
from evernear.errors import DataError, PredictionRejectedError, SettingsError
from evernear.serving.client.target import Format, Target
from evernear.serving.responses import Metadata, Prediction
from evernear.settings import RunSettings

GRPC_FRAME_BYTES = 448  # upper bound for the rest of a message: names, lengths and a trace context


class Client:
    """A thread-safe client for one model, usable as a context manager.

    ::

        with Client.of(settings) as client:
            print(client.predict(Path("7.png").read_bytes()).pred)
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        # To start the command line faster, import only the selected transport.
        if target.format == "grpc":
            from evernear.serving.client.grpc import GrpcTransport as Transport
        else:
            from evernear.serving.client.http import HttpTransport as Transport
        self._transport: Any = Transport(target)
        self.close = weakref.finalize(self, self._transport.close)  # also runs for a client that is never closed

    @staticmethod
    def of(settings: RunSettings, format: Format = "rest") -> "Client":
        """A client for the server of a working directory.

        Raises:
            ServerUnreachableError: no server is running.
        """
        return Client(Target.local(settings, format))

    def predict(self, image: bytes, version: str | None = None, *, embedding: bool = False) -> Prediction:
        """Recognize ``image``, the content of a PNG, JPEG or WebP file. By default, the server
        chooses the version. With ``embedding``, TorchServe adds the embedding.

        Raises:
            ServerUnreachableError: no server responds.
            ServerTimeoutError: no response arrives within the target's ``timeout_s``.
            PredictionRejectedError: the image or the request is invalid.
            ServingError: the server failed.
        """
        _require_bounded(image, self._target)
        return self._transport.predict(image, version, embedding=embedding)

    def predict_file(self, path: Path, version: str | None = None) -> dict[str, Any]:
        """Call `predict` with the content of a file, and return the prediction as a JSON object.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with open_regular(path) as file:
                image = file.read()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None
        return self.predict(image, version).model_dump(mode="json")

    def metadata(self) -> Metadata:
        """Ask the preprocessing server for the model's metadata. Raises the errors of `predict`.

        Raises:
            SettingsError: the target is not a preprocessing server.
        """
        _require_prep(self._target)
        return self._transport.metadata()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """`Client` on asyncio. Use an instance only in the event loop in which it was created."""

    def __init__(self, target: Target) -> None:
        self._target = target
        if target.format == "grpc":
            from evernear.serving.client.grpc import AsyncGrpcTransport as Transport
        else:
            from evernear.serving.client.http import AsyncHttpTransport as Transport
        self._transport: Any = Transport(target)

    @staticmethod
    def of(settings: RunSettings, format: Format = "rest") -> "AsyncClient":
        return AsyncClient(Target.local(settings, format))

    async def predict(self, image: bytes, version: str | None = None, *, embedding: bool = False) -> Prediction:
        _require_bounded(image, self._target)
        return await self._transport.predict(image, version, embedding=embedding)

    async def metadata(self) -> Metadata:
        _require_prep(self._target)
        return await self._transport.metadata()

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _require_bounded(image: bytes, target: Target) -> None:
    """Check the server's size limit before sending."""
    limit = target.max_size_bytes - (GRPC_FRAME_BYTES if target.format == "grpc" else 0)
    if len(image) > limit:
        raise PredictionRejectedError(f"The image has {len(image)} bytes; the server's limit is {limit}.")


def _require_prep(target: Target) -> None:
    if target.format != "prep":
        raise SettingsError("Only the preprocessing server provides metadata over the network; use --format prep.")
