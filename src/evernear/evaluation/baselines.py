"""Trivial recognizers that are compared with the candidate on its test images. One predicts the
most common class, the other the class of the nearest gallery image by pixels."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.data.gallery import image_blocks, joining_gallery
from evernear.data.group_numbers import group_numbers
from evernear.data.manifest import SPLITS, Split
from evernear.data.shards import Block, Dataset
from evernear.data.splits import choose_group_split, images_of_all_splits, split_fractions
from evernear.data.writer import group_digest
from evernear.evaluation.compare import PairedCounts, paired_counts
from evernear.evaluation.measure import BATCH_SIZE, Outcomes
from evernear.evaluation.statistics import CONFIDENCE, Proportion, p_by_chance, proportion
from evernear.settings import DataSettings, RunSettings

if TYPE_CHECKING:  # reading an evaluation must not import torch
    from evernear.embedding.features import FrozenFeatures

SIDE_PX = 16
"""Images are reduced to this height and width, so that a shift by a few pixels has less effect."""
GALLERY_MAX = 10_000
QUERIES_MAX = 2_000
PRETRAINED_MAX = 50_000
"""Most images whose pretrained features are compared, which take 256 MB."""
FLAT = 1e-6
"""Standard deviation of the pixels below which an image counts as constant."""


class Baseline(Frozen):
    name: str
    """A noun phrase, such as "the most common class"."""
    label_right: Proportion
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
    is_part: bool = False
    """The candidate starts from the baseline's network, and must only not be worse."""

    def must_be_beaten(self, level: float) -> bool:
        """Whether a recognizer must be significantly better, because one without errors would be.
        Otherwise, it must not be significantly worse."""
        return self.p_perfect <= level and not self.is_part

    def is_undecided(self, level: float) -> bool:
        """Whether the queries are too few to compare any recognizer with the baseline. One with too
        few errors to be beaten is decisive only if it could beat a recognizer, and reads the
        image."""
        return not self.must_be_beaten(level) and (self.p_worst > level or self.ignores_images)

    @property
    def is_sure_per_group(self) -> bool:
        """Whether the baseline has errors in all groups, or correct answers in all groups. A
        recognizer that is the opposite then wins or loses all groups."""
        return self.ignores_images or min(self.p_perfect, self.p_worst) < 0.5 ** ((self.comparison.groups or 0) - 0.5)


