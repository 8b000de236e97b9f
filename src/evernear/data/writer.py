"""Write images into shards with a maximum size. New images fill the smallest shard of their split
that is not nearly full, which is then stored again. After 100 ingests of 1%, a dataset therefore
has at most 1.1 times the shards that one ingest would write."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors, sha256_bytes, sha256_file
from evernear.common.store import Store
from evernear.data.manifest import SPLITS, Shard, Split, fetch_object
from evernear.data.preprocess import Pixels
from evernear.errors import IntegrityError

Rows = NDArray[np.void]
_BLOCK_BYTES = 2**20
_FILLED_FRACTION = 7 / 8
"""Fraction of a full shard from which on a later ingest does not fill it."""


def row_dtype(shape: tuple[int, int, int]) -> np.dtype[np.void]:
    """``group`` is a `group_number`."""
    return np.dtype([("image", "u1", shape), ("label", "<i4"), ("group", "<i8"), ("digest", "u1", (32,))])


def group_number(name: str | None) -> int:
    """The number that stands for a group in the rows of shards: 0 for none. It depends only on the
    name, so it is the same in every snapshot. Two groups have the same number with a probability of
    one in a million if there are three million groups."""
    if not name:
        return 0
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8]) >> 1 or 1


def group_digest(number: int) -> bytes:
    """The first 8 bytes of the hash of a group's name, except the last bit, or other 8 bytes for an
    image without a group (`evernear.data.shards.Block`)."""
    return ((number % 2**63) << 1).to_bytes(8)


def shard_key(dataset: str, sha256: str) -> str:
    return f"datasets/{dataset}/shards/{sha256}.npy"


def check_header(file: BinaryIO, dtype: np.dtype[np.void], shard: Shard) -> int:
    """Read the header of a shard, and return the offset of the first row."""
    try:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0(file) if version == (1, 0) else None
    except ValueError:
        header = None
    if header != ((shard.count,), False, dtype):
        raise IntegrityError(
            f"The shard {shard.sha256} does not contain {shard.count} images of {dtype['image'].shape}."
        )
    return file.tell()


class Change(NamedTuple):
    """What becomes of an image in a shard. A ``label`` of None removes it."""

    label: int | None
    group: int = 0
    moves: bool = False
    """Whether it moves to the train split."""


class Placed(NamedTuple):
    """Where images are: for each, the slot of its shard, and its row there."""

    slots: NDArray[np.int32]
    rows: NDArray[np.int32]


class ShardWriter:
    """Updates shards, which are numbered by slots. One block for each split is in memory."""

    def __init__(
        self,
        store: Store,
        dataset: str,
        shape: tuple[int, int, int],
        shard_size_bytes: int,
        shards: Mapping[int, Shard],
        labels: Sequence[str],
        scratch: Path,
    ) -> None:
        self._store, self._dataset, self._scratch = store, dataset, scratch
        self._dtype = row_dtype(shape)
        self._capacity = (shard_size_bytes - len(_header(self._dtype, 0))) // self._dtype.itemsize
        self.block_rows = max(1, _BLOCK_BYTES // self._dtype.itemsize)
        self.shards = dict(shards)
        self._next_slot = max(self.shards, default=-1) + 1
        self._open: dict[Split, _OpenShard] = {}
        self._labels = labels

    def append(
        self, split: Split, images: Pixels, labels: NDArray[np.int64], groups: NDArray[np.int64], digests: Pixels
    ) -> Placed:
        rows = np.empty(len(images), self._dtype)
        rows["image"], rows["label"], rows["group"], rows["digest"] = images, labels, groups, digests
        return self._append(split, rows)

    def _append(self, split: Split, rows: Rows) -> Placed:
        placed, done = Placed(np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)), 0
        while done < len(rows):
            shard = self._open.get(split) or self._begin(split)
            block = rows[done : done + self._capacity - shard.count]
            end = done + len(block)
            placed.slots[done:end], placed.rows[done:end] = shard.slot, np.arange(shard.count, shard.count + len(block))
            shard.write(block)
            done = end
            if shard.count == self._capacity:
                self._finish(split)
        return placed

    def close(self) -> None:
        for split in SPLITS:
            if split in self._open:
                self._finish(split)

    def rewrite(self, slot: int, changes: Mapping[bytes, Change]) -> Iterator[tuple[list[bytes], Placed, Split]]:
        """Change images in a slot, for which no shard may be open. Yield the images of the slot
        that have another row or another shard than before, with their places and their split."""
        shard = self.shards[slot]
        rewritten = _OpenShard(self._scratch, slot, self._dtype)
        moving: list[Rows] = []
        remaining: list[bytes] = []
        for rows in self._rows_of(shard):
            digests = [digest.tobytes() for digest in rows["digest"]]
            stays = np.ones(len(rows), np.bool_)
            moves = np.zeros(len(rows), np.bool_)
            for row, digest in enumerate(digests):
                if (change := changes.get(digest)) is None:
                    continue
                stays[row] = change.label is not None and not change.moves
                moves[row] = change.label is not None and change.moves
                if change.label is not None:
                    rows["label"][row], rows["group"][row] = change.label, change.group
            moving.append(rows[moves])
            remaining += [digest for digest, here in zip(digests, stays.tolist(), strict=True) if here]
            rewritten.write(rows[stays])
        self._publish(rewritten, shard.split)
        if len(remaining) < shard.count:
            own = np.arange(len(remaining), dtype=np.int32)
            yield remaining, Placed(np.full_like(own, slot), own), shard.split
        moved = np.concatenate(moving)
        if len(moved):
            yield [digest.tobytes() for digest in moved["digest"]], self._append("train", moved), "train"

    def _begin(self, split: Split) -> "_OpenShard":
        slot = self._slot_to_fill(split)
        if slot is None:
            shard = _OpenShard(self._scratch, self._next_slot, self._dtype)
            self._next_slot += 1
        else:
            shard = _OpenShard(self._scratch, slot, self._dtype)
            for rows in self._rows_of(self.shards[slot]):
                shard.write(rows)
        self._open[split] = shard
        return shard

    def _slot_to_fill(self, split: Split) -> int | None:
        """The slot to fill with a split's next images, or None for a new shard."""
        small = (
            slot
            for slot, shard in self.shards.items()
            if shard.split == split and shard.count < _FILLED_FRACTION * self._capacity
        )
        return min(small, key=lambda slot: (self.shards[slot].count, slot), default=None)

    def _finish(self, split: Split) -> None:
        self._publish(self._open.pop(split), split)

    def _rows_of(self, shard: Shard) -> Iterator[Rows]:
        path = self._scratch / "earlier.npy"
        fetch_object(self._store, shard_key(self._dataset, shard.sha256), path, shard.sha256)
        with path.open("rb") as file:
            check_header(file, self._dtype, shard)
            for start in range(0, shard.count, self.block_rows):
                yield np.fromfile(file, self._dtype, min(self.block_rows, shard.count - start))
        path.unlink()

    def _publish(self, open_shard: "_OpenShard", split: Split) -> None:
        path, counts = open_shard.finish()
        shard = None
        if open_shard.count:
            shard = Shard(
                sha256=sha256_file(path),
                split=split,
                count=open_shard.count,
                size_bytes=path.stat().st_size,
                label_counts={self._labels[label]: counts[label] for label in sorted(counts)},
                rows_sha256=open_shard.rows_sha256(),
            )
            self._store.put(shard_key(self._dataset, shard.sha256), path)
        path.unlink()
        self.shards.pop(open_shard.slot, None)
        if shard is not None:
            self.shards[open_shard.slot] = shard


