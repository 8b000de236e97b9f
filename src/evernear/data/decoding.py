"""Read and decode image files in parallel, and yield the results in order, within a memory
limit."""

import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from evernear.data.encoded_image import EncodedImage
from evernear.data.image_file import has_image_signature, inspect
from evernear.data.preprocess import Flaw, Pixels, Resize, decode_inspected, jpeg_divisor, to_array
from evernear.data.reduction import BitDepth
from evernear.data.sources import FileEntry, FileSource
from evernear.data.sources.names import has_image_suffix
from evernear.data.sources.packed import PackedFiles
from evernear.errors import DataError, MissingObjectError, StoreError, TransientStoreError

# Maximum number of images of the largest allowed size that are decoded at the same time, regardless
# of the number of threads.
_MAX_CONCURRENT_LARGEST = 4
_MAX_AHEAD_BYTES = 64 * 2**20
"""Maximum number of bytes that are read ahead of decoding from files that contain many images."""
PIXEL_SETTING = "data.max_pixels"


@dataclass(frozen=True)
class ImageForm:
    """The form of a dataset's images, with the fields of `evernear.data.manifest.Manifest`."""

    shape: tuple[int, int, int]
    resize: Resize = "stretch"
    bit_depth: BitDepth = 16


@dataclass(frozen=True)
class DecodedImage:
    """``pixels`` has the dataset's shape (H, W, C). The other fields describe the original."""

    entry: FileEntry
    digest: bytes
    size: tuple[int, int]
    flaws: Flaw
    pixels: Pixels


@dataclass(frozen=True)
class DecodeFailure:
    """``reason`` is None if neither the name nor the content indicates an image."""

    entry: FileEntry
    reason: str | None
    is_gone: bool = False
    """Whether the file no longer exists."""


class NotAnImageError(DataError):
    """Neither the name nor the content of a file indicates an image."""


class Decoder:
    """Reads the files of ``source``, and decodes them to images in ``form``. Memory use does not
    grow with the number of threads. Reading and decoding have separate thread pools, because
    reading waits for a disk or a bucket, and decoding waits for the CPU."""

    def __init__(self, source: FileSource, form: ImageForm, max_pixels: int) -> None:
        self._source, self._form, self._max_pixels = source, form, max_pixels
        self._file_budget_bytes = _Budget(_MAX_CONCURRENT_LARGEST * max_file_size_bytes(max_pixels))
        self._pixel_budget = _Budget(_MAX_CONCURRENT_LARGEST * max_pixels)

    def decode_all(
        self, entries: Iterator[FileEntry], requests_in_flight: int, threads: int, lookahead: int
    ) -> Generator[DecodedImage | DecodeFailure]:
        """Decode ``entries`` in order, at most ``lookahead`` images ahead of the consumer."""
        pending: deque[tuple[Future[Future[DecodedImage | DecodeFailure]], int]] = deque()
        ahead_bytes = 0
        readers, decoders = ThreadPoolExecutor(requests_in_flight, "read"), ThreadPoolExecutor(threads, "decode")
        try:
            for entry, data in self._contents(entries):
                size_bytes = len(data or b"")
                pending.append((readers.submit(self._read, entry, data, decoders), size_bytes))
                ahead_bytes += size_bytes
                while len(pending) >= lookahead or ahead_bytes > _MAX_AHEAD_BYTES:
                    future, size_bytes = pending.popleft()
                    ahead_bytes -= size_bytes
                    yield future.result().result()
            while pending:
                yield pending.popleft()[0].result().result()
        finally:
            readers.shutdown(cancel_futures=True)  # first, because a reader may wait for memory that a decoder frees
            decoders.shutdown(cancel_futures=True)

    def _contents(self, entries: Iterator[FileEntry]) -> Iterator[tuple[FileEntry, bytes | None]]:
        if isinstance(self._source, PackedFiles):
            return self._source.read_in_order(entries)
        return ((entry, None) for entry in entries)

    def _read(
        self, entry: FileEntry, data: bytes | None, decoders: ThreadPoolExecutor
    ) -> Future[DecodedImage | DecodeFailure]:
        # A file that is too large is rejected before it is read, so the size in its listing does
        # not count.
        size_bytes = min(entry.size_bytes, max_file_size_bytes(self._max_pixels))
        with ExitStack() as stack:
            stack.enter_context(self._file_budget_bytes.reserve(size_bytes))
            try:
                encoded = read_image(self._source, entry, self._max_pixels, data)
            except NotAnImageError:
                return _done(DecodeFailure(entry, None))
            except MissingObjectError:
                return _done(DecodeFailure(entry, None, is_gone=True))
            except DataError as error:
                return _done(DecodeFailure(entry, str(error)))
            return decoders.submit(self._decode, entry, encoded, stack.pop_all())

    def _decode(self, entry: FileEntry, encoded: EncodedImage, reserved: ExitStack) -> DecodedImage | DecodeFailure:
        with reserved:
            try:
                with self._pixel_budget.reserve(encoded.whole_pixels):
                    bit_depth = self._form.bit_depth
                    picture = decode_inspected(encoded, bit_depth)
                    divisor = jpeg_divisor(encoded, *self._form.shape[:2])
                    # Only the complete image has the digest. Servers decode the reduced one alone.
                    reduced = decode_inspected(encoded, bit_depth, divisor).image if divisor > 1 else picture.image
                    return DecodedImage(
                        entry=entry,
                        digest=picture.digest(),
                        size=picture.image.size,
                        flaws=picture.flaws(self._form.shape[2]),
                        pixels=to_array(reduced, *self._form.shape, self._form.resize),
                    )
            except DataError as error:
                return DecodeFailure(entry, str(error))


