"""Replay compares the share of changed answers to stored live queries with the share of
changed answers on the test split.

A live query has no label, so it cannot show which of two different answers is right.
However, two good releases agree on most queries, and the test split shows how often
they differ. `replay_rule` holds a candidate that changes significantly more of the
champion's answers on live queries than on the test split. Replay reveals some damage
that the test split cannot reveal. Examples are preprocessing of client files that
differs from the dataset's preprocessing, a class that the dataset lost together with
its test images, and swapped labels in the dataset.

Compared answers
    Only queries and test images that the champion recognizes are compared. Queries that
    the champion calls unknown (`Replay.was_unknown`) provide no evidence about the
    candidate, because recognizing such queries may be the purpose of the new images. An
    answer has changed if the candidate calls the query unknown or predicts a different
    class. Answers with a class that the champion does not know (`Replay.new_class`), or
    with a class in ``classes.retired`` (`Replay.retired`), are counted separately.

Difficulty
    Live queries are often more difficult than test images. The answers of retrained
    networks differ on difficult images. Queries and test images are therefore grouped
    by the distance that the champion measured. Within each group, the number of changed
    answers to queries is compared with the number of changed answers to test images.
    The test is exact, conditional on the totals of each group (Birch 1964, J R Stat Soc
    B 26:313). This test is the exact form of the Mantel-Haenszel test (1959, J Natl
    Cancer Inst 22:719).

Classes
    Each class that the champion predicts is also compared separately, because the loss
    of one class among many hardly changes the total. The comparison of all queries and
    the comparisons of the classes share the fraction `LEVEL` of ``gate.significance``.
    The number of changes must also exceed a minimum, because live queries are never an
    exact sample of the test images.

Swapped labels
    If labels in the dataset are swapped, candidate and champion differ as much on the
    test split as on live queries. The champion may then have more errors on images that
    it was already tested on than it had at its release. Therefore, the additional
    errors do not count as an explanation for changed answers (`unexpected_errors`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime, Field

from evernear.common.frozen import Frozen
from evernear.common.output import named, quantity
from evernear.evaluation.verdict import Rule
from evernear.settings import ClassSettings, GateSettings

if TYPE_CHECKING:
    from evernear.data.shards import Block
    from evernear.index.search import Classifications, Neighbors

LEVEL = 0.1
"""Share of ``gate.significance`` that `replay_rule` uses, half for all queries together
and half for the classes.
"""
MIN_QUERIES = 50
"""If fewer queries than this number are compared, no candidate is held."""
GROUPS = 20
"""Number of groups into which queries and test images are divided by the distance that
the champion measured. All groups have the same size.
"""
MIN_CLASS_IMAGES = 10
"""If a class has fewer test images than this number, it is compared with the whole test
split.
"""
CLASS_CHANGE = 0.5
"""A class causes a hold only if its share of changed answers exceeds the explained
share by more than this value.
"""
LACKING, RETIRED = -1, -2
"""Class numbers for a class that the candidate lacks, and for a class that was retired
on purpose.
"""


@dataclass(frozen=True)
class Answers:
    """Answers to N images, as arrays of shape (N,): class numbers, distances and
    unknown flags.

    The class numbers refer to the candidate's classes.
    """

    labels: NDArray[np.int32]
    distances: NDArray[np.float32]
    unknown: NDArray[np.bool_]


class AnswerNumbers:
    """Translates the labels of a system to the numbers of the candidate's classes."""

    def __init__(self, labels: tuple[str, ...], classes: ClassSettings) -> None:
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._classes = classes

    def of_candidate(self, label: str) -> int:
        """The number of a class that the candidate predicts."""
        return self._numbers.get(label, LACKING)

    def of_champion(self, label: str) -> int:
        """The number of a class that the champion predicts, after ``classes`` has
        renamed or retired the class.
        """
        current = self._classes.current(label)
        return RETIRED if current is None else self._numbers.get(current, LACKING)


class AnswerCollector:
    """An observer for `evernear.evaluation.measure.measure` that stores 9 bytes for
    each answer.

    ``numbers`` contains the class number for each of the system's label indices.
    """

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = np.array([*numbers, LACKING], np.int32)  # the last entry is for NO_LABEL (-1)
        self._blocks: list[Answers] = []

    def add(
        self, block: "Block | None", embeddings: NDArray[np.float32], neighbors: "Neighbors", answers: "Classifications"
    ) -> None:
        """Add the answers to one block."""
        self._blocks.append(Answers(self._numbers[answers.labels], answers.distances, answers.unknown))

    def answers(self) -> Answers:
        """All answers, in order."""
        return Answers(
            np.concatenate([np.empty(0, np.int32), *(block.labels for block in self._blocks)]),
            np.concatenate([np.empty(0, np.float32), *(block.distances for block in self._blocks)]),
            np.concatenate([np.empty(0, np.bool_), *(block.unknown for block in self._blocks)]),
        )


