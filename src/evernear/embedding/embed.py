"""Embed the images of a dataset in parts (`evernear.common.parts`), in bounded memory.

::

    <folder>/embed-<identity>/...                 the parts and their results
    <folder>/embed-<identity>/<sha256>.npy        the embeddings of one part
    <folder>/embed-<identity>/network/...         the network, if other machines run parts

A part is a shard, so no two parts share a cached object, and the batches are the same for any
number of machines. Its result names the object that it wrote. Combining the results reads no
embeddings.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from evernear.common.disk import disk_errors, sha256_bytes, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.parts import Part, Parts, Worker, run_parts
from evernear.common.processes import chosen_threads
from evernear.common.store import FileStore, Store
from evernear.common.store.base import fetch_folder
from evernear.data.gallery import (
    FINE_TUNED_GALLERY_IMAGES,
    MIN_GALLERY_IMAGES,
    ShardImages,
    images_to_embed,
    joining_gallery,
)
from evernear.data.manifest import Manifest, Split
from evernear.data.shards import Block, Dataset
from evernear.embedding.data_loader import ImageVectors, OnImages, ShardBlocks
from evernear.embedding.embeddings import (
    DESCRIPTION_FILE,
    EmbeddingCache,
    EmbeddingsDescription,
    EmbeddingShard,
    Vectors,
)
from evernear.embedding.export import describe_network, load_network, load_parts
from evernear.embedding.network import Network
from evernear.errors import IntegrityError

KIND = "embed"
BATCH_SIZE = 256
Embed = Callable[[Iterable[ShardBlocks]], Iterator[tuple[Block, Vectors]]]
"""Yields the blocks of shards with their embeddings (N, D)."""


class ExportedEmbedder:
    """Embeds images with the exported network in ``network_dir``, unless they are cached.

    The cache in ``store`` has the network's embeddings or, if it is frozen, its backbone's
    features. If ``read_only``, the cache is not written.
    """

    def __init__(
        self,
        network_dir: Path,
        store: Store | None = None,
        on_images: OnImages | None = None,
        read_only: bool = False,
    ) -> None:
        described = describe_network(network_dir)
        self._head: nn.Module | None = None
        streams = chosen_threads()
        load: Callable[[], Network] = partial(load_network, network_dir, streams)
        if described.features_dim:
            load, self._head = load_parts(network_dir, streams)
        dim = described.features_dim or described.embedding_dim
        cache = EmbeddingCache(store, described.cache_key, dim, read_only)
        self._vectors = ImageVectors(cache, load, on_images)

    @property
    def reused(self) -> int:
        """Images whose vectors came from the cache."""
        return self._vectors.reused

    def load(self) -> None:
        """Load the network now, so that ``network_dir`` is not needed afterwards."""
        self._vectors.load()

    def embed(self, shards: Iterable[ShardBlocks]) -> Iterator[tuple[Block, Vectors]]:
        """Yield each block with its embeddings (N, D), unit vectors of float32."""
        for block, vectors in self._vectors.of(shards):
            yield block, vectors if self._head is None else _apply(self._head, vectors)


@torch.inference_mode()
def _apply(head: nn.Module, features: Vectors) -> Vectors:
    return head(torch.from_numpy(features)).numpy()


class EmbedPart(Part):
    """Images of a shard, for one split. A unit is an image. The embeddings of the test split are
    only cached, for the evaluate step."""

    split: Split
    sha256: str
    taken: dict[str, int] | None
    """How many images of each label to take from the shard (None: all)."""


class Shared(Frozen):
    dataset: str
    digest: str
    network_sha256: str
    splits: tuple[Split, ...]
    joining_sha256: str
    batch_size: int


def embed_dataset(
    network_dir: Path,
    dataset: Dataset,
    out_dir: Path,
    splits: Sequence[Split] = ("gallery", "query"),
    batch_size: int = BATCH_SIZE,
    store: Store | None = None,
    untrained: frozenset[str] = frozenset(),
    on_images: OnImages | None = None,
) -> EmbeddingsDescription:
    """Embed ``splits`` of ``dataset`` in this process, and write the shards to ``out_dir``.

    With a ``store``, embeddings are cached there (`evernear.embedding.embeddings`).
    ``on_images`` is called after each batch.
    """
    parts = plan_embedding(network_dir, dataset, FileStore(out_dir), "parts", untrained, splits, batch_size)
    run_parts(parts, partial(open_here, network_dir, dataset, store, on_images))
    return combine_embeddings(parts, network_dir, dataset, out_dir, store_uri="")


def plan_embedding(
    network_dir: Path,
    dataset: Dataset,
    results: Store,
    folder: str,
    untrained: frozenset[str] = frozenset(),
    splits: Sequence[Split] = ("gallery", "query"),
    batch_size: int = BATCH_SIZE,
) -> Parts:
    """Plan the parts in ``folder`` of ``results``, or return those of an equal earlier plan.

    `gallery_of` determines which train images join the gallery.
    """
    described = describe_network(network_dir)
    expected = described.preprocessing.shape
    if expected != dataset.shape:
        height, width, channels = dataset.shape
        raise IntegrityError(
            f"The network in {network_dir} takes images of {expected[0]}x{expected[1]}x{expected[2]}, "
            f"but the images of {dataset.manifest.name} are {height}x{width}x{channels}."
        )
    joining = gallery_of(dataset.manifest, described.frozen, described.pretrained_sha256, untrained)
    shared = Shared(
        dataset=dataset.manifest.name,
        digest=dataset.digest,
        network_sha256=described.sha256,
        splits=tuple(splits),
        joining_sha256=sha256_bytes(json.dumps(joining).encode()),
        batch_size=batch_size,
    )
    folder = f"{folder}/{KIND}-{sha256_bytes(shared.to_json())[:16]}"
    planned = (
        EmbedPart(units=images.count, split=split, sha256=images.shard.sha256, taken=images.taken)
        for split in splits
        for images in images_to_embed(dataset, split, joining)
    )
    return Parts.find(results, folder) or Parts.make(results, folder, KIND, shared.model_dump(mode="json"), planned)


def gallery_of(
    manifest: Manifest, frozen: bool, pretrained_sha256: str | None, untrained: frozenset[str] = frozenset()
) -> dict[str, int]:
    """For each label, the number of train images that join the gallery of a network. ``untrained``
    are the classes that it was not trained on: all if it is frozen."""
    if frozen:
        return joining_gallery(manifest, manifest.labels)
    return joining_gallery(manifest, untrained, FINE_TUNED_GALLERY_IMAGES if pretrained_sha256 else MIN_GALLERY_IMAGES)


def open_here(
    network_dir: Path, dataset: Dataset, cache: Store | None, on_images: OnImages | None, parts: Parts
) -> Worker:
    """An `OpenWorker` once all arguments except ``parts`` are bound."""
    embedder = ExportedEmbedder(network_dir, cache, on_images)
    return partial(_embed_part, embedder, dataset, describe_network(network_dir).embedding_dim, parts)


def open_worker(parts: Parts) -> Worker:
    """Like `open_here`, with the network in the parts folder, on a different machine."""
    shared = Shared.model_validate(parts.plan.shared)
    dataset = Dataset.find(parts.store, shared.dataset, shared.digest)
    if dataset is None:
        raise IntegrityError(f"{parts.store.uri} no longer has the snapshot {shared.digest[:12]} of {shared.dataset}.")
    network_dir = Path(tempfile.mkdtemp(prefix="evernear-network-"))  # the process ends with the part
    fetch_folder(parts.store, network_folder(parts), network_dir)
    return open_here(network_dir, dataset, parts.store, None, parts)


def network_folder(parts: Parts) -> str:
    """Workers on other machines fetch the network from here."""
    return f"{parts.folder}/network"


def _embed_part(
    embedder: ExportedEmbedder, dataset: Dataset, dim: int, parts: Parts, number: int, value: bytes
) -> bytes:
    """Store the part's embeddings under their sha256, and return an `EmbeddingShard` as JSON."""
    part = EmbedPart.from_json(value, f"part {number} in {parts.store.uri}")
    batch_size = Shared.model_validate(parts.plan.shared).batch_size
    shard = next(shard for shard in dataset.manifest.shards if shard.sha256 == part.sha256)
    images = ShardImages(shard, None if part.taken is None else Counter(part.taken))
    reused_before = embedder.reused
    embedded = embedder.embed([(images.blocks(dataset, batch_size), images.count)])
    if part.split == "test":
        count = sum(len(block) for block, _ in embedded)
        return EmbeddingShard(file="", sha256="", split=part.split, count=count).to_json()
    with tempfile.TemporaryDirectory(prefix="evernear-embeddings-") as scratch:
        path = Path(scratch) / "embeddings.npy"
        _write_npy(path, dim, part.units, embedded)
        sha256 = sha256_file(path)
        file = f"{parts.folder}/{sha256}.npy"
        parts.store.put(file, path)
    reused = embedder.reused - reused_before
    return EmbeddingShard(file=file, sha256=sha256, split=part.split, count=part.units, reused=reused).to_json()


