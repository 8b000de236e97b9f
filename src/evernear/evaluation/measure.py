"""Answers of a recognizer on one split, counted as it is served."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.common.frozen import Frozen
from evernear.data.manifest import Split
from evernear.data.shards import Block, Dataset
from evernear.errors import DataError
from evernear.evaluation.headline import AnswerCounts
from evernear.evaluation.statistics import CONFIDENCE, Clusters, Proportion, effective_totals, proportion
from evernear.index.description import Calibration
from evernear.settings import ClassSettings

if TYPE_CHECKING:  # reading an evaluation must not import torch or FAISS
    from evernear.evaluation.recognizer import Recognizer
    from evernear.index.search import Classifications, Neighbors


RECALL_AT = 5
BATCH_SIZE = 256  # as `evernear.embedding.embed`, so that cached embeddings are equal to the last bit
NO_CHANGES = ClassSettings()
CALLED_UNKNOWN = "(called unknown)"
"""The last column of a confusion matrix."""
OTHER_LABEL = "(a label that the dataset does not have)"
Observer = Callable[["AnsweredBlock"], None]


class AnsweredBlock(NamedTuple):
    block: Block
    embeddings: NDArray[np.float32]
    neighbors: "Neighbors"
    answers: "Classifications"


def _answer_queries(
    recognizer: "Recognizer", dataset: Dataset, split: Split, batch_size: int
) -> Iterator[AnsweredBlock]:
    gallery = recognizer.gallery
    for block, embeddings in recognizer.embed_split(dataset, split, batch_size):
        neighbors = gallery.search(embeddings, RECALL_AT)
        yield AnsweredBlock(block, embeddings, neighbors, gallery.classify(neighbors))


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
    label_right: Proportion
    """Proportion of queries whose predicted label is right, including queries called unknown."""
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
    class_label_right: dict[str, Proportion]
    """As ``label_right``, for each label that has queries."""
    confusions: tuple[tuple[str, str, int, int], ...]
    """Tuples (label, predicted label, count, called unknown) for the pairs that occur, sorted by
    label. The last number is the part of ``count`` that is called unknown."""
    groups: int | None = None
    """Number of groups (``data.group``) among the queries, on which the intervals are based. None
    if every query is independent."""

    @property
    def coverage(self) -> dict[str, float]:
        """The number of classes that the system knows, and of those with a query."""
        tested = {*self.known_labels} & {*self.class_label_right}
        return {"classes": len(self.known_labels), "tested_classes": len(tested)}

    @property
    def answers(self) -> AnswerCounts:
        by_class = [*self.class_answers.values()]
        return AnswerCounts(
            named_right=sum(each.named_right for each in by_class),
            named_wrong=sum(each.named_wrong for each in by_class),
            called_unknown=sum(each.called_unknown for each in by_class),
        )

    def share(self, count: int, label: str | None = None) -> Proportion:
        """``count`` of all queries, or of those of ``label``, with an interval."""
        of = self.label_right if label is None else self.class_label_right[label]
        return proportion(count, of.total, CONFIDENCE, of.effective)

    @property
    def class_answers(self) -> dict[str, AnswerCounts]:
        """For each label that has queries."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for label, predicted, count, unknown in self.confusions:
            named = "named_right" if predicted == label else "named_wrong"
            counts[label].update({named: count - unknown, "called_unknown": unknown})
        return {
            label: AnswerCounts(
                named_right=each["named_right"],
                named_wrong=each["named_wrong"],
                called_unknown=each["called_unknown"],
            )
            for label, each in counts.items()
        }

    @property
    def most_common_class_proportion(self) -> float:
        """The share of right labels of always predicting the most common class in the split."""
        return max((share.total for share in self.class_label_right.values()), default=0) / self.label_right.total

    def confusion_matrix(self, max_labels: int = 50) -> tuple[list[str], list[list[int]]]:
        """The names of the columns, and a matrix whose rows are labels. The last column counts the
        images called unknown, and the others are the labels as they were named. Beyond
        ``max_labels``, the labels with the fewest images that were not named right are merged."""
        wrong: Counter[str] = Counter()
        for label, answer, count, unknown in self.confusions:
            named_wrong = count - unknown if label != answer else 0
            wrong.update({label: named_wrong + unknown})
            wrong.update({answer: named_wrong})
        shown = {label for label, _ in wrong.most_common(max_labels)}
        labels = [label for label in (*self.labels, OTHER_LABEL) if label in shown]
        if len(wrong) > len(labels):
            labels.append("(others)")
        position = {label: labels.index(label) if label in shown else len(labels) - 1 for label in wrong}
        rows = np.zeros((len(labels), len(labels) + 1), np.int64)
        for label, answer, count, unknown in self.confusions:
            rows[position[label], position[answer]] += count - unknown
            rows[position[label], -1] += unknown
        return [*labels, CALLED_UNKNOWN], rows.tolist()


@dataclass(frozen=True)
class Outcomes:
    """In the order of the split."""

    correct: NDArray[np.bool_]
    labels: NDArray[np.int32]
    groups: Clusters | None = None
    """None if the queries are independent."""
    unknown: NDArray[np.bool_] | None = None
    """Whether a query is called unknown. None for a system that names every image."""

    @property
    def named(self) -> NDArray[np.bool_]:
        """Whether a query is not called unknown (N,)."""
        return np.ones_like(self.correct) if self.unknown is None else ~self.unknown

    @property
    def independent(self) -> int | None:
        """The number of groups."""
        return None if self.groups is None else len(np.unique(self.groups))

    def proportions(self, happened: NDArray[np.bool_], strata: NDArray[np.int32]) -> dict[int, Proportion]:
        """The proportion of queries for which ``happened`` (N,) is true, for each of the ``strata``
        (N,) that occurs."""
        totals = np.bincount(strata)
        counts = np.bincount(strata[happened], minlength=len(totals))
        effective = [None] * len(totals)
        if self.groups is not None:
            effective = effective_totals(strata, self.groups, len(totals)).tolist()
        return {
            stratum: proportion(int(counts[stratum]), int(total), CONFIDENCE, effective[stratum])
            for stratum, total in enumerate(totals)
            if total
        }


