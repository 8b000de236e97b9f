"""Trivial recognizers that are compared with the candidate on its test images. One predicts the
most common class, the other the class of the nearest gallery image by pixels."""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from evernear.common.frozen import Frozen
from evernear.data.gallery import image_blocks, joining_gallery
from evernear.data.shards import Block, Dataset
from evernear.evaluation.compare import PairedCounts, paired_counts
from evernear.evaluation.measure import BATCH_SIZE, Outcomes
from evernear.evaluation.statistics import CONFIDENCE, Proportion, p_by_chance, proportion

SIDE_PX = 16
"""Images are reduced to this height and width, so that a shift by a few pixels has less effect."""
GALLERY_MAX = 10_000
QUERIES_MAX = 2_000
FLAT = 1e-6
"""Standard deviation of the pixels below which an image counts as constant."""


class Baseline(Frozen):
    name: str
    """A noun phrase, such as "the most common class"."""
    accuracy: Proportion
    comparison: PairedCounts
    """Improvements are queries that only the candidate answers correctly."""
    p_perfect: float
    """Probability, if both systems were equally good, of at least as many improvements as a
    recognizer without errors would have."""
    p_worst: float
    """The same for the regressions of a recognizer without correct answers."""
    p_by_chance: float
    ignores_images: bool = False
    """A recognizer must be better than a baseline that predicts without looking at the image."""

    def is_undecided(self, level: float) -> bool:
        """Whether the queries are too few to compare any recognizer with the baseline. If it makes
        too few errors to be beaten significantly, it is decisive only if it could be significantly
        better than a recognizer, and reads the image."""
        return self.p_perfect > level and (self.p_worst > level or self.ignores_images)

    @property
    def is_sure_per_group(self) -> bool:
        """Whether the baseline has errors in all groups, or correct answers in all groups. A
        recognizer that is the opposite then wins or loses all groups."""
        return self.ignores_images or min(self.p_perfect, self.p_worst) < 0.5 ** ((self.comparison.groups or 0) - 0.5)


def measure_baselines(outcomes: Outcomes, dataset: Dataset, batch_size: int = BATCH_SIZE) -> tuple[Baseline, ...]:
    """Measure both baselines against the candidate's ``outcomes`` on the test split.

    No recognizer that ignores the image is more accurate than one that always predicts the most
    common class of the test split. The nearest gallery image by pixels (`SIDE_PX`, each image
    standardized) requires no training. Its gallery and queries are spread evenly over the splits,
    with at most `GALLERY_MAX` and `QUERIES_MAX` images. For a class without an image in the gallery
    split, it uses the same train images as the candidate's index.
    """
    most_common = np.full_like(outcomes.labels, np.bincount(outcomes.labels).argmax())
    baselines = [_baseline("the most common class", most_common, outcomes, ignores_images=True)]
    if dataset.count("gallery"):
        in_gallery = dataset.manifest.label_counts("gallery")
        joining = {label: n for label, n in joining_gallery(dataset.manifest).items() if not in_gallery[label]}
        parts = image_blocks(dataset, "gallery", batch_size, joining)
        count = dataset.count("gallery") + sum(joining.values())
        gallery, gallery_labels, _ = _pixels(chain.from_iterable(blocks for blocks, _ in parts), count, GALLERY_MAX)
        queries, _, rows = _pixels(dataset.blocks("test", batch_size), dataset.count("test"), QUERIES_MAX)
        groups = None if outcomes.groups is None else outcomes.groups[rows]
        some = Outcomes(outcomes.correct[rows], outcomes.labels[rows], groups)
        nearest = gallery_labels[_nearest(gallery, queries)]
        height, width = (min(SIDE_PX, side) for side in dataset.shape[:2])
        name = f"the nearest gallery image by {height}x{width} pixels"
        baselines.append(_baseline(name, nearest, some))
    return tuple(baselines)


def _baseline(
    name: str, predictions: NDArray[np.integer], candidate: Outcomes, ignores_images: bool = False
) -> Baseline:
    correct = predictions == candidate.labels
    extremes = (Outcomes(np.full_like(correct, right), candidate.labels, candidate.groups) for right in (True, False))
    perfect, worst = (paired_counts(outcomes, correct) for outcomes in extremes)
    return Baseline(
        name=name,
        accuracy=proportion(int(correct.sum()), len(correct), CONFIDENCE),
        comparison=paired_counts(candidate, correct),
        p_perfect=perfect.p_better,
        p_worst=worst.p_worse,
        p_by_chance=p_by_chance(zip(candidate.labels.tolist(), predictions.tolist(), [1] * len(correct), strict=True)),
        ignores_images=ignores_images,
    )


def _nearest(gallery: NDArray[np.float32], queries: NDArray[np.float32]) -> NDArray[np.int64]:
    from evernear.index.faiss_compat import FaissIndex, faiss

    index = faiss.IndexFlatL2(gallery.shape[1])
    index.add(gallery)
    return FaissIndex(index).search(queries, 1)[1][:, 0]


def _pixels(
    blocks: Iterable[Block], count: int, count_max: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Up to ``count_max`` of ``count`` images, reduced and standardized (N, D), with their label
    indices (N,) and positions (N,)."""
    step = max(1, -(-count // count_max))
    pixels: list[NDArray[np.float32]] = []
    labels: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    for start, block in _numbered(blocks):
        rows = np.arange(-start % step, len(block), step)
        if len(rows):
            pixels.append(_reduce(block.images[rows]))
            labels.append(block.labels[rows])
            positions.append(start + rows)
    return np.concatenate(pixels), np.concatenate(labels), np.concatenate(positions)


def _numbered(blocks: Iterable[Block]) -> Iterator[tuple[int, Block]]:
    start = 0
    for block in blocks:
        yield start, block
        start += len(block)


def _reduce(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Average the pixels of images (N, H, W, C) over areas, and standardize each image, because
    brightness and contrast say little about a class."""
    import torch
    from torch.nn.functional import adaptive_avg_pool2d

    height, width = (min(SIDE_PX, side) for side in images.shape[1:3])
    reduced = adaptive_avg_pool2d(torch.from_numpy(images).permute(0, 3, 1, 2).float(), (height, width)).flatten(1)
    deviation, mean = torch.std_mean(reduced, dim=1, keepdim=True, correction=0)
    return ((reduced - mean) / deviation.clamp_min(FLAT)).numpy()
