"""Recognize image files that are larger than a server's limit of bytes."""

from evernear.common.store import open_store
from evernear.data.decoding import max_file_size_bytes
from evernear.errors import EvernearError, PredictionRejectedError, ServingError
from evernear.release.manifest import ReleaseManifest
from evernear.release.registry import Registry
from evernear.serving.client import Client
from evernear.serving.decoding import inspect_image, prepare
from evernear.serving.responses import Prediction

_ATTEMPTS = 3


def predict_shrunk(client: Client, image: bytes, version: str | None, store_uri: str) -> Prediction:
    """Recognize ``image``, which is beyond the server's limit of bytes, with the release in
    ``store_uri`` that the server has loaded.

    It is decoded and resized here, as the release does, and sent as PNG. The server does not change
    it, so the answer is that for the whole file. The limits of bytes and pixels are then those of
    ingest.

    Raises:
        DataError: the image is broken or beyond the limits.
        PredictionRejectedError: the image must be shrunk, and its release cannot be read.
        ServingError, StoreError: as `Client.predict`.
    """
    registry = Registry(open_store(store_uri))
    expected = _release(registry, version, image, client)
    for _ in range(_ATTEMPTS):
        _require_bounded(image, expected)
        shrunk = prepare(inspect_image(image, expected.max_pixels), expected.preprocessing)
        prediction = client.predict(shrunk, version)
        actual = _release(registry, prediction.version, image, client)
        if actual.preprocessing == expected.preprocessing:
            return prediction
        expected = actual
    raise ServingError("The server's release changes faster than an image can be shrunk; try again.")


def _release(registry: Registry, version: str | None, image: bytes, client: Client) -> ReleaseManifest:
    try:
        return registry.get(version or registry.require_champion().version).manifest
    except EvernearError as error:
        raise PredictionRejectedError(
            f"The image has {len(image)} bytes, and the server's limit is {client.max_size_bytes}. It cannot be shrunk "
            f"as the server's release does it: {error}"
        ) from None


def _require_bounded(image: bytes, manifest: ReleaseManifest) -> None:
    limit = max_file_size_bytes(manifest.max_pixels)
    if len(image) > limit:
        raise PredictionRejectedError(f"The image has {len(image)} bytes; the limit is {limit}.")
