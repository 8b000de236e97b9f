"""Build an index from gallery embeddings, and record its network's sha256."""

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors, sha256_file, write_atomically
from evernear.common.output import quantity
from evernear.common.plugins import FAISS
from evernear.data.group_numbers import GroupNumbers
from evernear.embedding.embeddings import EmbeddingBlock, Embeddings
from evernear.errors import DataError, IntegrityError, SettingsError
from evernear.index.calibrate import calibrate, is_nearest
from evernear.index.description import (
    DESCRIPTION_FILE,
    LABELS_FILE,
    RECALL,
    TOWARD_MEAN,
    IndexDescription,
    index_parts,
    wilson,
)
from evernear.index.faiss_compat import FaissIndex, faiss
from evernear.index.vectors import (
    Choice,
    ExactNeighbors,
    GalleryVectors,
    VectorIndex,
    exact_neighbors,
    index_backend,
    noise_of_means,
    sample_queries,
    select_labels,
)
from evernear.settings import IndexSettings

FLAT = "Flat"
FLAT_BYTES = 8 * 2**20
"""Largest gallery that is always searched exactly: 16,384 vectors of 128 dimensions. This takes 0.3
ms, about as long as decoding and embedding an image. Beyond, it would dominate the request time."""
COMPRESSED_FROM_BYTES = 64 * 2**20
"""Size below which a gallery is not compressed further than to fp16, whose distances are more exact
than those of `RaBitQ8`, and whose search takes half the time."""
CODES = ("RaBitQ8", "SQfp16", "Flat")
"""Encodings of the vectors in an inverted file, from the smallest to the exact one.

RaBitQ (Gao et al. 2024, arXiv:2409.09913) with 8 bits scales each vector separately. On a million
embeddings of deformed digits, it found 99.4% of 512 nearest vectors, and SQ8, which has nearly the
same size, at most 91%.
"""
TRAINING_VECTORS = 163_840
"""Maximum number of vectors to train an index (IVF, PQ): 84 MB at 128 dimensions."""
VECTORS_PER_LIST = 39
"""Training vectors that k-means needs for each list. FAISS warns if there are fewer."""
LARGEST_PROBED_SHARE = 1 / 8
"""Maximum share of the lists to search. If it misses the recall, the next encoding is tried."""


def choose_index(
    size: int,
    dim: int,
    make: Callable[[str], FaissIndex],
    queries: EmbeddingBlock,
    exact: ExactNeighbors,
) -> Choice:
    """Choose an index for ``size`` vectors. ``make`` builds and fills one from a factory string.

    It is Flat if `exact_search_reason` gives a reason. Otherwise, inverted files are tried in the
    order of `CODES`, without the first for galleries below `COMPRESSED_FROM_BYTES`, until one
    reaches `RECALL` on ``queries`` (`tune_index`). If none does, it is Flat.
    """
    flat_bytes = _size_bytes(FLAT, size, dim)
    if reason := exact_search_reason(flat_bytes, len(queries.labels)):
        return Choice(make(FLAT), FLAT, "", reason)
    rejected: list[str] = []
    lists = _number_of_lists(size)
    for code in CODES if flat_bytes >= COMPRESSED_FROM_BYTES else CODES[1:]:
        factory = f"IVF{lists},{code}"
        size_bytes = _size_bytes(factory, size, dim)
        index = make(factory)
        probes = [f"nprobe={number}" for number in _probes(lists)]
        tuned = tune_index(index, probes, queries, exact)
        reached = f"{factory} takes {_mb(size_bytes)} and finds {tuned.hits:,} of {tuned.queries:,} nearest vectors"
        if tuned.suffices:
            reason = f"{reached}; recall is at least {tuned.low:.4f} at 95% confidence; Flat takes {_mb(flat_bytes)}"
            return Choice(index, factory, tuned.search, "; ".join([*rejected, reason]))
        rejected.append(f"{reached}, too few for a recall of {RECALL:g}")
    return Choice(make(FLAT), FLAT, "", "; ".join([*rejected, "exact search remains"]))


def exact_search_reason(flat_bytes: int, queries: int) -> str:
    """Why no approximate index is tried, or empty. ``flat_bytes`` is the vectors' float32 size."""
    if flat_bytes <= FLAT_BYTES:
        return f"exact search of {_mb(flat_bytes)} is fast enough"
    if _lower_bound(queries, queries) < RECALL:
        return f"{queries:,} queries are too few to show a recall of {RECALL:g}, so the search is exact"
    return ""


