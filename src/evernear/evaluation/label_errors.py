"""Find images whose label looks wrong, by confident learning (Northcutt, Jiang and Chuang 2021,
"Confident Learning: Estimating Uncertainty in Dataset Labels", arXiv:1911.00068).

The class shares among an image's nearest neighbors serve as its class probabilities. A network
embeds each of its training images among others of the labeled class, even if the label is wrong.
Each fold of the images is therefore embedded by a network that is trained briefly on the others,
and neighbors are searched within it, so that nothing depends on the label that is checked.
"""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from evernear.common.disk import sha256_bytes
from evernear.common.store import open_store
from evernear.data.manifest import SPLITS, Manifest, Shard
from evernear.data.shards import Block, Dataset
from evernear.data.writer import row_dtype, shard_key
from evernear.embedding.artifact import load_trained
from evernear.embedding.clock import OnStep
from evernear.embedding.data_loader import embed_images
from evernear.embedding.export import whiten_network
from evernear.embedding.recipe import Recipe
from evernear.embedding.train import train_network
from evernear.index.faiss_compat import faiss

FOLDS = 2
NEIGHBORS = 20
EXACT = 1 - 1e-6
"""Smallest cosine similarity at which two embeddings count as the same picture. Copies do not
vote."""
NEAR_DUPLICATE = 0.98
"""Smallest pixel correlation at which two images count as near-duplicates."""
_BATCH_IMAGES = 1024


class Embedded(NamedTuple):
    """The images of one fold: unit vectors (N, D), label indices (N,), sha256 digests as uint8 (N,
    32), and pixels (N, H, W, C)."""

    vectors: NDArray[np.float32]
    labels: NDArray[np.int64]
    digests: NDArray[np.uint8]
    images: NDArray[np.uint8]


class LabelError(NamedTuple):
    """A row of the fold whose label looks wrong. ``margin`` is the share of votes for the label
    minus that for ``suggested``. ``duplicate`` is the row of a near-duplicate with a different
    label, or -1 if the votes contradict the label."""

    row: int
    suggested: int
    margin: float
    duplicate: int = -1


