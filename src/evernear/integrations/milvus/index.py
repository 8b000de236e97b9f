"""Galleries in Milvus: one collection per index, and an alias for the champion's.

The same code works with a cluster, a standalone server, and Milvus Lite in a local file. A
collection's name contains an identifier of the store and a hash of the content, which never changes
once filled, so a release that names it also identifies the vectors.
"""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import sha256_bytes
from evernear.common.output import quantity
from evernear.embedding.embeddings import EmbeddingBlock
from evernear.errors import IntegrityError, SettingsError, TransientStoreError
from evernear.index.build import exact_search_reason, tune_index
from evernear.index.description import RECALL, Collection
from evernear.index.vectors import Choice, ExactNeighbors, GalleryVectors
from evernear.integrations.milvus.client import (
    TIMEOUT_S,
    Client,
    address,
    connect,
    drop,
    is_transient,
    milvus_errors,
    sentence,
    uri_of,
)
from evernear.settings import IndexSettings

ROW, LABEL, IMAGE, EMBEDDING = "row", "label", "image", "embedding"
"""Other programs read ``label`` and ``image`` (its SHA-256) through the alias."""
ROW_BLOCK_SIZE = 1000
"""Rows per insert: 16 MB with 4096 dimensions. Milvus accepts messages of up to 64 MB."""
QUERY_BLOCK_SIZE = 1024
SEARCH_TIMEOUT_S = 10.0
INDEX_TIMEOUT_S = 4 * 3600.0
POLL_S = 0.2
MAX_LABEL_BYTES = 65_535
INDEX_TYPES = ("FLAT", "IVF_FLAT", "IVF_SQ8", "IVF_PQ", "HNSW", "SCANN", "DISKANN", "AUTOINDEX")
EXACT, GRAPH = "FLAT", "HNSW,M=32,efConstruction=360"
"""The types from which the index step chooses if ``index.type`` is not set."""
BEAMS = tuple(f"ef={ef}" for ef in (16, 32, 64, 128, 256, 512, 1024))
"""Search parameters for `GRAPH`, from fastest to most accurate."""


class MilvusBackend:
    """``index.backend = milvus``, an `evernear.index.vectors.IndexBackend`."""

    def check(self, settings: IndexSettings) -> None:
        connect(uri_of(settings))

    def create(
        self, gallery: GalleryVectors, settings: IndexSettings, queries: EmbeddingBlock, exact: ExactNeighbors
    ) -> Choice:
        if settings.type is None:
            return choose(gallery, settings, queries, exact)
        return Choice(fill(gallery, settings, settings.type), settings.type, settings.search, "")

    def open(self, collection: Collection, shape: tuple[int, int], search: str) -> "MilvusIndex":
        return MilvusIndex.open(collection, shape, search)

    def drop(self, collection: Collection) -> None:
        drop(collection)


