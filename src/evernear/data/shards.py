"""Read a dataset in blocks of images, in order or shuffled, in constant memory."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors
from evernear.common.output import quantity
from evernear.common.store import FileStore, Store, open_store
from evernear.data.manifest import REPAIR, Manifest, Shard, Split, fetch_object, find_manifest, load_manifest
from evernear.data.preprocess import Pixels
from evernear.data.reduction import BitDepth
from evernear.data.writer import Rows, check_header, row_dtype, shard_key
from evernear.errors import DataError, IntegrityError

# Shuffling reads chunks of this size from a group of shards and mixes their images in a buffer.
_CHUNK_BYTES = 256 * 2**10
_BUFFER_BYTES = 32 * 2**20
# Rows that are smaller than this size are not read one by one.
_PAGE_BYTES = 4096
_GROUP_SHARDS = 16
# Maximum size of the cache for remote shards. The least recently used shards are evicted first.
_CACHE_BYTES = 8 * 2**30
# A single connection to a bucket is often slower than the network.
_FETCHES_IN_FLIGHT = 4


@dataclass(frozen=True)
class Block:
    """A block of images: the pixels as a uint8 array of shape (N, H, W, C), the label numbers as an
    array of shape (N,), the numbers of their groups as an array of shape (N,), and the SHA-256
    digests as a uint8 array of shape (N, 32). An image without a group has a group of its own."""

    images: Pixels
    labels: NDArray[np.int64]
    groups: NDArray[np.int64]
    digests: Pixels

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: "NDArray[np.int64] | NDArray[np.bool_] | list[int] | slice") -> "Block":
        return Block(self.images[rows], self.labels[rows], self.groups[rows], self.digests[rows])


class Dataset:
    """A snapshot that is open for reading. A shard's hash is checked before its first use."""

    def __init__(self, manifest: Manifest, store: Store, cache: Path | None = None) -> None:
        self.manifest = manifest
        self.store = store
        self.labels = manifest.labels
        self.shape = manifest.shape
        self.digest = manifest.digest
        self._dtype = row_dtype(manifest.shape)
        self._files = _ShardFiles(manifest.name, store, self._dtype, cache or default_cache())

    @staticmethod
    def open(directory: Path) -> "Dataset":
        """Open the dataset whose manifest is in ``directory``."""
        manifest = load_manifest(directory)
        return Dataset(manifest, open_store(manifest.store_uri))

    @staticmethod
    def find(store: Store, name: str, digest: str) -> "Dataset | None":
        """Find an earlier snapshot, or return None if the store no longer has it."""
        manifest = find_manifest(store, name, digest)
        return Dataset(manifest, store) if manifest else None

    def count(self, split: Split) -> int:
        return self.manifest.count(split)

    def require_shape(self, shape: tuple[int, int, int], recognizer: str) -> None:
        if shape != self.shape:
            raise DataError(
                f"{recognizer} takes images of {shape} and cannot be measured on the images of {self.manifest.name}, "
                f"{self.shape}; start over with another --workdir or store."
            )

    def require_bit_depth(self, bit_depth: BitDepth, recognizer: str) -> None:
        own = self.manifest.bit_depth
        if own != bit_depth:
            raise DataError(
                f"{recognizer} reads 16-bit images as {bit_depth} bits, so it cannot be measured on the images of"
                f" {self.manifest.name}, which were read as {own} bits; start over with another --workdir or store."
            )

    def blocks(self, split: Split, block_size: int = 4096, rank: int = 0, world_size: int = 1) -> Iterator[Block]:
        """Yield a split in order. Each rank gets every ``world_size``-th block."""
        starts = ((shard, start) for shard in self.shards(split) for start in range(0, shard.count, block_size))
        for shard, start in islice(starts, rank, None, world_size):
            with self._files.open(shard, start) as file:
                yield _block(self._read(file, shard, min(block_size, shard.count - start)))

    def shard_blocks(self, shard: Shard, block_size: int = 4096) -> Iterator[Block]:
        with self._files.open(shard) as file:
            for start in range(0, shard.count, block_size):
                yield _block(self._read(file, shard, min(block_size, shard.count - start)))

    def image(self, shard: Shard, row: int) -> Block:
        with self._files.open(shard, row) as file:
            return _block(self._read(file, shard, 1))

    def shards(self, split: Split) -> list[Shard]:
        return [shard for shard in self.manifest.shards if shard.split == split]

    def shuffled_batches(
        self, split: Split, batch_size: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[Block]:
        """Yield an epoch of batches, shuffled by ``seed`` and ``epoch``, as many for every rank.

        Shards are shuffled and divided into groups of 16, or fewer if they do not fit into half of
        the cache, so that no shard is fetched twice in an epoch. Within a group, chunks of 256 KiB
        are shuffled, and images in a buffer of 32 MiB or 8 batches. A batch therefore mixes about
        128 chunks of its group, or fewer of larger images.

        An incomplete last batch is dropped, and a split that is smaller than one batch becomes one.
        The concatenated batches of all ranks equal the batch of a single rank. A rank reads only
        its own images, unless they are so small that whole chunks are faster.
        """
        total = self.count(split) // world_size
        if total == 0:
            raise DataError(
                f"The split {split!r} has {quantity(self.count(split), 'image')}, too few for {world_size} processes."
            )
        batch_size = min(batch_size, total)
        whole_batch = batch_size * world_size
        rows = total // batch_size * whole_batch
        chunks = _Window(self._shuffled_chunks(split, np.random.default_rng((seed, epoch))))
        mixer = np.random.default_rng((seed, epoch, 0))
        buffer_rows = max(8, _BUFFER_BYTES // self._dtype.itemsize // whole_batch) * whole_batch
        space = np.empty(min(buffer_rows, rows) // world_size, self._dtype)
        for start in range(0, rows, buffer_rows):
            order = mixer.permutation(min(buffer_rows, rows - start))
            own_rows = order.reshape(-1, world_size, batch_size)[:, rank]
            wanted = np.zeros(len(order), np.bool_)
            wanted[own_rows] = True
            buffer = space[: own_rows.size]
            self._fill(buffer, chunks, wanted)
            position = np.cumsum(wanted) - 1
            for indices in position[own_rows]:
                yield _block(buffer[indices])

    def mean_std(self, split: Split = "train") -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, with values scaled to 0..1."""
        total = np.zeros(self.shape[2], np.int64)
        squares = np.zeros(self.shape[2], np.int64)
        pixels = self.count(split) * self.shape[0] * self.shape[1]
        if pixels == 0:
            raise DataError(f"The split {split!r} is empty.")
        for block in self.blocks(split, max(1, 2**20 // self._dtype.itemsize)):
            values = block.images.reshape(-1, self.shape[2])
            # An integer histogram is exact, and does not require a copy of the images with a wider
            # type.
            for channel in range(self.shape[2]):
                counts = np.bincount(values[:, channel], minlength=256)
                total[channel] += int(counts @ np.arange(256))
                squares[channel] += int(counts @ np.arange(256) ** 2)
        mean = total / (255.0 * pixels)
        # Rounding may make the variance of a constant channel negative.
        std = np.sqrt(np.maximum(squares / (255.0**2 * pixels) - mean**2, 0))
        return tuple(mean.tolist()), tuple(std.tolist())

    def _shuffled_chunks(self, split: Split, rng: np.random.Generator) -> "Iterator[_Chunk]":
        shards = self.shards(split)
        rows = max(1, _CHUNK_BYTES // self._dtype.itemsize)
        for group in _groups([shards[index] for index in rng.permutation(len(shards))]):
            self._files.prefetch(group)
            chunks = [
                _Chunk(shard, start, min(rows, shard.count - start))
                for shard in group
                for start in range(0, shard.count, rows)
            ]
            yield from (chunks[index] for index in rng.permutation(len(chunks)))

    def _fill(self, buffer: Rows, chunks: "_Window", wanted: NDArray[np.bool_]) -> None:
        position = filled = 0
        for chunk in chunks.take(len(wanted)):
            indices = np.flatnonzero(wanted[position : position + chunk.count])
            position += chunk.count
            if len(indices) == 0:
                continue
            part = buffer[filled : filled + len(indices)]
            filled += len(indices)
            if len(indices) == chunk.count or self._dtype.itemsize < _PAGE_BYTES:
                with self._files.open(chunk.shard, chunk.start) as file:
                    part[:] = self._read(file, chunk.shard, chunk.count)[indices]
                continue
            with self._files.open(chunk.shard, chunk.start) as file:
                first = file.tell()
                for row, index in enumerate(indices.tolist()):
                    file.seek(first + index * self._dtype.itemsize)
                    part[row] = self._read(file, chunk.shard, 1)[0]

    def _read(self, file: FileIO, shard: Shard, count: int) -> Rows:
        rows = np.fromfile(file, self._dtype, count)
        if len(rows) != count:
            raise IntegrityError(f"The shard {shard.sha256} is truncated.")
        return rows


def _groups(shards: list[Shard]) -> Iterator[list[Shard]]:
    """Groups that fit into half of the cache, so that fetching the next one evicts no shard in use.
    The order of the images does not depend on the store."""
    group: list[Shard] = []
    for shard in shards:
        size_bytes = sum(member.size_bytes for member in group) + shard.size_bytes
        if group and (len(group) == _GROUP_SHARDS or size_bytes > _CACHE_BYTES / 2):
            yield group
            group = []
        group.append(shard)
    yield group


@dataclass(frozen=True)
class _Chunk:
    shard: Shard
    start: int
    count: int


class _Window:
    def __init__(self, chunks: Iterator[_Chunk]) -> None:
        self._chunks = chunks
        self._rest: _Chunk | None = None

    def take(self, rows: int) -> Iterator[_Chunk]:
        while rows:
            chunk = self._rest or next(self._chunks)
            count = min(rows, chunk.count)
            remaining = chunk.count - count
            self._rest = _Chunk(chunk.shard, chunk.start + count, remaining) if remaining else None
            rows -= count
            yield _Chunk(chunk.shard, chunk.start, count)


def _block(rows: Rows) -> Block:
    digests = np.ascontiguousarray(rows["digest"])
    # Group numbers are positive, so the negative number of a digest is no group's.
    own = -1 - (digests[:, :8].copy().view("<i8").ravel() & np.iinfo(np.int64).max)
    return Block(
        images=np.ascontiguousarray(rows["image"]),
        labels=rows["label"].astype(np.int64),
        groups=np.where(rows["group"] == 0, own, rows["group"]),
        digests=digests,
    )


class _ShardFiles:
    """Opens shards in place if the store is a directory, and otherwise from a bounded cache."""

    def __init__(self, dataset: str, store: Store, dtype: np.dtype[np.void], cache: Path) -> None:
        self._dataset, self._store, self._dtype, self._cache = dataset, store, dtype, cache
        self._first_row: dict[str, int] = {}
        self._intact: set[str] = set()

    def open(self, shard: Shard, row: int = 0) -> FileIO:
        """Open the verified file of a shard, positioned at ``row``."""
        key = shard_key(self._dataset, shard.sha256)
        if isinstance(self._store, FileStore):
            path = self._store.path(key)
            file = _open_existing(path)
        else:
            path = self._cached_path(shard)
            _touch(path)
            file = self._cached(path, shard)
            if file is None:
                self._evict(shard.size_bytes)
                file = _open_existing(self._fetch(shard))
        if file is None:
            raise IntegrityError(f"The shard {path} is missing; {REPAIR}.")
        try:
            file.seek(self._start(file, shard, path) + row * self._dtype.itemsize)
        except BaseException:
            file.close()
            raise
        return file

    def prefetch(self, shards: Sequence[Shard]) -> None:
        if isinstance(self._store, FileStore):
            return
        missing = [shard for shard in shards if not _touch(self._cached_path(shard))]
        if not missing:
            return
        self._evict(sum(shard.size_bytes for shard in missing))
        with ThreadPoolExecutor(_FETCHES_IN_FLIGHT, "fetch") as pool:
            for _ in pool.map(self._fetch, missing):
                pass

    def _start(self, file: FileIO, shard: Shard, path: Path) -> int:
        """Return the offset of the first row. The first call for a shard verifies its content."""
        if not self._is_intact(file, shard):
            raise IntegrityError(f"The shard {path} is damaged: its content does not have its sha256; {REPAIR}.")
        if shard.sha256 not in self._first_row:
            self._first_row[shard.sha256] = check_header(file, self._dtype, shard)
        return self._first_row[shard.sha256]

    def _is_intact(self, file: FileIO, shard: Shard) -> bool:
        if shard.sha256 not in self._intact and hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256:
            self._intact.add(shard.sha256)
            file.seek(0)
        return shard.sha256 in self._intact

    def _cached(self, path: Path, shard: Shard) -> FileIO | None:
        """Open a cached file, or return None if it is missing or damaged."""
        file = _open_existing(path)
        if file is None or self._is_intact(file, shard):
            return file
        file.close()
        return None

    def _fetch(self, shard: Shard) -> Path:
        key = shard_key(self._dataset, shard.sha256)
        path = fetch_object(self._store, key, self._cached_path(shard), shard.sha256)
        self._intact.add(shard.sha256)
        return path

    def _cached_path(self, shard: Shard) -> Path:
        return self._cache / f"{shard.sha256}.npy"

    def _evict(self, size_bytes: int) -> None:
        """Evict the least recently used copies. Open files can still be read."""
        with disk_errors(self._cache):
            self._cache.mkdir(parents=True, exist_ok=True)
            copies: list[tuple[int, int, Path]] = []
            for path in self._cache.glob("*.npy"):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    copies.append((stat.st_atime_ns, stat.st_size, path))
            free_bytes = _CACHE_BYTES - size_bytes - sum(size for _, size, _ in copies)
            for _, size, path in sorted(copies):
                if free_bytes >= 0:
                    return
                path.unlink(missing_ok=True)
                free_bytes += size


def _touch(path: Path) -> bool:
    """Mark a copy as used, since not all file systems do. False if it does not exist."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _open_existing(path: Path) -> FileIO | None:
    with disk_errors(path), suppress(FileNotFoundError):
        return path.open("rb", buffering=0)
    return None


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evernear" / "shards"


def remove_cached(sha256: str) -> None:
    (default_cache() / f"{sha256}.npy").unlink(missing_ok=True)
