"""What the releases of a registry prescribe: how an image is prepared, and images whose answer is known."""

import asyncio
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TypeVar

from PIL import Image

from evernear.data.image_file import EncodedImage
from evernear.errors import ServingError
from evernear.release.archive_reader import SmokeQuery, open_release
from evernear.release.manifest import ReleaseManifest
from evernear.release.registry import Registry
from evernear.serving.decoding import read_image
from evernear.store import open_store

KEPT = 8  # of each kind; a rollout and its rollback go between two
Value = TypeVar("Value")
Query = tuple[bytes, SmokeQuery]


class Releases:
    """The releases of a store, each read once. Its methods raise `StoreError` and `IntegrityError`."""

    def __init__(self, store_uri: str) -> None:
        self._registry = Registry(open_store(store_uri))
        self._lock = asyncio.Lock()
        self._manifests: dict[str, ReleaseManifest] = {}
        self._queries: dict[str, Query] = {}

    async def champion(self) -> ReleaseManifest:
        """The release that ought to serve.

        Raises:
            ServingError: there is none yet.
        """
        champion = await asyncio.to_thread(self._registry.champion)
        if champion is None:
            raise ServingError("No release has been promoted yet; run `evernear run` first.")
        return await self.manifest(champion.version)

    async def manifest(self, version: str) -> ReleaseManifest:
        """What is known of a release."""
        return await self._once(self._manifests, version, lambda: self._registry.get(version).manifest)

    async def test_query(self, version: str) -> Query:
        """A stored image of a release, with its known answer; the first call brings the whole archive here."""
        return await self._once(self._queries, version, lambda: self._fetch_query(version))

    def _fetch_query(self, version: str) -> Query:
        with tempfile.TemporaryDirectory(prefix="evernear-prep-") as temporary:
            archive = Path(temporary) / "release.mar"
            self._registry.fetch(version, archive)
            queries = open_release(archive, Path(temporary) / "release").smoke_queries()
        if not queries:
            raise ServingError(f"Release {version} stores no query to be tested with.")
        return queries[0]

    async def _once(self, known: dict[str, Value], version: str, read: Callable[[], Value]) -> Value:
        if version not in known:
            async with self._lock:  # one reader, however many requests see a new release first
                if version not in known:
                    value = await asyncio.to_thread(read)
                    while len(known) >= KEPT:
                        del known[next(iter(known))]
                    known[version] = value
                    return value
        return known[version]


def prepare(file: EncodedImage, manifest: ReleaseManifest) -> bytes:
    """An inspected file, prepared as a release prescribes it, as a PNG file.

    PNG because it is lossless and what the predictor takes from everybody: decoding it there and bringing it
    to the size and channels that it already has changes no pixel.

    Raises:
        DataError: the image cannot be used.
    """
    shape = manifest.preprocessing
    pixels = read_image(file, shape)
    return as_png(Image.fromarray(pixels[:, :, 0] if shape.channels == 1 else pixels))


def blank(manifest: ReleaseManifest) -> bytes:
    """A black image of a release's size, as a PNG file."""
    shape = manifest.preprocessing
    return as_png(Image.new("L" if shape.channels == 1 else "RGB", (shape.width_px, shape.height_px)))


def as_png(image: Image.Image) -> bytes:
    """An image as a PNG file, packed fast rather than small."""
    buffer = BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