def _done(failure: DecodeFailure) -> Future[DecodedImage | DecodeFailure]:
    future: Future[DecodedImage | DecodeFailure] = Future()
    future.set_result(failure)
    return future


def read_image(source: FileSource, entry: FileEntry, max_pixels: int, data: bytes | None = None) -> EncodedImage:
    """Read and inspect a file. If ``data`` is the content of the file, only inspect the content. A
    file that is larger than any image can be is not read.

    Raises:
        NotAnImageError: neither the name nor the content of the file indicates an image.
        MissingObjectError: the file no longer exists.
        DataError: the image is too large or broken, or its file cannot be read.
    """
    is_too_large = entry.size_bytes > max_file_size_bytes(max_pixels)
    if data is None:
        data = b"" if is_too_large else _read(source, entry.name)
    if not (source.only_images or has_image_suffix(entry.name) or has_image_signature(data)):
        raise NotAnImageError(f"{entry.name} is not an image.")
    if is_too_large:
        limit_bytes = max_file_size_bytes(max_pixels)
        raise DataError(
            f"{entry.name} is too large: {entry.size_bytes} bytes, {limit_bytes} are allowed by {PIXEL_SETTING}."
        )
    return inspect(data, max_pixels, entry.name, PIXEL_SETTING)


def _read(source: FileSource, name: str) -> bytes:
    """A file that cannot be read, such as an archived object, is left out like a broken image."""
    try:
        return source.read(name)
    except (MissingObjectError, TransientStoreError):
        raise
    except StoreError as error:
        raise DataError(str(error)) from None


def max_file_size_bytes(max_pixels: int) -> int:
    """The size of uncompressed pixels with four channels of 16 bits."""
    return 8 * max_pixels


class _Budget:
    """A semaphore for amounts that may add up to ``limit``."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, amount: int) -> Generator[None]:
        """Wait until ``amount``, but at most the limit, is available, and reserve it."""
        with self._changed:
            self._changed.wait_for(lambda: amount <= self._left)
            self._left -= amount
        try:
            yield
        finally:
            with self._changed:
                self._left += amount
                self._changed.notify_all()
