"""Images to embeddings, in batches and in flat memory, written to shards."""

import io
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import nn

from evernear.data.manifest import Shard, Split
from evernear.data.shards import Block, Dataset
from evernear.disk import sha256_bytes, sha256_file, write_atomically
from evernear.embedding.export import ExportResult, describe_network, load_network
from evernear.embedding.images import to_tensor
from evernear.embedding.kept import KeptEmbeddings, KeptShard, Rows, Vectors
from evernear.errors import IntegrityError
from evernear.frozen import Frozen
from evernear.store import Store

DESCRIPTION_FILE = "embeddings.json"
SHARD_SIZE = 8_192
"""Embeddings in a shard: 4.5 MB at 128 dimensions."""
BATCH_SIZE = 256
Found = NDArray[np.bool_]


class EmbeddingShard(Frozen):
    """One file of embeddings."""

    file: str
    sha256: str
    split: Split
    count: int


class EmbeddingsDescription(Frozen):
    """`DESCRIPTION_FILE`: which network made the embeddings of which dataset."""

    network_sha256: str
    dataset_digest: str
    dim: int
    shards: tuple[EmbeddingShard, ...]
    reused: int = 0
    """Embeddings that were kept of an earlier run, and not made now."""

    @property
    def count(self) -> int:
        """All embeddings."""
        return sum(shard.count for shard in self.shards)


@dataclass(frozen=True)
class EmbeddingBlock:
    """Embeddings (N, D) of float32 and unit length, label numbers (N,) and image digests (N, 32)."""

    embeddings: NDArray[np.float32]
    labels: NDArray[np.int64]
    digests: NDArray[np.uint8]


