"""Recognize images while the predictor is running."""

import asyncio

from evernear.errors import ServerUnreachableError
from evernear.serving.prep.service import PrepService
from evernear.serving.responses import Prediction
from evernear.settings import Settings


class Predictor:
    """Creates a `PrepService` on demand, because the console may start before the servers.

    If a server becomes unreachable, the `PrepService` is replaced, because the server may restart
    on a different port.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._service: PrepService | None = None
        self._lock = asyncio.Lock()

    async def predict(self, image: bytes) -> Prediction:
        """Recognize an image file. Raises the same errors as `PrepService.predict_image`."""
        async with self._lock:
            if self._service is None:
                self._service = PrepService(self._settings, embeddings=True)  # bound to this event loop
            service = self._service
        try:
            return await service.predict_image(image)
        except ServerUnreachableError:
            async with self._lock:
                if self._service is service:
                    self._service = None
            await service.close()
            raise

    async def close(self) -> None:
        """Close the connections."""
        if self._service is not None:
            await self._service.close()