@dataclass(frozen=True)
class Tuned:
    """The first search parameters that reach the required recall, or the last if none does."""

    search: str
    hits: int
    """Queries whose nearest vector was found."""
    queries: int
    low: float
    suffices: bool


def tune_index(index: VectorIndex, candidates: Sequence[str], queries: EmbeddingBlock, exact: ExactNeighbors) -> Tuned:
    """Set ``index`` to the first of ``candidates`` with `RECALL` at 95% confidence.

    ``candidates`` are search parameters such as ``nprobe=16``, from the fastest to the most exact.
    Recall@1 is relative to exact search. The lower end of its confidence interval is compared, so
    that a candidate does not pass by sampling error or as the best of several. It increases in this
    order, so bisection measures only a few.
    """
    total = len(queries.labels)
    hits: dict[str, int] = {}

    def low(search: str) -> float:
        index.set_search(search)
        distances, rows = index.search(queries.embeddings, 1)
        hits[search] = int(is_nearest(rows[:, 0], distances[:, 0], exact).sum())
        return _lower_bound(hits[search], total)

    position = bisect_left(candidates, RECALL, key=low)
    best = candidates[min(position, len(candidates) - 1)]
    index.set_search(best)
    return Tuned(best, hits[best], total, _lower_bound(hits[best], total), suffices=position < len(candidates))


def _lower_bound(count: int, total: int) -> float:
    """Lower end of the 95% confidence interval for the share ``count`` / ``total``."""
    return wilson(count / total, total, NormalDist().inv_cdf(0.975))[0]


def _number_of_lists(size: int) -> int:
    """The power of 2 nearest to 4 sqrt(size), or fewer if there are not enough training vectors."""
    most = min(size, TRAINING_VECTORS) // VECTORS_PER_LIST
    return max(1, min(2 ** round(math.log2(4 * math.sqrt(size))), most))


def _probes(lists: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12 ..., up to `LARGEST_PROBED_SHARE` of ``lists``."""
    power = 1
    while power <= max(1, lists * LARGEST_PROBED_SHARE):
        yield power
        if power > 1:
            yield power * 3 // 2
        power *= 2


def _size_bytes(factory: str, size: int, dim: int) -> int:
    """Size of Flat vectors, or of an inverted file's codes and 8-byte IDs. Centroids add < 2%."""
    code_bytes = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT).sa_code_size()
    return size * (code_bytes if factory == FLAT else code_bytes + 8)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:,.0f} kB"


def build_index(
    embeddings: Embeddings,
    labels: Sequence[str],
    settings: IndexSettings,
    out_dir: Path,
    exclude_labels: frozenset[str] = frozenset(),
    threshold: float | None = None,
    relative_threshold: float | None = None,
    owner: str = "",
    groups: GroupNumbers | None = None,
    toward_mean: float = TOWARD_MEAN,
) -> IndexDescription:
    """Index the gallery split, calibrate the threshold on the query split, and write to
    ``out_dir``.

    ``labels`` lists the dataset's labels by number. With ``groups``, the calibration excludes
    queries whose group has images in the train split or the gallery, unless no others exist.
    ``threshold`` and ``relative_threshold`` come from an `evernear.evaluation.open_set.OpenSet`
    (see `calibrate`). If the vectors are in a collection, ``owner`` is the store that owns it. The
    description is written last, so a directory without ``index.json`` has an incomplete index.
    """
    if settings.type is None and settings.search:
        needs = "needs an index.type; an automatic index sets its own parameters"
        raise SettingsError(f"index.search = {settings.search!r} {needs}.")
    known = np.array([label not in exclude_labels for label in labels])
    if next(select_labels(embeddings.blocks("gallery"), known), None) is None:
        raise DataError("The gallery is empty; raise data.gallery_fraction.")
    numbers, sums = _labels(embeddings, known)
    counts = np.bincount(numbers, minlength=len(labels))
    queries = sample_queries(embeddings, known, exclude=groups.seen_queries() if groups else frozenset())
    means = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
    noise = noise_of_means(means, counts)
    gallery = GalleryVectors(embeddings, tuple(labels), known, len(numbers), means, noise, toward_mean, owner)
    exact = exact_neighbors(queries, gallery.blocks())
    with _parameter_errors(settings, embeddings):
        chosen = _create(gallery, settings, queries, exact)
        calibration = calibrate(queries, exact, chosen.index, settings, threshold, relative_threshold)
    if groups is not None:
        calibration = calibration.model_copy(update={"independent": groups.independent(queries.digests)})

    with disk_errors(out_dir):
        (out_dir / DESCRIPTION_FILE).unlink(missing_ok=True)
    collection = chosen.index.save(out_dir)
    write_atomically(out_dir / LABELS_FILE, _npy(numbers))
    description = IndexDescription(
        network_sha256=embeddings.network_sha256,
        dataset_digest=embeddings.description.dataset_digest,
        factory=chosen.factory,
        search=chosen.search,
        reason=chosen.reason,
        dim=embeddings.dim,
        size=len(numbers),
        labels=tuple(labels),
        counts=tuple(counts.tolist()),
        toward_mean=toward_mean,
        k=settings.k,
        calibration=calibration,
        parts={name: sha256_file(out_dir / name) for name in index_parts(collection)},
        collection=collection,
    )
    description.save(out_dir / DESCRIPTION_FILE)
    return description


