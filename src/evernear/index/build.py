"""Gallery embeddings to a FAISS index, stamped with the network that made them."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evernear.disk import atomic_file, disk_errors, sha256_file, write_atomically
from evernear.embedding.embed import Embeddings
from evernear.errors import DataError, IntegrityError, SettingsError
from evernear.index.calibrate import calibrate, of_known
from evernear.index.description import (
    CENTROIDS_FILE,
    DESCRIPTION_FILE,
    LABELS_FILE,
    PARTS,
    VECTORS_FILE,
    IndexDescription,
)
from evernear.index.library import faiss, write_index
from evernear.settings import IndexSettings

TRAINING_VECTORS = 262_144
"""Vectors that an index with a trained part (IVF, PQ) is trained on at most: 128 MB at 128 dimensions."""


def build(
    embeddings: Embeddings,
    labels: Sequence[str],
    settings: IndexSettings,
    out_dir: Path,
    exclude_labels: frozenset[str] = frozenset(),
    threshold: float | None = None,
) -> IndexDescription:
    """Index the gallery split, calibrate on the query split, and write both to ``out_dir``.

    ``labels`` are the dataset's, by number. Images of ``exclude_labels`` take no part. ``threshold`` is what
    a probe found (`evernear.evaluation.probe.OpenSet`); without one it is found here. The description is
    written last: a directory without ``index.json`` is an index that never was finished.

    Raises:
        StoreError: the disk is full, or ``out_dir`` cannot be written.
        DataError: no gallery, fewer than two classes in it, or no query.
        SettingsError: FAISS does not know the index type or its search parameters, or has too few vectors for
            it. IntegrityError: an embedding is not finite.
    """
    known = np.array([label not in exclude_labels for label in labels])
    if next(of_known(embeddings.blocks("gallery"), known), None) is None:
        raise DataError("The gallery is empty; raise data.gallery_fraction.")
    index = _make(embeddings, known, settings)
    with _refusals(settings, embeddings):
        numbers, sums = _add(index, embeddings, known)
        calibration = calibrate(embeddings, known, index, settings.false_accept_rate, threshold)

    with disk_errors(out_dir):
        (out_dir / DESCRIPTION_FILE).unlink(missing_ok=True)
    with atomic_file(out_dir / VECTORS_FILE) as file:
        write_index(index, file)
    write_atomically(out_dir / LABELS_FILE, _npy(numbers))
    write_atomically(out_dir / CENTROIDS_FILE, _npy(_unit_rows(sums)))
    description = IndexDescription(
        network_sha256=embeddings.network_sha256,
        dataset_digest=embeddings.description.dataset_digest,
        factory=settings.factory,
        search=settings.search,
        dim=embeddings.dim,
        size=len(numbers),
        labels=tuple(labels),
        counts=tuple(np.bincount(numbers, minlength=len(labels)).tolist()),
        label_by=settings.label_by,
        k=settings.k,
        calibration=calibration,
        parts={name: sha256_file(out_dir / name) for name in PARTS},
    )
    write_atomically(out_dir / DESCRIPTION_FILE, description.model_dump_json(indent=2))
    return description


def _make(embeddings: Embeddings, known: NDArray[np.bool_], settings: IndexSettings) -> "faiss.Index":
    try:
        # Unit vectors are as near as their inner product is large, and BLAS computes that and nothing else.
        index = faiss.index_factory(embeddings.dim, settings.factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError:
        raise SettingsError(
            f"index.factory = {settings.factory!r} is no index that FAISS knows at {embeddings.dim} "
            "dimensions; Flat, HNSW32 and IVF256,Flat are some."
        ) from None
    if not index.is_trained:
        with _refusals(settings, embeddings):
            index.train(_sample(embeddings, known))
    if settings.search:
        try:
            faiss.ParameterSpace().set_index_parameters(index, settings.search)
        except RuntimeError:
            raise SettingsError(
                f"index.search = {settings.search!r} is not a parameter of a {settings.factory} index."
            ) from None
    return index


@contextmanager
def _refusals(settings: IndexSettings, embeddings: Embeddings) -> Generator[None]:
    """FAISS finds out while it trains, adds or searches that it cannot, and says so in its own terms."""
    try:
        yield
    except RuntimeError as error:
        search = f" with index.search = {settings.search!r}" if settings.search else ""
        raise SettingsError(
            f"index.factory = {settings.factory!r}{search} does not work on the gallery's "
            f"{embeddings.count('gallery'):,} vectors; use Flat."
        ) from error


def _add(
    index: "faiss.Index", embeddings: Embeddings, known: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Add the gallery; return each vector's label number (N,) and each label's sum (labels, D)."""
    numbers: list[NDArray[np.int32]] = []
    sums = np.zeros((len(known), embeddings.dim))
    for block in of_known(embeddings.blocks("gallery"), known):
        index.add(block.embeddings)
        numbers.append(block.labels.astype(np.int32))
        np.add.at(sums, block.labels, block.embeddings)
    if not np.isfinite(sums).all():
        raise IntegrityError("The network's embeddings are not finite numbers; train again.")
    return np.concatenate(numbers), sums


def _sample(embeddings: Embeddings, known: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Gallery vectors evenly over all shards, at most `TRAINING_VECTORS`."""
    step = -(-embeddings.count("gallery") // TRAINING_VECTORS)
    # Copies, for a view would keep the whole block in memory.
    return np.concatenate([block.embeddings[::step].copy() for block in of_known(embeddings.blocks("gallery"), known)])


def _npy(array: NDArray[Any]) -> bytes:
    """``array`` in numpy's file format."""
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _unit_rows(sums: NDArray[np.float64]) -> NDArray[np.float32]:
    """Each row brought to unit length; rows of zeros stay (labels without a vector)."""
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return (sums / np.where(lengths > 0, lengths, 1)).astype(np.float32)
