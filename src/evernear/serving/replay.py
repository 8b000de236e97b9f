"""Replay stored live queries: the candidate answers each as it would in production.

It uses the files that the archive step packs: the exported network with its preprocessing, the
index and its labels. The queries are a uniform sample
(`evernear.serving.query_log_files.sampled_queries`), decoded as in a server. If the champion
answered a query live, its logged answer is used. Otherwise, it is computed like the candidate's.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from evernear.common.store import Store
from evernear.data.preprocess import Pixels
from evernear.errors import DataError, IntegrityError
from evernear.evaluation.evaluate import ReleasedSystem
from evernear.evaluation.examples import Answer, Replay, Replayed, ReplayExamples, changed_answers, count_changes
from evernear.evaluation.recognizer import Recognizer
from evernear.serving.decoding import as_picture, decode_image, gray_vector, inspect_image
from evernear.serving.query_log_files import QUERIES, SampledQuery, is_log, sampled_queries

QUERIES_MAX = 500
MAX_FILES = 400
"""Maximum number of log files to read, newest first."""
BATCH = 64
THUMBNAIL_PX = 16
DUPLICATE_CORRELATION = 0.98
"""Minimum correlation between the thumbnails of near-duplicates, such as frames of a scene."""
NEAR_DUPLICATE = "near-duplicates of newer queries"
UNREADABLE = "with a file that cannot be decoded"


class _Decoded(NamedTuple):
    """A query, with the image as each system receives it."""

    query: SampledQuery
    for_candidate: Pixels
    for_champion: Pixels


def replay(
    candidate: Recognizer, champion: ReleasedSystem, store: Store, max_pixels: int
) -> tuple[Replay, ReplayExamples]:
    """Replay the `stored_queries`, and count and show the changed answers. Near-duplicates and
    queries whose file cannot be decoded are left out."""
    left_out: Counter[str] = Counter()
    decoded = _decode(candidate, champion.recognizer, stored_queries(store), max_pixels, left_out)
    after = _recognize(candidate, [each.for_candidate for each in decoded])
    before = _answers_before(champion.recognizer, decoded)
    replayed = [Replayed(each.for_candidate, *answers) for each, *answers in zip(decoded, before, after, strict=True)]
    known_before = champion.classes.current_labels(champion.recognizer.gallery.description.known_labels)
    times = [each.query.at for each in decoded]
    period = {"newest": max(times, default=None), "oldest": min(times, default=None)}
    counts = count_changes(replayed, champion.classes, known_before)
    return (
        counts.model_copy(update={"left_out": dict(left_out), **period}),
        changed_answers(replayed, champion.classes, candidate.shape),
    )


def stored_queries(store: Store, limit: int = QUERIES_MAX) -> list[SampledQuery]:
    """The newest queries in the log's uniform sample, newest first. Skips damaged files."""
    keys = [info.key for info in store.list(QUERIES) if is_log(info)]
    found: list[SampledQuery] = []
    for key in sorted(keys, reverse=True)[:MAX_FILES]:
        stored = store.find(key)  # the file may have been removed since
        if stored is not None:
            with suppress(IntegrityError):
                found += sampled_queries(stored[0], key)
        if len(found) >= limit:
            break
    return sorted(found, key=lambda query: query.at, reverse=True)[:limit]


def _decode(
    candidate: Recognizer,
    champion: Recognizer,
    queries: Sequence[SampledQuery],
    max_pixels: int,
    left_out: Counter[str],
) -> list[_Decoded]:
    """Decode ``queries``, and count in ``left_out`` those that are not replayed."""
    kept: list[_Decoded] = []
    thumbnails = np.empty((0, THUMBNAIL_PX**2), np.float32)
    for query in queries:
        try:
            file = inspect_image(query.file, max_pixels)
            decoded = _Decoded(
                query, decode_image(file, candidate.preprocessing), decode_image(file, champion.preprocessing)
            )
        except DataError:
            left_out[UNREADABLE] += 1
            continue
        thumbnail = gray_vector(as_picture(decoded.for_champion), THUMBNAIL_PX)
        if (thumbnails @ thumbnail >= DUPLICATE_CORRELATION).any():
            left_out[NEAR_DUPLICATE] += 1
            continue
        thumbnails = np.vstack([thumbnails, thumbnail])
        kept.append(decoded)
    return kept


def _answers_before(champion: Recognizer, decoded: list[_Decoded]) -> list[Answer]:
    """The champion's logged answers, computed where a different release answered."""
    missing = [row for row, each in enumerate(decoded) if each.query.version != champion.name]
    computed = dict(zip(missing, _recognize(champion, [decoded[row].for_champion for row in missing]), strict=True))
    return [
        computed[row] if row in computed else Answer(each.query.pred, each.query.dist, each.query.unknown)
        for row, each in enumerate(decoded)
    ]


def _recognize(recognizer: Recognizer, images: list[Pixels]) -> list[Answer]:
    answers: list[Answer] = []
    for start in range(0, len(images), BATCH):
        embedded = recognizer.embed(np.stack(images[start : start + BATCH]))
        answers += [Answer(each.pred, each.dist, each.unknown) for each in recognizer.gallery.recognize(embedded)]
    return answers