class ChangeCounts(Frozen):
    """Counts of changed answers among the live queries and the test images of one group
    or class.
    """

    queries: int = Field(default=0, ge=0)
    changed: int = Field(default=0, ge=0)
    images: int = Field(default=0, ge=0)
    explained: int = Field(default=0, ge=0)
    """Number of changed answers among the test images, excluding
    `unexpected_errors`.
    """

    @property
    def expected(self) -> float:
        """Expected number of changed queries."""
        return self.queries * self.explained / self.images if self.images else 0.0


class Replay(Frozen):
    """A comparison of the candidate's and the champion's answers to stored live
    queries.

    See the module docstring for an explanation of the comparison.
    """

    queries: int = Field(default=0, ge=0)
    """Number of replayed queries."""
    newest: AwareDatetime | None = None
    oldest: AwareDatetime | None = None
    left_out: Mapping[str, int] = {}
    """Number of stored queries that were not replayed, keyed by reason."""
    changed: int = Field(default=0, ge=0)
    """Number of queries with a different answer, including queries that are not
    compared.
    """
    new_class: int = Field(default=0, ge=0)
    retired: int = Field(default=0, ge=0)
    was_unknown: int = Field(default=0, ge=0)
    now_recognized: int = Field(default=0, ge=0)
    """Number of ``was_unknown`` queries that the candidate recognizes."""
    groups: tuple[ChangeCounts, ...] = ()
    classes: dict[str, ChangeCounts] = {}
    """Counts for each class that the champion predicts, keyed by the current name of
    the class.
    """

    @property
    def compared(self) -> int:
        """Number of compared queries."""
        return sum(group.queries for group in self.groups)


