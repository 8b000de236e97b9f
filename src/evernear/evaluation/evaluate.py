"""The evaluation artifact: all measurements that the gate needs, from a single run on the same
frozen test split."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.common.frozen import Document, Frozen
from evernear.data.manifest import Split
from evernear.data.near_duplicates import NearDuplicates
from evernear.data.shards import Dataset
from evernear.data.split_digests import split_digests
from evernear.embedding.embeddings import digest_strings
from evernear.errors import IntegrityError
from evernear.evaluation.baselines import Baseline, FewGroups, measure_baselines, measure_pretrained
from evernear.evaluation.compare import Comparison, compare, compare_refusals
from evernear.evaluation.examples import Replay
from evernear.evaluation.headline import AnswerCounts, headline
from evernear.evaluation.measure import BATCH_SIZE, NO_CHANGES, Measurement, Observer, Outcomes, measure
from evernear.evaluation.open_set import ADDED_RECOGNIZED, EXPECTED_FALSE_ACCEPTS, FALSE_ACCEPT_RATE, OpenSet
from evernear.evaluation.statistics import Interval, Proportion, near_any
from evernear.settings import ClassSettings

if TYPE_CHECKING:  # reading an evaluation must not import torch or FAISS
    from evernear.embedding.features import FrozenFeatures
    from evernear.evaluation.recognizer import Recognizer


EVALUATION_FILE = "evaluation.json"
SEEN: tuple[Split, ...] = ("train", "gallery", "query")
"""Splits from which the weights, the index and the threshold of a release are built."""
BLOCK_SIZE = 1_000_000
"""Maximum number of digests in memory, 32 MB. A larger test split is processed in blocks, each with
one pass over the images."""
Digests = NDArray[np.bytes_]


class ReleasedSystem(NamedTuple):
    """The champion or the anchor, which is measured together with the candidate."""

    recognizer: "Recognizer"
    dataset: Dataset | None = None
    """The snapshot that the release was built from, if the store still contains it."""
    classes: ClassSettings = NO_CHANGES
    """The release's classes that were removed or renamed on purpose."""
    fault: str | None = None
    """Why the snapshot's manifest cannot be read."""
    false_accepts: Interval | None = None
    """Share of images of unseen classes that the release accepts, as its manifest states it."""


class UnavailableSystem(NamedTuple):
    """A release that cannot be measured. ``fault`` states the reason as a sentence."""

    name: str
    fault: str


class AnchorEvaluation(Frozen):
    """If the anchor was not measured, ``fault`` or ``difference`` states the reason as a
    sentence."""

    name: str
    measurement: Measurement | None = None
    comparison: Comparison | None = None
    test_overlap: float | None = None
    """Proportion of the anchor's test images that are also in the test split, or None if they are
    unknown."""
    fault: str = ""
    """A damaged archive, or a damaged or lost snapshot."""
    difference: str = ""
    """Why the anchor cannot answer these queries, such as a different image shape."""