def embed_folds(
    dataset: Dataset,
    recipe: Recipe,
    on_step: OnStep | None = None,
    on_fold: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[Embedded]:
    """Embed the images of all splits, fold by fold, each with a network that was not trained on it
    and is discarded. Only the images of the current fold are in memory. ``on_fold`` is called
    before each fold with the numbers of completed and of all folds."""
    for fold in range(FOLDS):
        on_fold(fold, FOLDS)
        with TemporaryDirectory(prefix="evernear-labels-") as scratch:
            others = _without_fold(dataset, fold, Path(scratch))
            train_network(others, recipe, Path(scratch) / "trained", on_step=on_step)
            network = _as_exported(Path(scratch) / "trained", others)
        stored = (block for split in SPLITS for block in dataset.blocks(split, _BATCH_IMAGES))
        blocks = [block.select(_fold_of(block) == fold) for block in stored]
        yield Embedded(
            np.concatenate([embed_images(network, block.images) for block in blocks if len(block)]),
            np.concatenate([block.labels for block in blocks]),
            np.concatenate([block.digests for block in blocks]),
            np.concatenate([block.images for block in blocks]),
        )


def _as_exported(trained_dir: Path, dataset: Dataset) -> nn.Module:
    trained, network = load_trained(trained_dir)
    if trained.architecture.frozen:  # the last layer of a frozen backbone whitens its features
        return network.eval()
    return whiten_network(network, trained.architecture.embedding_dim, dataset, frozenset())


def find_label_errors(embedded: Embedded) -> list[LabelError]:
    """The images whose label looks wrong, the most suspect first: both of each pair of
    near-duplicates with different labels, then those whose neighbors vote against the label."""
    rows = nearest_others(embedded.vectors, NEIGHBORS)
    duplicates = _near_duplicates(embedded, rows)
    listed = {error.row for error in duplicates}
    return [*duplicates, *(error for error in by_votes(embedded.labels, rows) if error.row not in listed)]


def nearest_others(vectors: NDArray[np.float32], neighbors: int) -> NDArray[np.int64]:
    """For each vector, the rows of the nearest other vectors, nearest first (N, ``neighbors``).
    Copies of the image are left out, and missing neighbors are -1."""
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    wanted = min(2 * neighbors + 1, len(vectors))
    neighbors_of = np.full((len(vectors), neighbors), -1, np.int64)
    for start in range(0, len(vectors), _BATCH_IMAGES):
        cosines, rows = index.search(vectors[start : start + _BATCH_IMAGES], wanted)
        own_rows = np.arange(start, start + len(rows))[:, None]
        is_other = (rows != own_rows) & (cosines < EXACT)
        order = np.argsort(~is_other, axis=1, kind="stable")[:, :neighbors]
        chosen = np.where(np.take_along_axis(is_other, order, 1), np.take_along_axis(rows, order, 1), -1)
        neighbors_of[start : start + len(rows), : chosen.shape[1]] = chosen
    return neighbors_of


def by_votes(labels: NDArray[np.int64], rows: NDArray[np.int64]) -> list[LabelError]:
    """The off-diagonal entries of the confident joint (arXiv:1911.00068, section 3), sorted by
    margin.

    ``rows`` (N, K) contains the neighbors. The threshold for a class is the mean share of votes
    that it receives from the neighbors of images with that label. An image is listed if, of the
    classes whose share of its votes reaches their threshold, the largest is not its label.
    Votes are stored per neighbor, so memory use does not grow with the number of classes.
    """
    votes = np.where(rows >= 0, labels[rows], -1)
    own_shares = (votes == labels[:, None]).mean(axis=1)
    count = np.bincount(labels)
    thresholds = np.bincount(labels, own_shares) / np.maximum(count, 1)
    errors: list[LabelError] = []
    for start in range(0, len(labels), _BATCH_IMAGES):
        part = votes[start : start + _BATCH_IMAGES]
        shares = (part[:, :, None] == part[:, None, :]).mean(axis=2)
        shares[(part < 0) | (shares < thresholds[part])] = 0
        best = shares.argmax(axis=1)
        indices = np.arange(len(part))
        suggested, share = part[indices, best], shares[indices, best]
        for index in np.flatnonzero((share > 0) & (suggested != labels[start : start + len(part)])):
            row = start + int(index)
            errors.append(LabelError(row, int(suggested[index]), float(own_shares[row] - share[index])))
    return sorted(errors, key=lambda error: error.margin)


def _near_duplicates(embedded: Embedded, rows: NDArray[np.int64]) -> list[LabelError]:
    """Pairs of neighbors with different labels and nearly the same pixels. Either label may be
    wrong."""
    votes = embedded.labels[rows]
    errors: dict[int, LabelError] = {}
    for row, column in np.argwhere((rows >= 0) & (votes != embedded.labels[:, None])):
        other = int(rows[row, column])
        if _correlation(embedded.images[row], embedded.images[other]) >= NEAR_DUPLICATE:
            for image, neighbor in ((int(row), other), (other, int(row))):
                errors.setdefault(image, LabelError(image, int(embedded.labels[neighbor]), 0.0, neighbor))
    return list(errors.values())


def _correlation(first_image: NDArray[np.uint8], second_image: NDArray[np.uint8]) -> float:
    first, second = (image.astype(np.float32).ravel() - image.mean() for image in (first_image, second_image))
    scale = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / scale if scale else 0.0


def _without_fold(dataset: Dataset, fold: int, directory: Path) -> Dataset:
    store = open_store((directory / "store").as_uri())
    shards: list[Shard] = []
    for split in ("train", "gallery"):
        for shard in dataset.shards(split):
            blocks = [block.select(_fold_of(block) != fold) for block in dataset.shard_blocks(shard)]
            rows = np.empty(sum(map(len, blocks)), row_dtype(dataset.shape))
            if not len(rows):
                continue
            rows["image"] = np.concatenate([block.images for block in blocks])
            rows["label"] = np.concatenate([block.labels for block in blocks])
            rows["group"] = 0
            rows["digest"] = np.concatenate([block.digests for block in blocks])
            buffer = io.BytesIO()
            np.save(buffer, rows, allow_pickle=False)
            sha256 = sha256_bytes(data := buffer.getvalue())
            store.put(shard_key(dataset.manifest.name, sha256), data)
            counts = np.bincount(rows["label"], minlength=len(dataset.labels)).tolist()
            label_counts = {label: count for label, count in zip(dataset.labels, counts, strict=True) if count}
            shards.append(shard.model_copy(update={
                "sha256": sha256, "count": len(rows), "size_bytes": len(data), "label_counts": label_counts
            }))  # fmt: skip
    manifest: Manifest = dataset.manifest.model_copy(update={"shards": tuple(shards), "store_uri": store.uri})
    return Dataset(manifest, store)


def _fold_of(block: Block) -> NDArray[np.uint8]:
    """The fold of each image, derived from the content so that all copies are in the same fold."""
    return block.digests[:, -1] % FOLDS
