"""Write images into shards with a maximum size. New images fill the smallest shard of their split
that is not nearly full, which is then stored again. After 100 ingests of 1%, a dataset therefore
has at most 1.1 times the shards that one ingest would write."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.store import Store
from evernear.data.ledger import Ledger
from evernear.data.manifest import SPLITS, Shard, Split, fetch_object
from evernear.data.preprocess import Pixels
from evernear.errors import IntegrityError

Rows = NDArray[np.void]
_BLOCK_BYTES = 2**20
_FILLED_FRACTION = 7 / 8
"""Fraction of a full shard from which on a later ingest does not fill it."""


def row_dtype(shape: tuple[int, int, int]) -> np.dtype[np.void]:
    return np.dtype([("image", "u1", shape), ("label", "<i4"), ("digest", "u1", (32,))])


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


class ShardWriter:
    """Updates the slots in the ledger. One block for each split is in memory."""

    def __init__(
        self,
        store: Store,
        dataset: str,
        shape: tuple[int, int, int],
        shard_size_bytes: int,
        ledger: Ledger,
        scratch: Path,
    ) -> None:
        self._store, self._dataset, self._ledger, self._scratch = store, dataset, ledger, scratch
        self._dtype = row_dtype(shape)
        self._capacity = (shard_size_bytes - len(_header(self._dtype, 0))) // self._dtype.itemsize
        self._block_rows = max(1, _BLOCK_BYTES // self._dtype.itemsize)
        self._shards = ledger.shards()
        self._next_slot = max(self._shards, default=-1) + 1
        self._open: dict[Split, _OpenShard] = {}
        self._labels: Sequence[str] = ledger.labels()

    def append(self, split: Split, images: Pixels, labels: Sequence[int], digests: Sequence[bytes]) -> list[int]:
        rows = np.empty(len(images), self._dtype)
        rows["image"], rows["label"] = images, labels
        rows["digest"] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
        slots: list[int] = []
        while len(slots) < len(rows):
            shard = self._open.get(split) or self._begin(split)
            block = rows[len(slots) : len(slots) + self._capacity - shard.count]
            shard.write(block)
            slots += [shard.slot] * len(block)
            if shard.count == self._capacity:
                self._finish(split)
        return slots

    def close(self) -> None:
        for split in SPLITS:
            if split in self._open:
                self._finish(split)

    def rewrite(self, slot: int, changes: Mapping[bytes, int | None]) -> None:
        """Relabel images, or remove those whose label is None. No shard may be open."""
        shard = self._shards[slot]
        rewritten = _OpenShard(self._scratch, slot, self._dtype)
        for rows in self._rows_of(shard):
            wanted = [changes.get(digest.tobytes(), -1) for digest in rows["digest"]]
            relabeled = [row for row, label in enumerate(wanted) if label not in (None, -1)]
            rows["label"][relabeled] = [wanted[row] for row in relabeled]
            rewritten.write(rows[[label is not None for label in wanted]])
        self._publish(rewritten, shard.split)

    def move(self, slot: int, digests: Collection[bytes], split: Split) -> list[tuple[bytes, int]]:
        """Move images from one slot to a different split, and return the new slot of each image.
        Call this method only while no shard is open. The moved images, at most one shard of images,
        are kept in memory."""
        moved = [
            rows[[digest.tobytes() in digests for digest in rows["digest"]]]
            for rows in self._rows_of(self._shards[slot])
        ]
        rows = np.concatenate(moved)
        moved_digests = [digest.tobytes() for digest in rows["digest"]]
        slots = self.append(split, rows["image"], rows["label"].tolist(), moved_digests)
        self.close()
        self.rewrite(slot, dict.fromkeys(digests))
        return list(zip(moved_digests, slots, strict=True))

    def _begin(self, split: Split) -> "_OpenShard":
        slot = self._slot_to_fill(split)
        if slot is None:
            shard = _OpenShard(self._scratch, self._next_slot, self._dtype)
            self._next_slot += 1
        else:
            shard = _OpenShard(self._scratch, slot, self._dtype)
            for rows in self._rows_of(self._shards[slot]):
                shard.write(rows)
        self._open[split] = shard
        return shard

    def _slot_to_fill(self, split: Split) -> int | None:
        """The slot to fill with a split's next images, or None for a new shard."""
        small = (
            slot
            for slot, shard in self._shards.items()
            if shard.split == split and shard.count < _FILLED_FRACTION * self._capacity
        )
        return min(small, key=lambda slot: (self._shards[slot].count, slot), default=None)

    def _finish(self, split: Split) -> None:
        self._publish(self._open.pop(split), split)

    def _rows_of(self, shard: Shard) -> Iterator[Rows]:
        path = self._scratch / "earlier.npy"
        fetch_object(self._store, shard_key(self._dataset, shard.sha256), path, shard.sha256)
        with path.open("rb") as file:
            check_header(file, self._dtype, shard)
            for start in range(0, shard.count, self._block_rows):
                yield np.fromfile(file, self._dtype, min(self._block_rows, shard.count - start))
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
            )
            self._store.put(shard_key(self._dataset, shard.sha256), path)
        path.unlink()
        self._ledger.put_shard(open_shard.slot, shard)
        self._shards.pop(open_shard.slot, None)
        if shard is not None:
            self._shards[open_shard.slot] = shard


class _OpenShard:
    def __init__(self, scratch: Path, slot: int, dtype: np.dtype[np.void]) -> None:
        self.slot = slot
        self.count = 0
        self._dtype = dtype
        self._labels: Counter[int] = Counter()
        self._path = scratch / f"shard-{slot}.npy"
        with disk_errors(self._path):
            self._path.write_bytes(_header(dtype, 0))

    def write(self, rows: Rows) -> None:
        # The file is opened for each block, so that a failed ingest leaves no open file.
        with disk_errors(self._path), self._path.open("ab") as file:
            file.write(rows.tobytes())
        self.count += len(rows)
        self._labels.update(rows["label"].tolist())

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