class Evaluation(Document):
    remedy = "run the evaluate step again"

    candidate: Measurement
    champion: Measurement | None
    comparison: Comparison | None
    open_set: OpenSet
    baselines: tuple[Baseline, ...] = ()
    few_groups: FewGroups | None = None
    leakage: dict[str, int]
    """For each split from which the candidate was built, the number of test images in it. See
    `count_leakage`."""
    near_duplicates: NearDuplicates | None = None
    """Test images that are near-duplicates of an image in the train or gallery split."""
    training_warnings: tuple[str, ...] = ()
    champion_leakage: dict[str, int] | None
    """As ``leakage``. None if there is no champion, or if its dataset is unavailable."""
    champion_test_overlap: float | None = None
    """Proportion of the champion's test images that are also in the test split. None under the same
    conditions as ``champion_leakage``. Images that came from review do not count."""
    reviewed_left_out: dict[str, int] = {}
    """Number of images that came from review and left a measured split, keyed by split."""
    unreadable: dict[Literal["training", "champion"], str] = {}
    """Why the snapshot cannot be read on which the candidate's network was trained, or the
    champion's."""
    classes: ClassSettings = NO_CHANGES
    """The champion's classes that were removed or renamed on purpose. Its measurement uses their
    current names."""
    refusals: Comparison | None = None
    """The images that candidate and champion call unknown. A regression is an image that only the
    candidate calls unknown."""
    champion_false_accepts: Interval | None = None
    """Share of images of unseen classes that the champion accepts, as its release states it."""
    anchor: AnchorEvaluation | None = None
    """None if the champion is the anchor, or if no champion exists."""
    corrected: AnswerCounts | None = None
    """The answers to test images whose label was corrected in the console
    (`evernear.evaluation.corrected`). None without such images."""
    replay: Replay | None = None
    """For the run page only. None if no champion exists."""

    @property
    def false_accepts(self) -> Proportion | Interval | None:
        """Share of images of unseen classes that the candidate accepts. With the champion's network
        and threshold, it follows from the champion's share, and the number of classes."""
        if not self.open_set.is_reused:
            return self.open_set.false_accepts
        before, known = self.champion_false_accepts, len(self.champion.known_labels) if self.champion else 0
        return near_any(before, len(self.candidate.known_labels) / known) if before and known else before

    @property
    def uncorrected(self) -> AnswerCounts | None:
        """The answers to test images whose label was not corrected, or None if none was."""
        return self.candidate.answers.without(self.corrected)

    def summary(self) -> str:
        return f"{headline(self.metrics())}; label right {self.candidate.label_right}"

    def metrics(self) -> dict[str, float]:
        """The metrics to chart, except those whose value is None or not finite."""
        metrics: dict[str, float | None] = {
            **self.candidate.answers.model_dump(),
            "label_right": self.candidate.label_right.value,
            "label_right_low": self.candidate.label_right.low,
            "label_right_high": self.candidate.label_right.high,
            "recall_at_5": self.candidate.recall_at_5.value,
            "worst_class_label_right": min(share.value for share in self.candidate.class_label_right.values()),
            "false_reject_rate": self.candidate.false_rejects.value if self.candidate.false_rejects else None,
            "index_recall": self.candidate.index_recall.value,
            "threshold": self.candidate.threshold,
            "parity_max_abs_difference": self.candidate.parity_max_abs_difference,
            "test_images": self.candidate.label_right.total,
            **self.candidate.coverage,
            "test_images_seen": sum(self.leakage.values()),
        }
        if self.reviewed_left_out:
            metrics["reviewed_left_out"] = sum(self.reviewed_left_out.values())
        if self.baselines:
            metrics["baseline_label_right"] = max(baseline.label_right.value for baseline in self.baselines)
        stated = {
            FALSE_ACCEPT_RATE: self.false_accepts,
            EXPECTED_FALSE_ACCEPTS: self.open_set.expected_false_accepts,
            ADDED_RECOGNIZED: self.open_set.added_recognized,
        }
        for name, share in stated.items():
            if share:
                metrics |= {name: share.value, f"{name}_low": share.low, f"{name}_high": share.high}
        if self.open_set.auroc and self.open_set.false_accepts_at_95:
            metrics["open_set_auroc"] = self.open_set.auroc.value
            metrics["open_set_auroc_low"] = self.open_set.auroc.low
            metrics["open_set_fpr_at_95_tpr"] = self.open_set.false_accepts_at_95.value
        if self.champion and self.comparison:
            pairs = self.comparison.within(self.champion.known_labels)
            metrics["champion_label_right"] = self.champion.label_right.value
            metrics["regressions"] = pairs.regressions
            metrics["improvements"] = pairs.improvements
            metrics["p_worse"] = pairs.p_worse
        if self.anchor and self.anchor.measurement:
            metrics["anchor_label_right"] = self.anchor.measurement.label_right.value
        return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}

    def write(self, directory: Path) -> None:
        self.save(directory / EVALUATION_FILE)

    @staticmethod
    def open(directory: Path) -> "Evaluation":
        """Read what `write` wrote. Raises `IntegrityError` if it is missing or invalid."""
        return Evaluation.load(directory / EVALUATION_FILE)


def evaluate_systems(
    candidate: "Recognizer",
    champion: ReleasedSystem | None,
    dataset: Dataset,
    open_set: OpenSet,
    trained_on: Dataset | None = None,
    observers: Sequence[Observer] = (),
    champion_observers: Sequence[Observer] = (),
    anchor: ReleasedSystem | UnavailableSystem | None = None,
    batch_size: int = BATCH_SIZE,
    pretrained: "FrozenFeatures | None" = None,
) -> Evaluation:
    """Measure the systems on the test split of ``dataset``, and count leaked test images.

    ``anchor`` is None if the champion is the anchor. An anchor or an earlier snapshot that cannot
    be read is not an error. The gate then holds the candidate. ``trained_on`` is the snapshot on
    which the candidate's network was trained, by default ``dataset``. ``pretrained`` are the
    features of the weights from which it was trained.

    Raises:
        DataError: the test split is empty, or its images do not have the input shape of a
            recognizer.
    """
    measured = partial(measure, dataset=dataset, batch_size=batch_size)
    measurement, outcomes = measured(candidate, observers=observers)
    before = before_outcomes = measured_anchor = None
    if champion:
        before, before_outcomes = measured(champion.recognizer, classes=champion.classes, observers=champion_observers)
    if champion and anchor:
        measured_anchor = _measure_anchor(anchor, dataset, measured, outcomes)
    baselines = measure_baselines(outcomes, dataset)
    if pretrained:
        baselines += (measure_pretrained(outcomes, dataset, pretrained),)
    return Evaluation(
        candidate=measurement,
        champion=before,
        comparison=compare(outcomes, before_outcomes, dataset.labels) if before_outcomes else None,
        refusals=compare_refusals(outcomes, before_outcomes, dataset.labels) if before_outcomes else None,
        champion_false_accepts=champion.false_accepts if champion else None,
        anchor=measured_anchor,
        open_set=open_set,
        baselines=baselines,
        classes=champion.classes if champion else NO_CHANGES,
        reviewed_left_out={split: sum(labels.values()) for split, labels in dataset.manifest.reviewed_left_out.items()},
        **_measure_leakage(dataset, trained_on or dataset, champion),
    )