def measure_baselines(outcomes: Outcomes, dataset: Dataset, batch_size: int = BATCH_SIZE) -> tuple[Baseline, ...]:
    """Measure both baselines against the candidate's ``outcomes`` on the test split.

    No recognizer that ignores the image has more right labels than the most common class. The
    nearest gallery image by pixels (`SIDE_PX`, standardized) requires no training. Its gallery and
    queries are spread evenly over the splits, with at most `GALLERY_MAX` and `QUERIES_MAX` images.
    For a class without gallery images, it uses the same train images as the candidate's index.
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


def measure_pretrained(outcomes: Outcomes, dataset: Dataset, features: "FrozenFeatures") -> Baseline:
    """The nearest image by the pretrained network's ``features``, untrained, among all images but
    the test split's. Without training, it is what the weights alone give."""
    known: list[NDArray[np.float32]] = []
    labels: list[NDArray[np.int64]] = []
    splits: tuple[Split, ...] = ("train", "gallery", "query")
    every = max(1, -(-sum(map(dataset.count, splits)) // PRETRAINED_MAX))
    for block, vectors in chain.from_iterable(features.blocks(dataset, split) for split in splits):
        known.append(_unit(vectors[::every]))
        labels.append(block.labels[::every])
    queries = _unit(features.array(dataset, "test"))
    nearest = np.concatenate(labels)[_nearest(np.concatenate(known), queries)]
    return _baseline("the nearest image by the pretrained network's features", nearest, outcomes, is_part=True)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _baseline(
    name: str,
    predictions: NDArray[np.integer],
    candidate: Outcomes,
    ignores_images: bool = False,
    is_part: bool = False,
) -> Baseline:
    correct = predictions == candidate.labels
    extremes = (Outcomes(np.full_like(correct, right), candidate.labels, candidate.groups) for right in (True, False))
    perfect, worst = (paired_counts(outcomes, correct) for outcomes in extremes)
    return Baseline(
        name=name,
        label_right=proportion(int(correct.sum()), len(correct), CONFIDENCE),
        comparison=paired_counts(candidate, correct),
        p_perfect=perfect.p_better,
        p_worst=worst.p_worse,
        p_by_chance=p_by_chance(zip(candidate.labels.tolist(), predictions.tolist(), [1] * len(correct), strict=True)),
        ignores_images=ignores_images,
        is_part=is_part,
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


STEP = 0.05
MAX_TEST_FRACTION = 0.5
ORDERS = 5
"""Number of orders of the groups in which a proposed share must be sufficient, because the order in
which ingest reads the groups has some influence on the splits."""

LabelCounts = Mapping[int, Mapping[str, int]]
"""Number of images by group and label."""


class FewGroups(Frozen):
    test_groups: int
    groups: int
    needed: int
    dataset: str
    test_fraction: float | None
    """The value of ``data.test_fraction`` that would be enough, or None if there is none."""
    is_named_by_source: bool
    """Whether the source specifies the test images, so that no setting changes their number."""

    def sentence(self) -> str:
        text = (
            f"The test split has {self.test_groups:,} of {quantity(self.groups, 'group')}, and a first release needs "
            f"{self.needed:,} to be compared with trivial baselines"
        )
        if self.test_fraction is None:
            where = " to the test split, which the source itself names" if self.is_named_by_source else ""
            return f"{text}; add images of other groups{where}."
        return (
            f"{text}; ingest the images into a new dataset with --set data.test_fraction={self.test_fraction:g} "
            f"--set data.dataset={self.dataset}-{round(100 * self.test_fraction)}-percent-test."
        )


def find_few_groups(dataset: Dataset, settings: RunSettings) -> FewGroups | None:
    """Before the training, predict whether a first release of ``dataset`` can be shown to be better
    than the baselines. Return None if it can, or without groups."""
    if not dataset.manifest.groups:
        return None
    blocks = [(block.labels, block.groups) for block in dataset.blocks("test")]
    if not blocks:
        return None
    labels, numbers = map(np.concatenate, zip(*blocks, strict=True))
    perfect = Outcomes(np.ones(len(labels), np.bool_), labels, numbers)
    measured = measure_baselines(perfect, dataset)
    return few_groups(measured, dataset, settings.data, settings.gate.significance)


def few_groups(
    baselines: Sequence[Baseline], dataset: Dataset, settings: DataSettings, level: float
) -> FewGroups | None:
    """The remedy if a baseline is undecided at ``level`` (`Baseline.is_undecided`). Return None if
    none is, or without groups."""
    undecided = [baseline for baseline in baselines if baseline.is_undecided(level)]
    groups = group_numbers(dataset)
    if groups is None or not undecided:
        return None
    members, is_named_by_source = groups.label_counts(), groups.has_explicit_test_images()
    wins = math.ceil(-math.log2(level))
    # A baseline that reads the images may be right or wrong in every further group. Among
    # ``2 * wins - 1`` groups, one of the two happens ``wins`` times.
    fewest = max(wins if baseline.is_sure_per_group else 2 * wins - 1 for baseline in undecided)
    enough = _Enough(members, fewest, wins)
    fraction = None if is_named_by_source else _sufficient_fraction(enough, settings)
    tested = undecided[0].comparison.groups or 0
    return FewGroups(
        test_groups=tested,
        groups=len(members),
        needed=max(enough.expected_groups(), tested + 1),
        dataset=dataset.manifest.name,
        test_fraction=fraction,
        is_named_by_source=is_named_by_source,
    )


class _Enough:
    def __init__(self, members: LabelCounts, fewest: int, wins: int) -> None:
        self.members, self._fewest, self._wins = members, fewest, wins

    def has_enough(self, test_groups: Sequence[int]) -> bool:
        """Whether a recognizer without errors would win in enough of ``test_groups`` against the
        most common class of their images."""
        return len(test_groups) >= self._fewest and self._winnable(test_groups) >= self._wins

    def expected_groups(self) -> int:
        share = self._winnable([*self.members]) / len(self.members)
        return max(self._fewest, math.ceil(self._wins / share))

    def _winnable(self, groups: Sequence[int]) -> int:
        """The number of groups with an image of another class than the most common one."""
        images: Counter[str] = Counter()
        for group in groups:
            images.update(self.members[group])
        most_common = max(images, key=images.__getitem__, default="")
        return sum(set(self.members[group]) != {most_common} for group in groups)


def _sufficient_fraction(enough: _Enough, settings: DataSettings) -> float | None:
    """The smallest share of the test split with which ingest would put enough groups there,
    whatever their order."""
    most = min(MAX_TEST_FRACTION, 1 - STEP - settings.gallery_fraction - settings.query_fraction)
    orders = [random.Random(seed).sample(sorted(enough.members), len(enough.members)) for seed in range(ORDERS)]  # noqa: S311 - not for secrets
    for step in range(math.floor(settings.test_fraction / STEP) + 1, math.floor(most / STEP + 1e-9) + 1):
        fraction = round(STEP * step, 2)
        changed = settings.model_copy(update={"test_fraction": fraction})
        if all(enough.has_enough(_test_groups(order, enough.members, changed)) for order in orders):
            return fraction
    return None


def _test_groups(order: Sequence[int], members: LabelCounts, settings: DataSettings) -> list[int]:
    fractions, complete = split_fractions(SPLITS, settings), images_of_all_splits(settings)
    counts: defaultdict[str, Counter[Split]] = defaultdict(Counter)
    chosen: list[int] = []
    for group in order:
        split = choose_group_split(
            group_digest(group), [counts[label] for label in members[group]], fractions, complete
        )
        for label in members[group]:
            counts[label][split] += 1
        chosen += [group] if split == "test" else []
    return chosen
