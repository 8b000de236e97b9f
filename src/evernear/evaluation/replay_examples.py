"""Changed answers to stored live queries, with their images, for the run page."""

import numpy as np

from evernear.common.frozen import Frozen
from evernear.data.preprocess import Pixels
from evernear.evaluation.image_sheet import TILE_PX, Sheet, Tiles
from evernear.evaluation.replay import PairedAnswers

SHOWN = 24


class ChangedAnswer(Frozen):
    """A query whose answer has changed. ``tile`` is the query's number in the sheet."""

    before: str
    before_unknown: bool
    before_distance: float
    after: str
    after_unknown: bool
    after_distance: float
    tile: int


class ReplayExamples(Frozen):
    """The changed answers that are shown on the run page."""

    remedy = "run the evaluate step again"

    answers: tuple[ChangedAnswer, ...]
    """The changed answers, sorted by the distance that the champion measured. Changes
    at the smallest distances come first, because they are the least expected changes.
    """
    images: Sheet


def changed_answers(
    pairs: PairedAnswers, images: Pixels, named_before: list[str], labels: tuple[str, ...]
) -> ReplayExamples:
    """The first `SHOWN` changed answers in ``pairs``, with the queries' ``images`` (N,
    H, W, C).

    ``named_before`` contains the champion's predictions (N,), and ``labels`` contains
    the candidate's classes.
    """
    champion, candidate = pairs.champion, pairs.candidate
    changed = np.flatnonzero(pairs.changed)
    order = changed[np.lexsort((champion.distances[changed], champion.unknown[changed]))][:SHOWN]
    tiles = Tiles((images.shape[1], images.shape[2], images.shape[3]), TILE_PX)
    answers = tuple(
        ChangedAnswer(
            before=named_before[row],
            before_unknown=bool(champion.unknown[row]),
            before_distance=float(champion.distances[row]),
            after=labels[int(candidate.labels[row])],
            after_unknown=bool(candidate.unknown[row]),
            after_distance=float(candidate.distances[row]),
            tile=tiles.add(images[row]),
        )
        for row in order.tolist()
    )
    return ReplayExamples(answers=answers, images=tiles.sheet())