def combine_embeddings(
    parts: Parts, network_dir: Path, dataset: Dataset, out_dir: Path, store_uri: str
) -> EmbeddingsDescription:
    """Write the description of all parts' embeddings to ``out_dir``, except those that are only
    cached. ``store_uri`` is empty if they are there too."""
    described = describe_network(network_dir)
    shards = [EmbeddingShard.from_json(result.value, f"a result in {parts.store.uri}") for result in parts.results()]
    description = EmbeddingsDescription(
        network_sha256=described.sha256,
        dataset_digest=dataset.digest,
        dim=described.embedding_dim,
        store_uri=store_uri,
        shards=tuple(shard for shard in shards if shard.file),
    )
    description.save(out_dir / DESCRIPTION_FILE)
    return description


def write_embeddings(
    embed: Embed, dim: int, dataset: Dataset, out_dir: Path, joining: dict[str, int], network_sha256: str
) -> None:
    """Write embeddings of the gallery and query splits to ``out_dir``, in the format of
    `embed_dataset`. ``joining`` counts each label's train images that join."""
    shards: list[EmbeddingShard] = []
    for split in ("gallery", "query"):
        images = list(images_to_embed(dataset, split, joining))
        count, path = sum(each.count for each in images), out_dir / f"{split}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_npy(path, dim, count, embed((each.blocks(dataset, BATCH_SIZE), each.count) for each in images))
        shards.append(EmbeddingShard(file=path.name, sha256=sha256_file(path), split=split, count=count))
    description = EmbeddingsDescription(
        network_sha256=network_sha256, dataset_digest=dataset.digest, dim=dim, shards=tuple(shards)
    )
    description.save(out_dir / DESCRIPTION_FILE)


def _write_npy(path: Path, dim: int, count: int, embedded: Iterable[tuple[Block, Vectors]]) -> None:
    """Write embeddings with labels and digests in NumPy's format, one block at a time."""
    dtype = np.dtype([("embedding", "<f4", (dim,)), ("label", "<i4"), ("digest", "u1", (32,))])
    header: dict[str, Any] = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    with disk_errors(path), path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block, vectors in embedded:
            rows = np.empty(len(block), dtype)
            rows["embedding"], rows["label"], rows["digest"] = vectors, block.labels, block.digests
            file.write(rows.tobytes())
