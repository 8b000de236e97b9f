"""Collect the `Examples` of an evaluation, in bounded memory. `ExampleCollector` observes the
candidate's measurement (`evernear.evaluation.measure`), so no image is embedded twice."""

import hashlib
import time
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.common.step_results import Computed, compute_once, result_key
from evernear.common.store import Store
from evernear.data.gallery import image_blocks
from evernear.data.preprocess import Pixels
from evernear.data.shards import Dataset
from evernear.evaluation.examples import (
    BINS,
    TILE_PX,
    Examples,
    IndexFigures,
    MapPoint,
    Mistake,
    NeighborImage,
    Sample,
    Tiles,
    histogram,
)
from evernear.evaluation.measure import AnsweredBlock

if TYPE_CHECKING:  # reading an evaluation must not import torch or FAISS
    from evernear.evaluation.recognizer import Recognizer


MISTAKES = 24
NEIGHBORS = 4
MAP_POINTS = 500
SAMPLE_CLASSES = 20
SAMPLES_PER_CLASS = 6
NEW_IMAGES = 24
MAP_TILE_PX = 32
TIMED_QUERIES = 30


class _Query(NamedTuple):
    """An answer whose neighbors' images are not yet known."""

    image: Pixels
    embedding: NDArray[np.float32]
    label: int
    predicted: int
    unknown: bool
    distance: float
    rows: NDArray[np.int64]
    neighbors: NDArray[np.int32]
    distances: NDArray[np.float32]

    @staticmethod
    def of(answered: AnsweredBlock, row: int) -> "_Query":
        block, embeddings, near, answers = answered
        answer = int(answers.labels[row]), bool(answers.unknown[row]), float(answers.distances[row])
        first = row, slice(NEIGHBORS)
        neighbors = near.rows[first], near.labels[first], near.distances[first]
        return _Query(block.images[row], embeddings[row], int(block.labels[row]), *answer, *neighbors)


class ExampleCollector:
    def __init__(self, recognizer: "Recognizer", dataset: Dataset) -> None:
        self._recognizer = recognizer
        self._dataset = dataset
        total = dataset.count("test")
        self._sampled = np.sort(np.random.default_rng(0).choice(total, min(total, MAP_POINTS), replace=False))
        self._seen = 0
        self._mistakes: list[_Query] = []
        self._map: list[_Query] = []
        self._histograms = np.zeros((2, BINS), np.int64)

    def add(self, answered: AnsweredBlock) -> None:
        """Collect the examples of the next block. Mistakes are sorted by distance, those that were
        called unknown last."""
        block, answers = answered.block, answered.answers
        wrong = answers.labels != block.labels
        for group, selected in enumerate((~wrong, wrong)):
            self._histograms[group] += histogram(answers.distances[selected])
        missed = wrong | answers.unknown
        clearest = np.flatnonzero(missed)
        clearest = clearest[np.lexsort((answers.distances[missed], answers.unknown[missed]))][:MISTAKES]
        self._mistakes += [_Query.of(answered, row) for row in clearest]
        self._mistakes = sorted(self._mistakes, key=lambda query: (query.unknown, query.distance))[:MISTAKES]
        first, self._seen = self._seen, self._seen + len(block)
        rows = self._sampled[(self._sampled >= first) & (self._sampled < self._seen)] - first
        self._map += [_Query.of(answered, row) for row in rows]

    def finish(self, champion_dataset: Dataset | None = None) -> Examples:
        """With the champion's dataset, the examples include images that were added since."""
        tiles = Tiles(self._dataset.shape, TILE_PX)
        mistakes = self._with_neighbors(tiles)
        map_tiles = Tiles(self._dataset.shape, MAP_TILE_PX)
        for query in self._map:
            map_tiles.add(query.image)
        return Examples(
            mistakes=mistakes,
            map=self._points(),
            distances_right=tuple(self._histograms[0].tolist()),
            distances_wrong=tuple(self._histograms[1].tolist()),
            samples=_samples(self._dataset, tiles),
            new_images=_new_images(self._dataset, champion_dataset, tiles) if champion_dataset else (),
            images_before=champion_dataset.manifest.images_by_class() if champion_dataset else None,
            index=self._index_figures(),
            images=tiles.sheet(),
            map_images=map_tiles.sheet(),
        )

    def _with_neighbors(self, tiles: Tiles) -> tuple[Mistake, ...]:
        wanted = {int(row) for query in self._mistakes for row in query.rows if row >= 0}
        gallery = {row: tiles.add(image) for row, image in self._gallery_images(wanted)}
        return tuple(
            Mistake(
                label=self._name(query.label),
                predicted=self._name(query.predicted),
                unknown=query.unknown,
                distance=query.distance,
                tile=tiles.add(query.image),
                neighbors=tuple(
                    NeighborImage(label=self._name(int(label)), distance=float(distance), tile=gallery[int(row)])
                    for row, label, distance in zip(query.rows, query.neighbors, query.distances, strict=True)
                    if int(row) in gallery
                ),
            )
            for query in self._mistakes
        )

    def _gallery_images(self, rows: set[int]) -> Iterable[tuple[int, Pixels]]:
        """The gallery images of the index ``rows``. The index has the order of the embed step."""
        if not rows:
            return
        numbers, first = self._recognizer.gallery.label_indices, 0
        joined = Counter(self._dataset.labels[number] for number in numbers[self._dataset.count("gallery") :])
        for blocks, _ in image_blocks(self._dataset, "gallery", 512, joined):
            for block in blocks:
                for row in rows.intersection(range(first, first + len(block))):
                    if numbers[row] == block.labels[row - first]:
                        yield row, block.images[row - first]
                first += len(block)

    def _points(self) -> tuple[MapPoint, ...]:
        if not self._map:
            return ()
        positions = map_positions(np.stack([query.embedding for query in self._map]), self._dataset.store)
        return tuple(
            MapPoint(
                x=round(float(x), 4),
                y=round(float(y), 4),
                label=self._name(query.label),
                predicted=self._name(query.predicted),
                unknown=query.unknown,
            )
            for (x, y), query in zip(positions, self._map, strict=True)
        )

    def _index_figures(self) -> IndexFigures:
        gallery = self._recognizer.gallery
        described = gallery.description
        embed_ms, search_ms = [0.0], [0.0]
        for query in self._map[:TIMED_QUERIES]:
            started_s = time.perf_counter()
            embedded = self._recognizer.embed(query.image[None])
            embedded_s = time.perf_counter()
            gallery.search(embedded, described.k)
            embed_ms.append(1000 * (embedded_s - started_s))
            search_ms.append(1000 * (time.perf_counter() - embedded_s))
        return IndexFigures(
            **described.model_dump(include=set(IndexFigures.model_fields)),
            embed_ms=median(embed_ms),
            search_ms=median(search_ms),
        )

    def _name(self, number: int) -> str:
        return self._dataset.labels[number]