def _measure_anchor(
    anchor: ReleasedSystem | UnavailableSystem,
    dataset: Dataset,
    measured: Callable[..., tuple[Measurement, Outcomes]],
    candidate: Outcomes,
) -> AnchorEvaluation:
    if isinstance(anchor, UnavailableSystem):
        return AnchorEvaluation(name=anchor.name, fault=anchor.fault)
    name, shape = anchor.recognizer.name, anchor.recognizer.shape
    if shape != dataset.shape:
        return AnchorEvaluation(name=name, difference=f"It takes images of {shape}, not of {dataset.shape}.")
    if anchor.dataset is None:
        fault = anchor.fault or "The dataset that it was built from is not in the store."
        return AnchorEvaluation(name=name, fault=fault)
    try:
        overlap = _test_overlap(dataset, anchor.dataset, anchor.classes)
    except IntegrityError as error:
        return AnchorEvaluation(name=name, fault=str(error))
    measurement, outcomes = measured(anchor.recognizer, classes=anchor.classes)
    comparison = compare(candidate, outcomes, dataset.labels)
    return AnchorEvaluation(name=name, measurement=measurement, comparison=comparison, test_overlap=overlap)


def _measure_leakage(dataset: Dataset, trained_on: Dataset, champion: ReleasedSystem | None) -> dict[str, Any]:
    """The fields of `Evaluation` that compare snapshots. If an earlier one cannot be read, they
    are unknown."""
    unreadable: dict[Literal["training", "champion"], str] = {}
    leakage = count_leakage(dataset, dataset)
    if trained_on.digest != dataset.digest:
        try:
            leakage |= count_leakage(dataset, trained_on, ("train",))
        except IntegrityError as error:
            leakage, unreadable["training"] = {}, str(error)
    of_champion, overlap = None, None
    if champion and champion.dataset:
        try:
            of_champion = count_leakage(dataset, champion.dataset)
            overlap = _test_overlap(dataset, champion.dataset, champion.classes)
        except IntegrityError as error:
            of_champion, unreadable["champion"] = None, str(error)
    elif champion and champion.fault:
        unreadable["champion"] = champion.fault
    return {
        "leakage": leakage,
        "champion_leakage": of_champion,
        "champion_test_overlap": overlap,
        "unreadable": unreadable,
    }


def _test_overlap(dataset: Dataset, champion_dataset: Dataset, classes: ClassSettings) -> float:
    """Proportion of the champion's test images that are also in the test split of ``dataset``.
    Images of retired classes, and images that left the test split because they came from review, do
    not count."""
    common = count_leakage(dataset, champion_dataset, ("test",))["test"]
    counts = champion_dataset.manifest.label_counts("test")
    total = sum(count for label, count in counts.items() if classes.current(label))
    if dataset.manifest.reviewed_left_out:
        total -= count_leakage(champion_dataset, dataset, ("train",))["train"]
    return common / max(1, total)


def count_leakage(dataset: Dataset, training_dataset: Dataset, splits: Sequence[Split] = SEEN) -> dict[str, int]:
    """For each of ``splits`` of ``training_dataset``, count the images that are also in the test
    split of ``dataset``. They are read from the shards, not from the tables that ingest wrote,
    unless a shard is lost. Images are equal if their pixels at source resolution are."""
    leakage = dict.fromkeys(splits, 0)
    for test in _merge_blocks(_digests(dataset, "test")):
        test.sort()
        for split in splits:
            for seen in _digests(training_dataset, split):
                positions = np.minimum(np.searchsorted(test, seen), len(test) - 1)
                leakage[split] += int((test[positions] == seen).sum())
    return {str(split): count for split, count in leakage.items()}


def _digests(dataset: Dataset, split: Split) -> Iterator[Digests]:
    return map(digest_strings, split_digests(dataset, split))


def _merge_blocks(blocks: Iterator[Digests]) -> Iterator[Digests]:
    pending: list[Digests] = []
    for block in blocks:
        pending.append(block)
        if sum(map(len, pending)) >= BLOCK_SIZE:
            yield np.concatenate(pending)
            pending = []
    if pending:
        yield np.concatenate(pending)