@dataclass(frozen=True)
class PairedAnswers:
    """The champion's and the candidate's answers to the same images."""

    champion: Answers
    candidate: Answers

    @property
    def changed(self) -> NDArray[np.bool_]:
        """Mask (N,) of the images for which clients would receive a different answer.

        An answer is different if it names a different class, or if only one of the two
        answers is unknown.
        """
        return (self.champion.unknown != self.candidate.unknown) | self.relabeled

    @property
    def relabeled(self) -> NDArray[np.bool_]:
        """Mask (N,) of the images that the two systems recognize as different
        classes.
        """
        recognized = ~self.champion.unknown & ~self.candidate.unknown
        return recognized & (self.champion.labels != self.candidate.labels)

    def is_retired(self) -> NDArray[np.bool_]:
        """Mask (N,) of the images that the champion recognizes as a retired class."""
        return ~self.champion.unknown & (self.champion.labels == RETIRED)

    def is_new_class(self, known_before: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Mask (N,) of the images that the candidate recognizes as a class that is not
        in ``known_before``.
        """
        return ~self.candidate.unknown & ~np.isin(self.candidate.labels, known_before)

    def is_compared(self, known_before: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Mask (N,) of the images whose answers are compared."""
        return ~self.champion.unknown & ~self.is_retired() & ~self.is_new_class(known_before)


def compare_answers(
    live: PairedAnswers,
    test: PairedAnswers,
    labels: tuple[str, ...],
    known_before: NDArray[np.int32],
    unexpected: float = 0.0,
) -> Replay:
    """Compare the answers to the ``live`` queries and to the ``test`` images.

    ``labels`` are the candidate's classes. ``known_before`` contains the numbers of the
    classes that the champion knows. ``unexpected`` is the result of
    `unexpected_errors`.
    """
    queries, images = live.is_compared(known_before), test.is_compared(known_before)
    relabeled = int((test.relabeled & images).sum())
    share = max(0.0, 1 - unexpected / relabeled) if relabeled else 1.0

    def count(of_query: NDArray[np.bool_], of_image: NDArray[np.bool_]) -> ChangeCounts:
        of_query, of_image = of_query & queries, of_image & images
        relabeled_here = int((test.relabeled & of_image).sum())
        rejected = int((test.changed & of_image).sum()) - relabeled_here
        return ChangeCounts(
            queries=int(of_query.sum()),
            changed=int((live.changed & of_query).sum()),
            images=int(of_image.sum()),
            explained=rejected + round(share * relabeled_here),
        )

    distances = np.concatenate([live.champion.distances[queries], test.champion.distances[images]])
    edges = np.quantile(distances, np.linspace(0, 1, GROUPS + 1)[1:-1]) if len(distances) else []
    group_of_query, group_of_image = (np.searchsorted(edges, pairs.champion.distances) for pairs in (live, test))
    new_class = live.is_new_class(known_before)

    def of_class(number: int) -> ChangeCounts:
        of_image = test.champion.labels == number
        if (of_image & images).sum() < MIN_CLASS_IMAGES:
            of_image = np.ones(len(images), np.bool_)
        return count(live.champion.labels == number, of_image)

    return Replay(
        queries=len(live.changed),
        changed=int(live.changed.sum()),
        new_class=int(new_class.sum()),
        retired=int(live.is_retired().sum()),
        was_unknown=int((live.champion.unknown & ~new_class).sum()),
        now_recognized=int((live.champion.unknown & ~live.candidate.unknown & ~new_class).sum()),
        groups=tuple(count(group_of_query == group, group_of_image == group) for group in range(GROUPS)),
        classes={
            "a class that the candidate lacks" if number == LACKING else labels[number]: of_class(number)
            for number in np.unique(live.champion.labels[queries]).tolist()
        },
    )


def unexpected_errors(errors: int, images: int, tested_before: int, accuracy_before: float) -> float:
    """The number of the champion's ``errors`` that its accuracy at its release does not
    explain.

    The errors were made on ``images`` test images. The champion was already tested on
    ``tested_before`` of these images, with the accuracy ``accuracy_before``. The
    remaining images may be of a kind that is new to the champion, so the champion may
    be wrong on all of them.
    """
    return max(0.0, errors - (images - tested_before) - tested_before * (1 - accuracy_before))


def p_explained(groups: tuple[ChangeCounts, ...]) -> float:
    """Probability of at least this number of changed answers to queries if these
    answers change as often as the answers to test images.

    Conditional on the totals of a group, the number of changed answers to queries in
    the group has a hypergeometric distribution.
    """
    from scipy.stats import hypergeom

    total, distribution = 0, np.ones(1)
    for group in groups:
        total += group.changed
        changed = group.changed + group.explained
        counts = np.arange(min(group.queries, changed) + 1)
        mass = hypergeom.pmf(counts, group.queries + group.images, changed, group.queries)
        distribution = np.convolve(distribution, mass)
    return min(1.0, float(distribution[total:].sum()))


def replay_rule(replay: Replay, settings: GateSettings) -> Rule:
    """Hold a candidate that changes more of the champion's answers than the changes on
    the test split explain.
    """
    name, compared = "replay", replay.compared
    if compared < MIN_QUERIES:
        return Rule(name=name, passed=True, reason=_too_few(replay))
    level = LEVEL * settings.significance
    changed, expected = (sum(getattr(group, key) for group in replay.groups) for key in ("changed", "expected"))
    p = p_explained(replay.groups)
    is_changed = p <= level / 2 and changed - expected > settings.replay_change * compared
    classes = [
        f"{label} ({counts.changed:,} of {counts.queries:,}, {counts.expected:.1f} explained)"
        for label, counts in replay.classes.items()
        if counts.changed - counts.expected > CLASS_CHANGE * counts.queries
        and p_explained((counts,)) <= level / 2 / len(replay.classes)
    ]
    passed = not is_changed and not classes
    reason = (
        f"The candidate changes {changed:,} of the champion's answers to {compared:,} stored queries "
        f"({changed / compared:.1%}); the differences on the test split explain {expected / compared:.1%} "
        f"({_p_value(p)}, level {level / 2:g})."
    )
    if classes:
        reason += f" It changes most answers of {named(classes)}."
    if not passed:
        reason += " Look at the changed answers on the run page; a person may still promote the release."
    setting = ""
    if is_changed and not classes:
        setting = f"gate.replay_change={math.ceil(100 * (changed - expected) / compared) / 100:g}"
    return Rule(
        name=name,
        passed=passed,
        candidate=changed / compared,
        bound=expected / compared + settings.replay_change,
        reason=f"{reason}{_apart(replay)}",
        setting=setting,
    )


def _too_few(replay: Replay) -> str:
    if not replay.queries:
        return (
            "No stored query could be replayed, so the answers to live queries were not compared; "
            f"serving.query_log=images stores some.{_left_out(replay)}"
        )
    compared = quantity(replay.compared, "stored query", "stored queries")
    return (
        f"{compared} can be compared. With fewer than {MIN_QUERIES}, a change of live answers is not detected."
        f"{_apart(replay)}"
    )


def _apart(replay: Replay) -> str:
    """Sentences about queries that are not compared, to append to another text."""
    parts: list[str] = []
    if replay.new_class:
        parts.append(f"{replay.new_class:,} answered with a class that the champion does not know")
    if replay.retired:
        parts.append(f"{replay.retired:,} that the champion answers with a retired class")
    if replay.was_unknown:
        parts.append(
            f"{replay.was_unknown:,} that the champion calls unknown ({replay.now_recognized:,} recognized by the "
            "candidate)"
        )
    return (f" Not compared: {'; '.join(parts)}." if parts else "") + _left_out(replay)


def _left_out(replay: Replay) -> str:
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in replay.left_out.items())
    return f" Left out: {reasons}." if reasons else ""


def _p_value(p: float) -> str:
    return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"
