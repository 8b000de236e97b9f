"""Build an index from gallery embeddings, and record its network's sha256."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors, sha256_file, write_atomically
from evernear.common.output import quantity
from evernear.common.plugins import FAISS
from evernear.data.groups import GroupNumbers
from evernear.embedding.embeddings import EmbeddingBlock, Embeddings
from evernear.errors import DataError, IntegrityError, SettingsError
from evernear.index.calibrate import calibrate
from evernear.index.choose import TRAINING_VECTORS, choose_index
from evernear.index.description import (
    CENTROIDS_FILE,
    DESCRIPTION_FILE,
    LABELS_FILE,
    IndexDescription,
    Rule,
    index_parts,
)
from evernear.index.exact import ExactNeighbors, exact_neighbors, sample_queries, select_labels
from evernear.index.faiss_compat import FaissIndex, faiss
from evernear.index.search import Gallery
from evernear.index.vectors import Choice, GalleryVectors, index_backend
from evernear.settings import IndexSettings


def build_index(
    embeddings: Embeddings,
    labels: Sequence[str],
    settings: IndexSettings,
    out_dir: Path,
    exclude_labels: frozenset[str] = frozenset(),
    threshold: float | None = None,
    reject_rate: float | None = None,
    owner: str = "",
    groups: GroupNumbers | None = None,
) -> IndexDescription:
    """Index the gallery split, calibrate the threshold on the query split, and write to
    ``out_dir``.

    ``labels`` lists the dataset's labels by number. With ``groups``, the calibration excludes
    queries whose group has images in the train split or the gallery, unless no others exist.
    ``threshold`` and ``reject_rate`` come from an `evernear.evaluation.open_set.OpenSet` (see
    `calibrate`). If the vectors are in a collection, ``owner`` is the store that owns it. The
    description is written last, so a directory without ``index.json`` has an incomplete index.
    """
    if settings.type is None and settings.search:
        needs = "needs an index.type; an automatic index sets its own parameters"
        raise SettingsError(f"index.search = {settings.search!r} {needs}.")
    known = np.array([label not in exclude_labels for label in labels])
    if next(select_labels(embeddings.blocks("gallery"), known), None) is None:
        raise DataError("The gallery is empty; raise data.gallery_fraction.")
    numbers, sums = _labels(embeddings, known)
    queries = sample_queries(embeddings, known, exclude=groups.seen_queries() if groups else frozenset())
    gallery = GalleryVectors(embeddings, tuple(labels), known, len(numbers), owner)
    exact = exact_neighbors(queries, gallery.blocks())
    with _parameter_errors(settings, embeddings):
        chosen = _create(gallery, settings, queries, exact)
        calibration = calibrate(queries, exact, chosen.index, settings, threshold, reject_rate)
    if groups is not None:
        calibration = calibration.model_copy(update={"independent": groups.independent(queries.digests)})

    with disk_errors(out_dir):
        (out_dir / DESCRIPTION_FILE).unlink(missing_ok=True)
    collection = chosen.index.save(out_dir)
    write_atomically(out_dir / LABELS_FILE, _npy(numbers))
    centroids = _unit_rows(sums)
    write_atomically(out_dir / CENTROIDS_FILE, _npy(centroids))
    description = IndexDescription(
        network_sha256=embeddings.network_sha256,
        dataset_digest=embeddings.description.dataset_digest,
        factory=chosen.factory,
        search=chosen.search,
        reason=chosen.reason,
        dim=embeddings.dim,
        size=len(numbers),
        labels=tuple(labels),
        counts=tuple(np.bincount(numbers, minlength=len(labels)).tolist()),
        label_by="vote",
        k=settings.k,
        calibration=calibration,
        parts={name: sha256_file(out_dir / name) for name in index_parts(collection)},
        collection=collection,
    )
    label_by = choose_rule(Gallery(description, chosen.index, numbers, centroids), queries)
    description = description.model_copy(update={"label_by": label_by})
    description.save(out_dir / DESCRIPTION_FILE)
    return description


def choose_rule(gallery: Gallery, queries: EmbeddingBlock) -> Rule:
    """``centroid`` if its accuracy on ``queries`` exceeds the vote's by over one standard error.

    The vote is better for classes of several clusters. If classes overlap, the nearest vectors are
    a small and noisy sample, whose noise the centroid averages out: on CIFAR-10, it is 1.1 points
    more accurate than the vote of five neighbors.
    """
    neighbors = gallery.search(queries.embeddings, gallery.description.k)
    by_vote = gallery.label(queries.embeddings, neighbors, "vote") == queries.labels
    by_centroid = gallery.label(queries.embeddings, neighbors, "centroid") == queries.labels
    gained = by_centroid.astype(np.float64) - by_vote
    return "centroid" if gained.mean() > gained.std() / math.sqrt(len(gained)) else "vote"


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


def _unit_rows(sums: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rows of zeros, which belong to labels without vectors, do not change."""
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return (sums / np.where(lengths > 0, lengths, 1)).astype(np.float32)