class MilvusIndex:
    """A collection open for search, an `evernear.index.vectors.VectorIndex`."""

    def __init__(
        self, collection: Collection, shape: tuple[int, int], search: str = "", *, strongly_consistent: bool = False
    ) -> None:
        """``strongly_consistent`` searches wait for earlier writes: up to 0.2 s on a cluster."""
        self.collection = collection
        self.shape = shape
        self._client = connect(collection.uri)
        self._consistency = "Strong" if strongly_consistent else "Bounded"
        self.set_search(search)

    @staticmethod
    def open(collection: Collection, shape: tuple[int, int], search: str) -> "MilvusIndex":
        """Open a release's collection. ``shape`` is the number of vectors and of dimensions."""
        index = MilvusIndex(collection, shape, search)
        with milvus_errors(collection.uri):
            if not index._client.has_collection(collection.name, timeout=TIMEOUT_S):
                raise _damaged(collection, "does not exist")
            index._client.load_collection(collection.name, timeout=TIMEOUT_S)
            actual = _count(index._client, collection.name), _dim(index._client, collection.name)
        if actual != shape:
            raise _damaged(
                collection, f"has {actual[0]:,} vectors of {actual[1]} dimensions, not {shape[0]:,} of {shape[1]}"
            )
        return index

    def search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Distances and row numbers of the nearest vectors, both (N, k), as in `VectorIndex`."""
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        rows = np.full((len(vectors), k), -1, np.int64)
        for start in range(0, len(vectors), QUERY_BLOCK_SIZE):
            for number, hits in enumerate(self._hits(vectors[start : start + QUERY_BLOCK_SIZE], k), start):
                rows[number, : len(hits)] = [hit[ROW] for hit in hits]
                scores[number, : len(hits)] = [hit["distance"] for hit in hits]
        squared = 2 - 2 * np.clip(scores, -1, 1)
        return np.where(rows >= 0, np.sqrt(np.maximum(squared, 0)), np.float32(np.inf)), rows

    def set_search(self, parameters: str) -> None:
        """Set the parameters for later searches, such as ``ef=64``."""
        self._parameters = _numbers(parameters.split(",") if parameters else [])

    def save(self, directory: Path) -> Collection:
        """Return the collection, which already contains the vectors."""
        return self.collection

    def _hits(self, vectors: NDArray[np.float32], k: int) -> Any:
        parameters = self._parameters
        if "ef" in parameters:  # the beam of an HNSW index cannot be narrower than its result
            parameters = parameters | {"ef": max(k, parameters["ef"])}
        with milvus_errors(self.collection.uri):
            search = partial(
                self._client.search,
                self.collection.name,
                list(np.ascontiguousarray(vectors, np.float32)),
                anns_field=EMBEDDING,
                limit=k,
                output_fields=[ROW],
                search_params={"metric_type": "IP", "params": parameters},
                consistency_level=self._consistency,
                timeout=SEARCH_TIMEOUT_S,
            )
            try:
                return search()
            except Exception as error:
                if is_transient(error):
                    raise
            # Load it again, because Milvus Lite forgets after a restart what was loaded.
            self._client.load_collection(self.collection.name, timeout=SEARCH_TIMEOUT_S)
            return search()


def fill(gallery: GalleryVectors, settings: IndexSettings, factory: str) -> MilvusIndex:
    """Fill a collection with ``gallery`` under an index of type ``factory``, such as ``HNSW,M=32``.
    An existing collection of the same store and content is reused, and completed if need be."""
    owner = f"_s{gallery.owner}" if gallery.owner else ""
    name = f"{settings.collection}{owner}_{_digest(gallery, factory)}"
    collection = Collection(uri=uri_of(settings), name=name)
    client, shape = connect(collection.uri), (gallery.size, gallery.embeddings.dim)
    with milvus_errors(collection.uri):
        if not client.has_collection(name, timeout=TIMEOUT_S):
            _create_collection(client, collection, gallery, factory)
        client.load_collection(name, timeout=TIMEOUT_S)
        if _count(client, name) != gallery.size:
            for rows in _rows(gallery):
                client.upsert(name, rows, timeout=TIMEOUT_S)
            client.flush(name, timeout=TIMEOUT_S)
        _await_index(client, name)
        actual = _count(client, name)
    if actual != gallery.size:
        raise _damaged(collection, f"has {quantity(actual, 'vector')} after {gallery.size:,} were written")
    return MilvusIndex(collection, shape, strongly_consistent=True)


def choose(gallery: GalleryVectors, settings: IndexSettings, queries: EmbeddingBlock, exact: ExactNeighbors) -> Choice:
    """Without ``index.type``, fill a collection and choose its search parameters on ``queries``."""
    size_bytes = gallery.size * gallery.embeddings.dim * 4
    if reason := exact_search_reason(size_bytes, len(queries.labels)):
        return Choice(fill(gallery, settings, EXACT), EXACT, "", reason)
    index = fill(gallery, settings, GRAPH)
    tuned = tune_index(index, BEAMS, queries, exact)
    reached = f"{GRAPH} finds {tuned.hits:,} of {tuned.queries:,} nearest vectors"
    if tuned.suffices:
        reason = f"{reached}; recall is at least {tuned.low:.4f} at 95% confidence"
        return Choice(index, GRAPH, tuned.search, reason)
    drop(index.collection)
    reason = f"{reached}, too few for a recall of {RECALL:g}; exact search remains"
    return Choice(fill(gallery, settings, EXACT), EXACT, "", reason)


def _damaged(collection: Collection, fault: str) -> IntegrityError:
    return IntegrityError(
        f"The collection {collection.name} in Milvus at {address(collection.uri)} {fault}; `evernear reindex` fills "
        "it again if the images are the same, otherwise promote another release with `evernear registry promote "
        "VERSION`."
    )


def _create_collection(client: Client, collection: Collection, gallery: GalleryVectors, factory: str) -> None:
    from pymilvus import DataType, MilvusException

    kind, *build = factory.split(",")
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field(ROW, DataType.INT64, is_primary=True)
    schema.add_field(LABEL, DataType.VARCHAR, max_length=MAX_LABEL_BYTES)
    schema.add_field(IMAGE, DataType.VARCHAR, max_length=64)
    schema.add_field(EMBEDDING, DataType.FLOAT_VECTOR, dim=gallery.embeddings.dim)
    try:
        if kind not in INDEX_TYPES:  # Milvus Lite accepts any name, and searches exactly
            raise RuntimeError(f"{kind} is not one of {', '.join(INDEX_TYPES)}")
        index = client.prepare_index_params()
        index.add_index(EMBEDDING, index_type=kind, metric_type="IP", params=_numbers(build))
        client.create_collection(collection.name, schema=schema, index_params=index, timeout=TIMEOUT_S)
    except (MilvusException, RuntimeError) as error:
        # Milvus creates the collection before the index, so an empty collection may remain.
        client.drop_collection(collection.name, timeout=TIMEOUT_S)
        raise SettingsError(
            f"index.type = {factory!r} does not work in Milvus at {address(collection.uri)}: {sentence(error)}; use "
            "FLAT or HNSW,M=32,efConstruction=360, for example."
        ) from None


def _rows(gallery: GalleryVectors) -> Iterator[list[dict[str, Any]]]:
    """Yield the collection's rows, `ROW_BLOCK_SIZE` at a time."""
    first = 0
    for block in gallery.blocks():
        for start in range(0, len(block.labels), ROW_BLOCK_SIZE):
            part = slice(start, start + ROW_BLOCK_SIZE)
            columns = zip(block.embeddings[part], block.labels[part], block.digests[part], strict=True)
            yield [
                {ROW: row, LABEL: gallery.labels[label], IMAGE: digest.tobytes().hex(), EMBEDDING: vector}
                for row, (vector, label, digest) in enumerate(columns, first + start)
            ]
        first += len(block.labels)


