"""The champion's and the candidate's answers to the same stored live queries, for the run page. A
live query has no label, so a changed answer may be better or worse."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pydantic import AwareDatetime, Field

from evernear.common.frozen import Frozen
from evernear.data.preprocess import Pixels
from evernear.evaluation.image_sheet import TILE_PX, Sheet, Tiles
from evernear.settings import ClassSettings

SHOWN = 24


class Answer(NamedTuple):
    pred: str
    dist: float
    unknown: bool


class Replay(Frozen):
    queries: int = Field(default=0, ge=0)
    newest: AwareDatetime | None = None
    oldest: AwareDatetime | None = None
    left_out: Mapping[str, int] = {}
    """Keyed by reason."""
    changed: int = Field(default=0, ge=0)
    new_class: int = Field(default=0, ge=0)
    """Number of changed answers with a class that the champion does not know."""
    retired: int = Field(default=0, ge=0)
    """Number of changed answers to queries that the champion recognizes as a retired class."""
    now_recognized: int = Field(default=0, ge=0)
    now_unknown: int = Field(default=0, ge=0)


class ChangedAnswer(Frozen):
    """``tile`` is the query's number in the sheet."""

    before: str
    before_unknown: bool
    before_distance: float
    after: str
    after_unknown: bool
    after_distance: float
    tile: int


class ReplayExamples(Frozen):
    remedy = "run the evaluate step again"

    answers: tuple[ChangedAnswer, ...]
    """Sorted by the distance that the champion measured. Changes at the smallest distances are the
    least expected."""
    images: Sheet


class Replayed(NamedTuple):
    """One query, with the image as the candidate receives it, (H, W, C)."""

    image: Pixels
    before: Answer
    after: Answer

    def is_changed(self, classes: ClassSettings) -> bool:
        """Whether clients would receive a different answer. A class that was renamed on purpose is
        the same answer."""
        if self.before.unknown or self.after.unknown:
            return self.before.unknown != self.after.unknown
        return classes.current(self.before.pred) != self.after.pred


def count_changes(queries: Sequence[Replayed], classes: ClassSettings, known_before: Collection[str]) -> Replay:
    """``known_before`` contains the current names of the classes that the champion knows."""
    changed = [query for query in queries if query.is_changed(classes)]
    return Replay(
        queries=len(queries),
        changed=len(changed),
        new_class=sum(not query.after.unknown and query.after.pred not in known_before for query in changed),
        retired=sum(not query.before.unknown and classes.current(query.before.pred) is None for query in changed),
        now_recognized=sum(query.before.unknown for query in changed),
        now_unknown=sum(query.after.unknown for query in changed),
    )


def changed_answers(queries: Sequence[Replayed], classes: ClassSettings, shape: tuple[int, int, int]) -> ReplayExamples:
    changed = [query for query in queries if query.is_changed(classes)]
    changed.sort(key=lambda query: (query.before.unknown, query.before.dist))
    tiles = Tiles(shape, TILE_PX)
    answers = tuple(
        ChangedAnswer(
            before=before.pred,
            before_unknown=before.unknown,
            before_distance=before.dist,
            after=after.pred,
            after_unknown=after.unknown,
            after_distance=after.dist,
            tile=tiles.add(image),
        )
        for image, before, after in changed[:SHOWN]
    )
    return ReplayExamples(answers=answers, images=tiles.sheet())