def _create(gallery: GalleryVectors, settings: IndexSettings, queries: EmbeddingBlock, exact: ExactNeighbors) -> Choice:
    if settings.backend != FAISS:
        with index_backend(settings.backend) as backend:
            chosen = backend.create(gallery, settings, queries, exact)
    elif settings.type is None:
        chosen = choose_index(gallery.size, gallery.embeddings.dim, partial(_make, gallery), queries, exact)
    else:
        chosen = Choice(_make(gallery, settings.type), settings.type, settings.search, "")
    if settings.search:
        try:
            chosen.index.set_search(settings.search)
        except RuntimeError:
            raise SettingsError(
                f"index.search = {settings.search!r} is not a parameter of a {settings.type} index."
            ) from None
    return chosen


def _make(gallery: GalleryVectors, factory: str) -> FaissIndex:
    dim = gallery.embeddings.dim
    try:
        # For unit vectors, the nearest has the largest inner product, which needs only one BLAS
        # call.
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError:
        raise SettingsError(
            f"index.type = {factory!r} is not an index type of FAISS for {dim} "
            "dimensions; use Flat, HNSW32 or IVF256,Flat, for example, or leave it out."
        ) from None
    if not index.is_trained:
        index.train(_sample(gallery))
    for block in gallery.blocks():
        index.add(block.embeddings)
    return FaissIndex(index)


@contextmanager
def _parameter_errors(settings: IndexSettings, embeddings: Embeddings) -> Generator[None]:
    """Convert a FAISS error to one that names the setting."""
    try:
        yield
    except RuntimeError as error:
        kind = f"index.type = {settings.type!r}" if settings.type else "The chosen index type"
        search = f" with index.search = {settings.search!r}" if settings.search else ""
        raise SettingsError(
            f"{kind}{search} does not work on the gallery's "
            f"{quantity(embeddings.count('gallery'), 'vector')}; use Flat."
        ) from error


def _labels(embeddings: Embeddings, known: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Label numbers of the gallery vectors (N,), and sums of each label's vectors (labels, D)."""
    numbers: list[NDArray[np.int32]] = []
    sums = np.zeros((len(known), embeddings.dim))
    for block in select_labels(embeddings.blocks("gallery"), known):
        numbers.append(block.labels.astype(np.int32))
        np.add.at(sums, block.labels, block.embeddings)
    if not np.isfinite(sums).all():
        raise IntegrityError("The network's embeddings are not finite numbers; train again.")
    return np.concatenate(numbers), sums


def _sample(gallery: GalleryVectors) -> NDArray[np.float32]:
    """About `TRAINING_VECTORS` gallery vectors, evenly spaced, or all if there are fewer."""
    step = max(1.0, gallery.embeddings.count("gallery") / TRAINING_VECTORS)
    blocks = (block.embeddings for block in gallery.blocks())
    return np.concatenate([block[np.arange(0, len(block), step).astype(np.int64)] for block in blocks])


def _npy(array: NDArray[Any]) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