def _digest(gallery: GalleryVectors, factory: str) -> str:
    description = gallery.embeddings.description
    content = {
        "network": description.network_sha256,
        "shards": [shard.sha256 for shard in description.shards if shard.split == "gallery"],
        "labels": gallery.labels,
        "known": gallery.known.tolist(),
        "toward_mean": gallery.toward_mean,
        "factory": factory,
    }
    return sha256_bytes(json.dumps(content).encode())[:32]


def _count(client: Client, name: str) -> int:
    (row,) = client.query(name, filter="", output_fields=["count(*)"], consistency_level="Strong", timeout=TIMEOUT_S)
    return int(row["count(*)"])


def _dim(client: Client, name: str) -> int:
    fields = client.describe_collection(name, timeout=TIMEOUT_S)["fields"]
    return next(int(field["params"]["dim"]) for field in fields if field["name"] == EMBEDDING)


def _await_index(client: Client, name: str) -> None:
    """Until then, Milvus searches exactly, and the measured recall would be too high."""
    deadline_s = time.monotonic() + INDEX_TIMEOUT_S
    while client.describe_index(name, EMBEDDING, timeout=TIMEOUT_S)["pending_index_rows"]:
        if time.monotonic() > deadline_s:
            raise TransientStoreError(f"Milvus has not indexed the collection {name} after 4 hours; run again.")
        time.sleep(POLL_S)


def _numbers(assignments: list[str]) -> dict[str, int]:
    """Parse name=number pairs. Raises `RuntimeError`, like FAISS."""
    parsed: dict[str, int] = {}
    for assignment in assignments:
        name, _, number = assignment.partition("=")
        if not number.isdecimal():
            raise RuntimeError(f"{assignment!r} is not of the form name=number")
        parsed[name.strip()] = int(number)
    return parsed