def measure(
    recognizer: "Recognizer",
    dataset: Dataset,
    split: Split = "test",
    *,
    batch_size: int = BATCH_SIZE,
    classes: ClassSettings = NO_CHANGES,
    observers: Sequence[Observer] = (),
) -> tuple[Measurement, Outcomes]:
    """Measure ``recognizer`` on all images in ``split``.

    ``classes`` translates the labels of an earlier release. The intervals are based on the
    groups of the images, if there are any. Only the outcomes need memory in proportion to the size
    of the split, about 30 bytes per image.

    Raises:
        DataError: the split is empty, or its images do not have the recognizer's input shape.
    """
    dataset.require_shape(recognizer.shape, recognizer.name or "The candidate")
    gallery, names = recognizer.gallery, (*dataset.labels, OTHER_LABEL)
    current = [classes.current(label) for label in gallery.description.labels]
    answered = _answer_queries(recognizer, dataset, split, batch_size)
    rows, queries_sha256 = _collect(
        answered, _as_labels(current, dataset.labels), dataset.manifest.groups > 0, observers
    )
    if not rows:
        raise DataError(f"The {split} split of {dataset.manifest.name} is empty; raise data.{split}_fraction.")

    labels, predicted, among_nearest, unknown, *of_groups = map(np.concatenate, zip(*rows, strict=True))
    outcomes = Outcomes(predicted == labels, labels, of_groups[0] if of_groups else None, unknown)
    all_queries = np.zeros_like(labels)
    known_labels = classes.current_labels(gallery.description.known_labels)
    of_known = np.isin(names, known_labels).astype(np.int32)[labels]
    calibration = gallery.description.calibration
    measurement = Measurement(
        name=recognizer.name,
        network_sha256=recognizer.network_sha256,
        index_digest=gallery.description.digest,
        dataset_digest=dataset.digest,
        queries_sha256=queries_sha256,
        labels=dataset.labels,
        known_labels=known_labels,
        threshold=gallery.description.threshold,
        parity_max_abs_difference=recognizer.parity_max_abs_difference,
        label_right=outcomes.proportions(outcomes.correct, all_queries)[0],
        recall_at_5=outcomes.proportions(among_nearest, all_queries)[0],
        false_rejects=outcomes.proportions(unknown, of_known).get(1),
        calibration_rejects=_calibration_rejects(calibration),
        index_recall=proportion(calibration.nearest_found, calibration.queries, CONFIDENCE),
        class_label_right={
            names[label]: share for label, share in outcomes.proportions(outcomes.correct, labels).items()
        },
        confusions=_confusions(labels, predicted, unknown, names),
        groups=outcomes.independent,
    )
    return measurement, outcomes


def _as_labels(answers: Sequence[str | None], labels: Sequence[str]) -> NDArray[np.int32]:
    """For each answer of a recognizer, the index in ``labels``. Any other label, and `NO_LABEL`
    (-1), is the index after the last."""
    number = {label: position for position, label in enumerate(labels)}
    return np.array([*(number.get(answer or "", len(labels)) for answer in answers), len(labels)], np.int32)


def _collect(
    answered: Iterable[AnsweredBlock],
    as_label: NDArray[np.int32],
    has_groups: bool,
    observers: Sequence[Observer],
) -> tuple[list[tuple[NDArray[Any], ...]], str]:
    """For each block, the labels, the answers, whether one of the `RECALL_AT` nearest is right,
    whether it is unknown and, if the images have any, the groups. Also the hash of all queries."""
    sha256, rows = hashlib.sha256(), list[tuple[NDArray[Any], ...]]()
    for each in answered:
        truth = each.block.labels
        matches = as_label[each.neighbors.labels[:, :RECALL_AT]] == truth[:, None]
        of_groups = (each.block.groups,) if has_groups else ()
        answers = as_label[each.answers.labels], matches.any(axis=1), each.answers.unknown
        rows.append((truth.astype(np.int32), *answers, *of_groups))
        # digests and labels alternate, so that the hash does not depend on the block size
        numbers = truth.astype("<i8")[:, None].view(np.uint8)
        sha256.update(np.concatenate([each.block.digests, numbers], axis=1).tobytes())
        for observe in observers:
            observe(each)
    return rows, sha256.hexdigest()


def _calibration_rejects(calibration: Calibration) -> Proportion:
    low, high = calibration.expected_false_rejects()
    return Proportion(count=calibration.false_rejects, total=calibration.queries, low=low, high=high)


def _confusions(
    labels: NDArray[np.int32], predicted: NDArray[np.int32], unknown: NDArray[np.bool_], names: Sequence[str]
) -> tuple[tuple[str, str, int, int], ...]:
    pairs, members, counts = np.unique(np.stack([labels, predicted]), axis=1, return_inverse=True, return_counts=True)
    unknown_counts = np.bincount(members[unknown], minlength=len(counts))
    rows: list[tuple[int, int, int, int]] = np.column_stack([pairs.T, counts, unknown_counts]).tolist()
    return tuple((names[label], names[answer], count, unknown) for label, answer, count, unknown in rows)
