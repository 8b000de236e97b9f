"""If ``index.type`` is not set, choose the index type and its search parameter by recall, memory
and speed."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from evernear.embedding.embeddings import EmbeddingBlock
from evernear.index.calibrate import is_nearest
from evernear.index.exact import ExactNeighbors
from evernear.index.faiss_compat import FaissIndex, faiss
from evernear.index.vectors import VectorIndex
from evernear.settings import IndexSettings

FLAT = "Flat"
FLAT_BYTES = 8 * 2**20
"""Size of the largest gallery that is always searched exactly, which is the size of 16,384 vectors
of 128 dimensions. An exact search in this gallery takes 0.3 ms, which is about as long as decoding
and embedding an image. An exact search in a larger gallery would dominate the request time."""
COMPRESSED_FROM_BYTES = 64 * 2**20
"""Size below which a gallery is not compressed further than to fp16. The distances of fp16 vectors
are more exact than those of `RaBitQ8` vectors, and the search takes half the time."""
CODES = ("RaBitQ8", "SQfp16", "Flat")
"""Encodings of the vectors in an inverted file, from the smallest encoding to the exact
encoding.

RaBitQ (Gao et al. 2024, arXiv:2409.09913) with 8 bits scales each vector separately. On a million
embeddings of deformed digits, 99.4% of 512 nearest vectors were found with RaBitQ, and at most 91%
with SQ8, which has nearly the same size.
"""
TRAINING_VECTORS = 163_840
"""Maximum number of training vectors for an index with a trained part (IVF, PQ). With 128
dimensions, these vectors take 84 MB."""
VECTORS_PER_LIST = 39
"""Number of training vectors that k-means needs for each list. FAISS warns if there are fewer."""
LARGEST_PROBED_SHARE = 1 / 8
"""Maximum share of the lists to search. If this share is not sufficient for the required recall,
the next encoding is tried."""


@dataclass(frozen=True)
class Choice:
    """An index of the gallery, its factory string and search string, and the reason for the
    choice."""

    index: VectorIndex
    factory: str
    search: str
    reason: str


def choose_index(
    size: int,
    dim: int,
    settings: IndexSettings,
    make: Callable[[str], FaissIndex],
    queries: EmbeddingBlock,
    exact: ExactNeighbors,
) -> Choice:
    """Choose an index for ``size`` vectors of ``dim`` dimensions. ``make`` builds and fills an
    index from a factory string.

    If `exact_search_reason` returns a reason, the index is Flat. Otherwise, inverted files are
    tried in the order of `CODES`. For galleries smaller than `COMPRESSED_FROM_BYTES`, the first
    encoding is skipped. The first index that reaches ``settings.recall`` on ``queries`` is used
    (see `tune_index`). If no index reaches this recall, the index is Flat.
    """
    flat_bytes = _size_bytes(FLAT, size, dim)
    if reason := exact_search_reason(flat_bytes, len(queries.labels), settings.recall):
        return Choice(make(FLAT), FLAT, "", reason)
    rejected: list[str] = []
    lists = _number_of_lists(size)
    for code in CODES if flat_bytes >= COMPRESSED_FROM_BYTES else CODES[1:]:
        factory = f"IVF{lists},{code}"
        size_bytes = _size_bytes(factory, size, dim)
        index = make(factory)
        probes = [f"nprobe={number}" for number in _probes(lists)]
        tuned = tune_index(index, probes, settings.recall, queries, exact)
        reached = f"{factory} takes {_mb(size_bytes)} and finds {tuned.hits:,} of {tuned.queries:,} nearest vectors"
        if tuned.suffices:
            reason = f"{reached}; recall is at least {tuned.low:.4f} at 95% confidence; Flat takes {_mb(flat_bytes)}"
            return Choice(index, factory, tuned.search, "; ".join([*rejected, reason]))
        rejected.append(f"{reached}, too few for index.recall = {settings.recall:g}")
    return Choice(make(FLAT), FLAT, "", "; ".join([*rejected, "exact search remains"]))


def exact_search_reason(flat_bytes: int, queries: int, recall: float) -> str:
    """Return the reason why no approximate index is tried, or an empty string. The reason is either
    a small gallery or too few queries.

    ``flat_bytes`` is the size of the vectors as float32.
    """
    if flat_bytes <= FLAT_BYTES:
        return f"exact search of {_mb(flat_bytes)} is fast enough"
    if _lower_bound(queries, queries) < recall:
        return f"{queries:,} queries are too few to show a recall of {recall:g}, so the search is exact"
    return ""


@dataclass(frozen=True)
class Tuned:
    """The first search parameters that reach the required recall, or the last search parameters if
    none reach it."""

    search: str
    hits: int
    """Number of queries whose nearest vector was found."""
    queries: int
    low: float
    suffices: bool


def tune_index(
    index: VectorIndex, candidates: Sequence[str], target_recall: float, queries: EmbeddingBlock, exact: ExactNeighbors
) -> Tuned:
    """Set the search parameters of ``index`` to the first of ``candidates`` whose recall@1 relative
    to exact search reaches ``target_recall`` at 95% confidence.

    ``candidates`` are search parameters such as ``nprobe=16``, from the fastest to the most exact.
    The lower end of the confidence interval is compared with ``target_recall``. Otherwise, a
    candidate could appear sufficient because of sampling error or because it is the best of
    several. The recall increases in the order of the candidates, so bisection needs to measure only
    a few of them.
    """
    total = len(queries.labels)
    hits: dict[str, int] = {}

    def low(search: str) -> float:
        index.set_search(search)
        distances, rows = index.search(queries.embeddings, 1)
        hits[search] = int(is_nearest(rows[:, 0], distances[:, 0], exact).sum())
        return _lower_bound(hits[search], total)

    position = bisect_left(candidates, target_recall, key=low)
    best = candidates[min(position, len(candidates) - 1)]
    index.set_search(best)
    return Tuned(best, hits[best], total, _lower_bound(hits[best], total), suffices=position < len(candidates))


def _lower_bound(count: int, total: int) -> float:
    """Lower end of the 95% Wilson interval (1927) for the share ``count`` / ``total``."""
    z, share = NormalDist().inv_cdf(0.975), count / total
    half = z * math.sqrt(share * (1 - share) / total + (z / total) ** 2 / 4)
    return (share + z**2 / (2 * total) - half) / (1 + z**2 / total)


def _number_of_lists(size: int) -> int:
    """The power of 2 nearest to 4 sqrt(size), or a smaller number if there are not enough training
    vectors."""
    most = min(size, TRAINING_VECTORS) // VECTORS_PER_LIST
    return max(1, min(2 ** round(math.log2(4 * math.sqrt(size))), most))


def _probes(lists: int) -> Iterator[int]:
    """Numbers of lists to probe: 1, 2, 3, 4, 6, 8, 12 ..., up to `LARGEST_PROBED_SHARE` of
    ``lists``."""
    power = 1
    while power <= max(1, lists * LARGEST_PROBED_SHARE):
        yield power
        if power > 1:
            yield power * 3 // 2
        power *= 2


def _size_bytes(factory: str, size: int, dim: int) -> int:
    """Size of a Flat index, or of the codes and 8-byte IDs in an inverted file. The file's
    centroids add less than 2%."""
    code_bytes = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT).sa_code_size()
    return size * (code_bytes if factory == FLAT else code_bytes + 8)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