def _samples(dataset: Dataset, tiles: Tiles) -> tuple[Sample, ...]:
    counts = dataset.manifest.label_counts("train")
    labels = [label for label in dataset.labels if counts[label]][:SAMPLE_CLASSES]
    shards = {shard.sha256 for shard in dataset.shards("train")}
    return _pick(dataset, dict.fromkeys(labels, SAMPLES_PER_CLASS), shards, tiles)


def _new_images(dataset: Dataset, before: Dataset, tiles: Tiles) -> tuple[Sample, ...]:
    """Images from shards that ``before`` does not contain. Each ingest adds shards and changes
    none."""
    earlier = {shard.sha256 for shard in before.shards("train")}
    added = [shard for shard in dataset.shards("train") if shard.sha256 not in earlier]
    labels = sorted({label for shard in added for label, count in shard.label_counts.items() if count})
    labels = labels[:NEW_IMAGES]
    per_class = NEW_IMAGES // max(1, len(labels))
    return _pick(dataset, dict.fromkeys(labels, min(SAMPLES_PER_CLASS, per_class)), {s.sha256 for s in added}, tiles)


def _pick(dataset: Dataset, wanted: dict[str, int], shards: set[str], tiles: Tiles) -> tuple[Sample, ...]:
    """The first images of each class in the train ``shards``. ``wanted`` has their number per
    class. A shard without wanted images is not read."""
    picked: dict[str, list[int]] = {label: [] for label in wanted}
    missing = {dataset.labels.index(label): count for label, count in wanted.items()}
    for shard in dataset.shards("train"):
        names = {dataset.labels[number] for number in missing}
        if shard.sha256 not in shards or not names.intersection(shard.label_counts):
            continue
        for block in dataset.shard_blocks(shard, 512):
            for number in [*missing]:
                for row in np.flatnonzero(block.labels == number)[: missing[number]]:
                    picked[dataset.labels[number]].append(tiles.add(block.images[row]))
                    missing[number] -= 1
                if not missing[number]:
                    del missing[number]
            if not missing:
                break
    return tuple(Sample(label=label, tiles=tuple(numbers)) for label, numbers in picked.items() if numbers)


MAP_CODE = ("evaluation/example_collector.py",)
LIBRARIES = ("numpy", "scikit-learn")
"""Libraries whose versions affect the positions."""


def map_positions(embeddings: NDArray[np.float32], store: Store) -> NDArray[np.float32]:
    """Like `project`, and stored for later runs on the same images with the same network."""

    def compute() -> Computed:
        return Computed("map of embeddings", {"positions": project(embeddings).tolist()})

    sha256 = hashlib.sha256(embeddings.tobytes()).hexdigest()
    key = result_key("embedding map", MAP_CODE, LIBRARIES, embeddings=sha256, shape=[*embeddings.shape])
    computed = compute_once(store, key, None, compute)
    return np.array(computed.output["positions"], np.float32)


def project(embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
    """Positions (N, 2) in the unit square, from t-SNE of ``embeddings`` (N, D).

    Principal components as the starting positions halve the number of iterations (Kobak and Berens
    2019, https://doi.org/10.1038/s41467-019-13056-x). If there are fewer than four embeddings, or
    if all are equal, all positions are in the middle.
    """
    from sklearn.manifold import TSNE

    count = len(embeddings)
    if count < 4 or np.ptp(embeddings, axis=0).max() < 1e-6:
        return np.full((count, 2), 0.5, np.float32)
    init = "pca" if embeddings.shape[1] > 1 else "random"
    model = TSNE(perplexity=min(30.0, (count - 1) / 3), init=init, random_state=0, max_iter=500)
    positions = model.fit_transform(embeddings)
    low, high = positions.min(axis=0), positions.max(axis=0)
    return (positions - low) / np.maximum(high - low, 1e-9)