def embed(
    network_dir: Path,
    dataset: Dataset,
    out_dir: Path,
    splits: Sequence[Split] = ("gallery", "query"),
    batch_size: int = BATCH_SIZE,
    store: Store | None = None,
    untrained: frozenset[str] = frozenset(),
) -> EmbeddingsDescription:
    """Embed ``splits`` of ``dataset`` with the network that `export` left in ``network_dir``; write to
    ``out_dir``.

    With a ``store`` only images that this network has not embedded before are; see `evernear.embedding.kept`.
    ``untrained`` are classes that the network was not trained on: their train images stand in the gallery too. Nothing
    keeps them out as long as nobody has trained on them, and such a class needs many neighbours, for a network scatters
    what it never saw: of digits 9, new to it, 73% were called unknown with 19 images of the gallery split, and 40%
    with the 126 of the train split beside them.

    Raises:
        IntegrityError: the network is not what its description says, or is for images of another shape; or what
            the store keeps is damaged.
    """
    described = describe_network(network_dir)
    height, width, channels = dataset.shape
    made_for = described.preprocessing
    if (made_for.height_px, made_for.width_px, made_for.channels) != (height, width, channels):
        raise IntegrityError(
            f"The network in {network_dir} takes images of {made_for.height_px}x{made_for.width_px}x"
            f"{made_for.channels}, but those of {dataset.manifest.name} are {height}x{width}x{channels}."
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    shards: list[EmbeddingShard] = []
    with _one_thread_a_batch() as threads, ThreadPoolExecutor(threads) as pool:
        network = load_network(network_dir)
        embedder = _Embedder(
            lambda images: pool.submit(embed_images, network, images),
            threads,
            dataset,
            batch_size,
            described,
            store,
            untrained,
        )
        for split in splits:
            for number, rows in enumerate(_gather(embedder.batches(split), SHARD_SIZE)):
                shards.append(_write_shard(out_dir, split, number, rows))
    description = EmbeddingsDescription(
        network_sha256=described.sha256,
        dataset_digest=dataset.digest,
        dim=described.embedding_dim,
        shards=tuple(shards),
        reused=embedder.reused,
    )
    write_atomically(out_dir / DESCRIPTION_FILE, description.model_dump_json(indent=2))
    return description


@torch.inference_mode()
def embed_images(network: nn.Module, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """One batch of images (N, H, W, C) of uint8 as unit vectors (N, D) of float32."""
    return network(to_tensor(images)).numpy()


class Embeddings:
    """What `embed` wrote, its hashes checked; read in blocks."""

    def __init__(self, directory: Path, description: EmbeddingsDescription) -> None:
        self.directory = directory
        self.description = description

    @staticmethod
    def open(directory: Path) -> "Embeddings":
        """The embeddings in ``directory``.

        Raises:
            IntegrityError: there are none, or a shard is missing or changed.
        """
        try:
            description = EmbeddingsDescription.model_validate_json((directory / DESCRIPTION_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise IntegrityError(f"{directory} holds no embeddings; run the embed step again.") from error
        for shard in description.shards:
            path = directory / shard.file
            if not path.is_file() or sha256_file(path) != shard.sha256:
                raise IntegrityError(f"{path} is missing or changed since it was written; run the embed step again.")
        return Embeddings(directory, description)

    @property
    def network_sha256(self) -> str:
        """The network that made them."""
        return self.description.network_sha256

    @property
    def dim(self) -> int:
        """Coordinates of an embedding."""
        return self.description.dim

    def count(self, split: Split) -> int:
        """Embeddings of ``split``."""
        return sum(shard.count for shard in self.description.shards if shard.split == split)

    def blocks(self, split: Split) -> Iterator[EmbeddingBlock]:
        """The embeddings of ``split``, in the dataset's order, a shard at a time."""
        for shard in self.description.shards:
            if shard.split == split:
                rows = np.load(self.directory / shard.file, allow_pickle=False)
                yield EmbeddingBlock(
                    np.ascontiguousarray(rows["embedding"]),
                    rows["label"].astype(np.int64),
                    np.ascontiguousarray(rows["digest"]),
                )


@contextmanager
def _one_thread_a_batch() -> Generator[int]:
    """The number of batches to compute at once, each with one thread: less waiting than with all threads on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


class _Embedder:
    """Embeds a dataset's images, except those whose embeddings are kept, some batches at once."""

    def __init__(
        self,
        network: Callable[[NDArray[np.uint8]], Future[Vectors]],
        at_once: int,
        dataset: Dataset,
        batch_size: int,
        described: ExportResult,
        store: Store | None,
        untrained: frozenset[str],
    ) -> None:
        self._network, self._at_once = network, at_once
        self._dataset, self._batch_size, self._untrained = dataset, batch_size, untrained
        self._kept = KeptEmbeddings(store, described.sha256, described.embedding_dim)
        self._dtype = np.dtype(
            [("embedding", "<f4", (described.embedding_dim,)), ("label", "<i4"), ("digest", "u1", (32,))]
        )
        self.reused = 0

    def batches(self, split: Split) -> Iterator[Rows]:
        """The embeddings of a split, in the dataset's order."""
        for shard in self._dataset.shards(split):
            yield from self._of_shard(shard, frozenset(shard.label_counts))
        if split == "gallery":
            for shard in self._dataset.shards("train"):
                yield from self._of_shard(shard, self._untrained.intersection(shard.label_counts))

    def _of_shard(self, shard: Shard, labels: frozenset[str]) -> Iterator[Rows]:
        """The embeddings of a shard's images of ``labels``."""
        blocks = self._dataset.shard_blocks(shard, self._batch_size)
        if labels != shard.label_counts.keys():
            blocks = _of_labels(blocks, [self._dataset.labels.index(label) for label in labels])
        first = next(blocks, None)
        if first is None:
            return
        with self._kept.of_shard(first.digests[0], sum(shard.label_counts[label] for label in labels)) as kept:
            for block, vectors in self._embedded(chain([first], blocks), kept):
                rows = np.empty(len(block), self._dtype)
                rows["embedding"] = vectors
                rows["label"] = block.labels
                rows["digest"] = block.digests
                yield rows

    def _embedded(self, blocks: Iterator[Block], kept: KeptShard) -> Iterator[tuple[Block, Vectors]]:
        """Each block with its embeddings, in order; while some are computed the next one is read."""
        computed: deque[tuple[Block, Vectors, Found, Future[Vectors] | None]] = deque()
        for block in blocks:
            vectors, found = kept.find(block.digests)
            made = None if found.all() else self._network(block.images[~found])
            computed.append((block, vectors, found, made))
            if len(computed) > self._at_once:
                yield self._complete(*computed.popleft(), kept)
        while computed:
            yield self._complete(*computed.popleft(), kept)

    def _complete(
        self, block: Block, vectors: Vectors, found: Found, made: Future[Vectors] | None, kept: KeptShard
    ) -> tuple[Block, Vectors]:
        if made is not None:
            vectors[~found] = made.result()
        kept.add(vectors, block.digests, new=int((~found).sum()))
        self.reused += int(found.sum())
        return block, vectors


def _of_labels(blocks: Iterator[Block], numbers: Sequence[int]) -> Iterator[Block]:
    """The images whose label number is one of ``numbers``."""
    for block in blocks:
        chosen = np.isin(block.labels, numbers)
        if chosen.any():
            yield Block(block.images[chosen], block.labels[chosen], block.digests[chosen])


def _gather(batches: Iterator[Rows], size: int) -> Iterator[Rows]:
    """The same rows in pieces of ``size``, the last one shorter."""
    held: list[Rows] = []
    for batch in batches:
        held.append(batch)
        while sum(map(len, held)) >= size:
            rows = np.concatenate(held)
            yield rows[:size]
            held = [rows[size:]]
    if sum(map(len, held)):
        yield np.concatenate(held)


def _write_shard(directory: Path, split: Split, number: int, rows: Rows) -> EmbeddingShard:
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    data = buffer.getvalue()
    file = f"{split}-{number:05d}.npy"
    write_atomically(directory / file, data)
    return EmbeddingShard(file=file, sha256=sha256_bytes(data), split=split, count=len(rows))
