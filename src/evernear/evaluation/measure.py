"""Accuracy, recall and confusions of a recognizer on one split, measured as it is served."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from evernear.common.frozen import Frozen
from evernear.data.groups import GroupNumbers
from evernear.data.manifest import Shard, Split
from evernear.data.shards import Block, Dataset
from evernear.errors import DataError
from evernear.evaluation.statistics import CONFIDENCE, Proportion, effective_totals, proportion
from evernear.index.description import Calibration
from evernear.settings import ClassSettings

if TYPE_CHECKING:  # reading an evaluation must not import torch or FAISS
    from evernear.evaluation.recognizer import Recognizer
    from evernear.index.search import Classifications, Neighbors


RECALL_AT = 5
BATCH_SIZE = 512
NO_CHANGES = ClassSettings()
OTHER_LABEL = "(a label that the dataset does not have)"
Observer = Callable[[Block, NDArray[np.float32], "Neighbors", "Classifications"], None]


class AnsweredBlock(NamedTuple):
    block: Block
    embeddings: NDArray[np.float32]
    neighbors: "Neighbors"
    answers: "Classifications"


def answer_queries(
    recognizer: "Recognizer", dataset: Dataset, shards: Sequence[Shard], batch_size: int
) -> Iterator[AnsweredBlock]:
    """Answer the images in ``shards`` in order, in batches that do not cross shard boundaries."""
    gallery = recognizer.gallery
    for block, embeddings in recognizer.embed_shards(dataset, shards, batch_size):
        neighbors = gallery.search(embeddings, max(RECALL_AT, gallery.description.k))
        yield AnsweredBlock(block, embeddings, neighbors, gallery.classify(embeddings, neighbors))


def observe_all(*observers: Observer) -> Observer:
    def observe(
        block: Block, embeddings: NDArray[np.float32], neighbors: "Neighbors", answers: "Classifications"
    ) -> None:
        for each in observers:
            each(block, embeddings, neighbors, answers)

    return observe


class Measurement(Frozen):
    """Unless stated otherwise, proportions refer to all queries of the split."""

    name: str
    network_sha256: str
    index_digest: str
    dataset_digest: str
    queries_sha256: str
    """Hash of the queries' image digests and labels, in order. It is equal only for the same
    queries."""
    labels: tuple[str, ...]
    known_labels: tuple[str, ...]
    threshold: float
    parity_max_abs_difference: float
    """Difference between the outputs of the exported and the eager network, as measured by the
    export step."""
    accuracy: Proportion
    """Proportion of queries with the correct prediction, including queries called unknown."""
    recall_at_1: Proportion
    recall_at_5: Proportion
    """Proportion of queries whose five nearest neighbors include the correct label."""
    false_rejects: Proportion | None
    """Proportion called unknown among the queries of classes that the system knows, or None without
    such queries."""
    calibration_rejects: Proportion | None = None
    """Proportion of images called unknown in the query split, which calibrated the threshold. The
    interval is based on groups, and is exact even though the threshold was chosen on these
    images."""
    index_recall: Proportion
    """Proportion of query-split images for which the index found the nearest vector (recall@1
    against exact search)."""
    class_recall: dict[str, Proportion]
    """For each label that has queries, the proportion of queries predicted correctly."""
    class_rejects: dict[str, Proportion] = {}
    """For each label that has queries, the proportion of queries called unknown."""
    confusions: tuple[tuple[str, str, int], ...]
    """Tuples (label, prediction, count) for the pairs that occur, sorted by label."""
    groups: int | None = None
    """Number of groups (``data.group``) among the queries, on which the intervals are based. None
    if every query is independent."""

    @property
    def coverage(self) -> dict[str, float]:
        """The number of classes that the system knows, and of those with a query."""
        return {"classes": len(self.known_labels), "tested_classes": len({*self.known_labels} & {*self.class_recall})}

    @property
    def most_common_class_proportion(self) -> float:
        """The accuracy of always predicting the most common class in the split."""
        return max((recall.total for recall in self.class_recall.values()), default=0) / self.accuracy.total

    def confusion_matrix(self, max_labels: int = 50) -> tuple[list[str], list[list[int]]]:
        """The labels, and a matrix whose rows are labels and whose columns are predictions. Beyond
        ``max_labels``, the labels with the fewest confusions are merged."""
        wrong: Counter[str] = Counter()
        for label, answer, count in self.confusions:
            wrong.update({label: count, answer: count} if label != answer else {label: 0, answer: 0})
        shown = {label for label, _ in wrong.most_common(max_labels)}
        labels = [label for label in (*self.labels, OTHER_LABEL) if label in shown]
        if len(wrong) > len(labels):
            labels.append("(others)")
        position = {label: labels.index(label) if label in shown else len(labels) - 1 for label in wrong}
        rows = np.zeros((len(labels), len(labels)), np.int64)
        for label, answer, count in self.confusions:
            rows[position[label], position[answer]] += count
        return labels, rows.tolist()


@dataclass(frozen=True)
class Outcomes:
    """In the order of the split."""

    correct: NDArray[np.bool_]
    labels: NDArray[np.int32]
    groups: NDArray[np.int32] | None = None
    """None if the queries are independent."""


def measure(
    recognizer: "Recognizer",
    dataset: Dataset,
    split: Split = "test",
    *,
    batch_size: int = BATCH_SIZE,
    classes: ClassSettings = NO_CHANGES,
    observe: Observer | None = None,
    groups: GroupNumbers | None = None,
    answered: Iterable[AnsweredBlock] | None = None,
) -> tuple[Measurement, Outcomes]:
    """Measure ``recognizer`` on all images in ``split``.

    ``classes`` translates the labels of an earlier release. ``observe`` is called with each block,
    its embeddings, their neighbors, and the predictions. The intervals are based on ``groups``, or
    on images if ``groups`` is None. ``answered`` contains the answers to the split in order, if
    they are already computed (`evernear.evaluation.in_parts`). Only the outcomes need memory in
    proportion to the size of the split, 12 bytes per image.

    Raises:
        DataError: the split is empty, or its images do not have the recognizer's input shape.
    """
    dataset.require_shape(recognizer.shape, recognizer.name or "The candidate")
    gallery = recognizer.gallery
    tally = _Tally(dataset.labels, tuple(classes.current(label) or OTHER_LABEL for label in gallery.description.labels))
    known_labels = classes.current_labels(gallery.description.known_labels)
    answered = answered or answer_queries(recognizer, dataset, dataset.shards(split), batch_size)
    for block, embeddings, neighbors, answers in answered:
        tally.add(block, neighbors, answers, groups.of(block.digests) if groups else None)
        if observe is not None:
            observe(block, embeddings, neighbors, answers)
    if not tally.queries:
        raise DataError(f"The {split} split of {dataset.manifest.name} is empty; raise data.{split}_fraction.")

    shares = tally.shares()
    calibration = gallery.description.calibration
    measurement = Measurement(
        name=recognizer.name,
        network_sha256=recognizer.network_sha256,
        index_digest=gallery.description.digest,
        dataset_digest=dataset.digest,
        queries_sha256=tally.sha256.hexdigest(),
        labels=dataset.labels,
        known_labels=known_labels,
        threshold=gallery.description.threshold,
        parity_max_abs_difference=recognizer.parity_max_abs_difference,
        accuracy=shares.overall("correct"),
        recall_at_1=shares.overall("nearest"),
        recall_at_5=shares.overall("among_nearest"),
        false_rejects=shares.within(known_labels, "unknown"),
        calibration_rejects=_calibration_rejects(calibration),
        index_recall=proportion(calibration.nearest_found, calibration.queries, CONFIDENCE),
        class_recall=shares.by_class("correct"),
        class_rejects=shares.by_class("unknown"),
        confusions=tally.confusions(),
        groups=shares.groups,
    )
    return measurement, Outcomes(shares.columns["correct"], shares.labels, shares.group_numbers)


def _calibration_rejects(calibration: Calibration) -> Proportion:
    low, high = calibration.expected_false_rejects()
    return Proportion(count=calibration.false_rejects, total=calibration.queries, low=low, high=high)


Column = Literal["correct", "nearest", "among_nearest", "unknown"]


@dataclass(frozen=True)
class _Shares:
    """Proportions of queries. Each property has one column of boolean values."""

    names: tuple[str, ...]
    labels: NDArray[np.int32]
    columns: dict[Column, NDArray[np.bool_]]
    group_numbers: NDArray[np.int32] | None

    @property
    def groups(self) -> int | None:
        return None if self.group_numbers is None else len(np.unique(self.group_numbers))

    def overall(self, column: Column) -> Proportion:
        return self._by_stratum(column, np.zeros_like(self.labels))[0]

    def within(self, labels: tuple[str, ...], column: Column) -> Proportion | None:
        """None without such queries."""
        return self._by_stratum(column, np.isin(self.names, labels).astype(np.int32)[self.labels]).get(1)

    def by_class(self, column: Column) -> dict[str, Proportion]:
        return {self.names[label]: share for label, share in self._by_stratum(column, self.labels).items()}

    def _by_stratum(self, column: Column, strata: NDArray[np.int32]) -> dict[int, Proportion]:
        successes = self.columns[column]
        totals = np.bincount(strata)
        counts = np.bincount(strata[successes], minlength=len(totals))
        groups = self.group_numbers
        effective = [None] * len(totals) if groups is None else effective_totals(strata, groups, len(totals)).tolist()
        return {
            stratum: proportion(int(counts[stratum]), int(total), CONFIDENCE, effective[stratum])
            for stratum, total in enumerate(totals)
            if total
        }


class _Tally:
    """Collects blocks. Predictions use the dataset's label indices. The index after the last label
    stands for any label that the dataset does not have."""

    def __init__(self, labels: tuple[str, ...], answers: tuple[str, ...]) -> None:
        number = {label: position for position, label in enumerate(labels)}
        self._names = (*labels, OTHER_LABEL)
        elsewhere = len(labels)
        # the last entry is for NO_LABEL (-1)
        self._as_label = np.array([number.get(answer, elsewhere) for answer in answers] + [elsewhere])
        self._pairs: Counter[int] = Counter()
        self._columns: dict[Column, list[NDArray[np.bool_]]] = {column: [] for column in get_args(Column)}
        self._labels: list[NDArray[np.int32]] = []
        self._groups: list[NDArray[np.int32]] = []
        self.queries = 0
        self.sha256 = hashlib.sha256()

    def add(
        self,
        block: Block,
        neighbors: "Neighbors",
        answers: "Classifications",
        groups: NDArray[np.int32] | None,
    ) -> None:
        truth, base = block.labels, len(self._names)
        answered = self._as_label[answers.labels]
        matches = self._as_label[neighbors.labels[:, :RECALL_AT]] == truth[:, None]
        self.queries += len(truth)
        self._columns["correct"].append(answered == truth)
        self._columns["nearest"].append(matches[:, 0])
        self._columns["among_nearest"].append(matches.any(axis=1))
        self._columns["unknown"].append(answers.unknown)
        pairs, counts = np.unique(truth * base + answered, return_counts=True)
        self._pairs.update(dict(zip(pairs.tolist(), counts.tolist(), strict=True)))
        self._labels.append(truth.astype(np.int32))
        self._groups += [] if groups is None else [groups]
        # digests and labels alternate, so that the hash does not depend on the block size
        numbers = truth.astype("<i8")[:, None].view(np.uint8)
        self.sha256.update(np.concatenate([block.digests, numbers], axis=1).tobytes())

    def shares(self) -> _Shares:
        columns: dict[Column, NDArray[np.bool_]] = {
            column: np.concatenate(parts) for column, parts in self._columns.items()
        }
        groups = np.concatenate(self._groups) if self._groups else None
        return _Shares(self._names, np.concatenate(self._labels), columns, groups)

    def confusions(self) -> tuple[tuple[str, str, int], ...]:
        base = len(self._names)
        return tuple(
            (self._names[pair // base], self._names[pair % base], count) for pair, count in sorted(self._pairs.items())
        )
