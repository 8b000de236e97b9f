"""Whether the test split has enough groups to show that a first release is better than the trivial
baselines.

A recognizer without errors has the best possible outcome. If even this is not significant, no
release can be shown to be better. The gate then holds a first release of grouped images, and the
validation reports the problem before the training.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.data.groups import group_numbers
from evernear.data.manifest import SPLITS, Split
from evernear.data.shards import Dataset
from evernear.data.splits import choose_group_split, split_fractions
from evernear.evaluation.baselines import Baseline, measure_baselines
from evernear.evaluation.measure import Outcomes
from evernear.settings import DataSettings, RunSettings

STEP = 0.05
MAX_TEST_FRACTION = 0.5
ORDERS = 5
"""Number of orders of the groups in which a proposed share must be sufficient, because the order in
which ingest reads the groups has some influence on the splits."""

LabelCounts = Mapping[str, Mapping[str, int]]
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
    with group_numbers(dataset) as groups:
        if groups is None:
            return None
        blocks = [(block.labels, groups.of(block.digests)) for block in dataset.blocks("test")]
    if not blocks:
        return None
    labels, numbers = (np.concatenate(column).astype(np.int32) for column in zip(*blocks, strict=True))
    perfect = Outcomes(np.ones(len(labels), np.bool_), labels, numbers)
    measured = measure_baselines(perfect, dataset)
    return few_groups(measured, dataset, settings.data, settings.gate.significance)


def few_groups(
    baselines: Sequence[Baseline], dataset: Dataset, settings: DataSettings, level: float
) -> FewGroups | None:
    """The remedy if a baseline is undecided at ``level`` (`Baseline.is_undecided`). Return None if
    none is, or without groups."""
    undecided = [baseline for baseline in baselines if baseline.is_undecided(level)]
    with group_numbers(dataset) as groups:
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

    def has_enough(self, test_groups: Sequence[str]) -> bool:
        """Whether a recognizer without errors would win in enough of ``test_groups`` against the
        most common class of their images."""
        return len(test_groups) >= self._fewest and self._winnable(test_groups) >= self._wins

    def expected_groups(self) -> int:
        share = self._winnable([*self.members]) / len(self.members)
        return max(self._fewest, math.ceil(self._wins / share))

    def _winnable(self, groups: Sequence[str]) -> int:
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


def _test_groups(order: Sequence[str], members: LabelCounts, settings: DataSettings) -> list[str]:
    fractions = split_fractions(SPLITS, settings)
    counts: defaultdict[str, Counter[Split]] = defaultdict(Counter)
    chosen: list[str] = []
    for group in order:
        split = choose_group_split(group, [counts[label] for label in members[group]], fractions)
        for label in members[group]:
            counts[label][split] += 1
        chosen += [group] if split == "test" else []
    return chosen