class _OpenShard:
    def __init__(self, scratch: Path, slot: int, dtype: np.dtype[np.void]) -> None:
        self.slot = slot
        self.count = 0
        self._dtype = dtype
        self._labels: Counter[int] = Counter()
        self._hashes = {name: hashlib.sha256() for name in ("digest", "label", "group")}
        self._path = scratch / f"shard-{slot}.npy"
        with disk_errors(self._path):
            self._path.write_bytes(_header(dtype, 0))

    def write(self, rows: Rows) -> None:
        # The file is opened for each block, so that a failed ingest leaves no open file.
        with disk_errors(self._path), self._path.open("ab") as file:
            file.write(rows.tobytes())
        self.count += len(rows)
        self._labels.update(rows["label"].tolist())
        for name, column in self._hashes.items():
            column.update(np.ascontiguousarray(rows[name]).tobytes())

    def rows_sha256(self) -> str:
        return sha256_bytes(b"".join(column.digest() for column in self._hashes.values()))

    def finish(self) -> tuple[Path, Counter[int]]:
        """Complete the header. Return the path of the file and the number of images per label."""
        with disk_errors(self._path), self._path.open("r+b") as file:
            file.write(_header(self._dtype, self.count))
        return self._path, self._labels


def _header(dtype: np.dtype[np.void], count: int) -> bytes:
    buffer = BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()
