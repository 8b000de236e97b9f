"""Ask a running server: `Client` waits, `AsyncClient` is for asyncio. Imports neither torch nor FAISS."""

import weakref
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

from evernear.disk import open_regular
from evernear.errors import DataError, PredictionRejectedError, SettingsError
from evernear.serving.client.target import Format, Target
from evernear.serving.messages import Metadata, Prediction
from evernear.settings import RunSettings

GRPC_FRAME_BYTES = 256  # more than what the message holds beside the image: names and lengths

__all__ = ["AsyncClient", "Client", "Format", "Target"]


class Client:
    """A client of one model; it may be used from several threads, and as a context manager.

    ::

        with Client.of(settings) as client:
            print(client.predict(Path("7.png").read_bytes()).pred)
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        if target.format == "grpc":  # what is not spoken is not imported
            from evernear.serving.client.grpc import Grpc

            self._transport = Grpc(target)
        else:
            from evernear.serving.client.http import Http

            self._transport = Http(target)
        self.close = weakref.finalize(self, self._transport.close)  # of a client that nobody closed, too

    @staticmethod
    def of(settings: RunSettings, format: Format = "rest") -> "Client":
        """A client of the server of a working directory.

        Raises:
            ServerUnreachableError: none runs.
        """
        return Client(Target.local(settings, format))

    def predict(self, image: bytes, version: str | None = None) -> Prediction:
        """Recognise the content of a PNG or JPEG file, with a named ``version`` or the default one.

        Raises:
            ServerUnreachableError: nobody answers.
            ServerTimeoutError: no answer within the target's ``timeout_s``.
            PredictionRejectedError: the image or the request is at fault.
            ServingError: the server is at fault.
        """
        _require_bounded(image, self._target)
        return self._transport.predict(image, version)

    def predict_file(self, path: Path, version: str | None = None) -> dict[str, Any]:
        """`predict` on a file, as the JSON object that the server sent.

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
        """What the model takes and gives, as the preprocessing server tells it. Raises as `predict`.

        Raises:
            SettingsError: the target is no preprocessing server.
        """
        _require_prep(self._target)
        from evernear.serving.client.http import Http

        with closing(Http(self._target)) as http:
            return http.metadata()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio; it belongs to the event loop that it was made in."""

    def __init__(self, target: Target) -> None:
        self._target = target
        if target.format == "grpc":
            from evernear.serving.client.grpc import AsyncGrpc

            self._transport = AsyncGrpc(target)
        else:
            from evernear.serving.client.http import AsyncHttp

            self._transport = AsyncHttp(target)

    @staticmethod
    def of(settings: RunSettings, format: Format = "rest") -> "AsyncClient":
        """A client of the server of a working directory.

        Raises:
            ServerUnreachableError: none runs.
        """
        return AsyncClient(Target.local(settings, format))

    async def predict(self, image: bytes, version: str | None = None) -> Prediction:
        """As `Client.predict`."""
        _require_bounded(image, self._target)
        return await self._transport.predict(image, version)

    async def metadata(self) -> Metadata:
        """As `Client.metadata`."""
        _require_prep(self._target)
        from evernear.serving.client.http import AsyncHttp

        async with aclosing(AsyncHttp(self._target)) as http:
            return await http.metadata()

    async def close(self) -> None:
        """End the connections."""
        await self._transport.aclose()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _require_bounded(image: bytes, target: Target) -> None:
    """Refuse here what the server would hang up on in the middle of."""
    limit = target.max_size_bytes - (GRPC_FRAME_BYTES if target.format == "grpc" else 0)
    if len(image) > limit:
        raise PredictionRejectedError(f"The image has {len(image)} bytes, of {limit} that the server takes.")


def _require_prep(target: Target) -> None:
    if target.format != "prep":
        raise SettingsError("Only the preprocessing server tells its metadata to other machines; ask it instead.")
