"""Replay stored live queries. Without a server, the candidate answers each query as it
would in production.

The candidate uses the files that the archive step packs: the exported network with its
preprocessing, the index and its labels. The queries are a uniform sample
(`evernear.serving.query_log_files.sampled_queries`). The query files are decoded as in
a server. If the champion answered a query live, the logged answer is used. Otherwise,
the champion's answer is computed in the same way as the candidate's answer.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evernear.common.store import Store
from evernear.data.preprocess import Pixels
from evernear.errors import DataError, IntegrityError
from evernear.evaluation.evaluate import Evaluation, ReleasedSystem
from evernear.evaluation.measure import NO_CHANGES
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.replay import (
    AnswerCollector,
    AnswerNumbers,
    Answers,
    PairedAnswers,
    Replay,
    compare_answers,
    unexpected_errors,
)
from evernear.evaluation.replay_examples import ReplayExamples, changed_answers
from evernear.release.registry import Registry
from evernear.serving.decoding import decode_image, inspect_image
from evernear.serving.query_log_files import MAX_FILE_BYTES, QUERIES, SampledQuery, closed_at, sampled_queries

QUERIES_MAX = 500
MAX_FILES = 400
"""Maximum number of log files to read, newest first."""
BATCH = 64
THUMBNAIL_PX = 16
DUPLICATE_CORRELATION = 0.98
"""Minimum correlation between the thumbnails of two near-duplicates, such as frames of
one scene.
"""
NEAR_DUPLICATE = "near-duplicates of newer queries"
UNREADABLE = "with a file that cannot be decoded"


class Answer(NamedTuple):
    """The answer of one system to one query."""

    pred: str
    dist: float
    unknown: bool


class ReplayedQueries(NamedTuple):
    """Distinct stored queries, newest first, with the answers of both systems."""

    queries: list[SampledQuery]
    images: Pixels
    """The images as the candidate receives them: a uint8 array of shape (N, H, W, C).
    """
    named_before: list[str]
    """The champion's predictions, with the champion's class names."""
    answers: PairedAnswers
    left_out: dict[str, int]


class Replayer:
    """Replays queries with the candidate and, if a champion exists, with the champion.

    `AnswerCollector` objects collect the answers while both systems are measured on the
    test split, so that no image is embedded twice.
    """

    def __init__(self, candidate: Recognizer, champion: ReleasedSystem | None) -> None:
        self._candidate = candidate
        self._champion = champion
        self._labels = candidate.gallery.description.labels
        self._numbers = AnswerNumbers(self._labels, champion.classes if champion else NO_CHANGES)
        names = champion.recognizer.gallery.description.labels if champion else ()
        self.candidate_answers = AnswerCollector([self._numbers.of_candidate(label) for label in self._labels])
        self.champion_answers = AnswerCollector([self._numbers.of_champion(label) for label in names])

    def replay(
        self, store: Store, evaluation: Evaluation, max_pixels: int
    ) -> tuple[Replay | None, ReplayExamples | None]:
        """Replay the `stored_queries`, and compare the changed answers with the changed
        answers on the test split.

        ``evaluation`` is the result of the measurement on the test split. If there is
        no champion, both results are None.

        Raises:
            StoreError: the store is unavailable.
        """
        if self._champion is None:
            return None, None
        champion = self._champion.recognizer
        known_before = champion.gallery.description.known_labels
        replayed = replay_queries(self._candidate, champion, self._numbers, stored_queries(store), max_pixels)
        result = compare_answers(
            replayed.answers,
            PairedAnswers(self.champion_answers.answers(), self.candidate_answers.answers()),
            self._labels,
            np.array([self._numbers.of_champion(label) for label in known_before], np.int32),
            _unexpected_errors(self._champion, evaluation, store),
        )
        times = [query.at for query in replayed.queries]
        period = {"newest": max(times, default=None), "oldest": min(times, default=None)}
        return (
            result.model_copy(update={"left_out": replayed.left_out, **period}),
            changed_answers(replayed.answers, replayed.images, replayed.named_before, self._labels),
        )


def _unexpected_errors(champion: ReleasedSystem, evaluation: Evaluation, store: Store) -> float:
    if evaluation.champion is None:
        return 0.0
    accuracy = evaluation.champion.accuracy
    accuracy_before = Registry(store).get(champion.recognizer.name).manifest.metrics.get("accuracy", 0.0)
    errors = accuracy.total - accuracy.count
    return unexpected_errors(errors, accuracy.total, evaluation.champion_tests, accuracy_before)


def stored_queries(store: Store, limit: int = QUERIES_MAX) -> list[SampledQuery]:
    """The newest ``limit`` queries in the log's uniform sample, newest first. Damaged
    log files are skipped.

    Raises:
        StoreError: the store is unavailable.
    """
    logs = [info for info in store.list(QUERIES) if closed_at(info.key) and info.size_bytes <= MAX_FILE_BYTES]
    found: list[SampledQuery] = []
    for info in sorted(logs, key=lambda info: info.key, reverse=True)[:MAX_FILES]:
        stored = store.find(info.key)  # the file may have been removed since
        if stored is not None:
            found += _parse(stored[0], info.key)
        if len(found) >= limit:
            break
    return sorted(found, key=lambda query: query.at, reverse=True)[:limit]


def replay_queries(
    candidate: Recognizer,
    champion: Recognizer,
    numbers: AnswerNumbers,
    queries: Sequence[SampledQuery],
    max_pixels: int,
) -> ReplayedQueries:
    """Answer ``queries`` with both recognizers. Near-duplicates and queries whose file
    cannot be decoded are left out.
    """
    left_out: Counter[str] = Counter()
    kept: list[SampledQuery] = []
    images: tuple[list[Pixels], list[Pixels]] = ([], [])
    thumbnails = np.empty((0, THUMBNAIL_PX**2), np.float32)
    for query in queries:
        try:
            file = inspect_image(query.file, max_pixels)
            decoded = [decode_image(file, system.preprocessing) for system in (candidate, champion)]
        except DataError:
            left_out[UNREADABLE] += 1
            continue
        thumbnail = _thumbnail(decoded[1])
        if (thumbnails @ thumbnail >= DUPLICATE_CORRELATION).any():
            left_out[NEAR_DUPLICATE] += 1
            continue
        thumbnails = np.vstack([thumbnails, thumbnail])
        kept.append(query)
        for seen, image in zip(images, decoded, strict=True):
            seen.append(image)
    after = _recognize(candidate, images[0])
    before = _answers_before(champion, kept, images[1])
    return ReplayedQueries(
        queries=kept,
        images=np.stack(images[0]) if kept else np.empty((0, *candidate.shape), np.uint8),
        named_before=[answer.pred for answer in before],
        answers=PairedAnswers(
            champion=_columns(before, numbers.of_champion), candidate=_columns(after, numbers.of_candidate)
        ),
        left_out=dict(left_out),
    )


def _answers_before(champion: Recognizer, queries: list[SampledQuery], images: list[Pixels]) -> list[Answer]:
    """The champion's answer to each query: the logged answer, or a computed answer if a
    different release answered the query.
    """
    missing = [row for row, query in enumerate(queries) if query.version != champion.name]
    computed = dict(zip(missing, _recognize(champion, [images[row] for row in missing]), strict=True))
    return [
        computed[row] if row in computed else Answer(query.pred, query.dist, query.unknown)
        for row, query in enumerate(queries)
    ]


def _recognize(recognizer: Recognizer, images: list[Pixels]) -> list[Answer]:
    answers: list[Answer] = []
    for start in range(0, len(images), BATCH):
        embedded = recognizer.embed(np.stack(images[start : start + BATCH]))
        answers += [Answer(each.pred, each.dist, each.unknown) for each in recognizer.gallery.recognize(embedded)]
    return answers


def _columns(answers: list[Answer], number: Callable[[str], int]) -> Answers:
    return Answers(
        labels=np.array([number(answer.pred) for answer in answers], np.int32),
        distances=np.array([answer.dist for answer in answers], np.float32),
        unknown=np.array([answer.unknown for answer in answers], np.bool_),
    )


def _thumbnail(image: Pixels) -> NDArray[np.float32]:
    """A square grayscale thumbnail of `THUMBNAIL_PX` pixels per side, as a vector with
    mean 0 and length 1.

    The vector is zero if all pixels have the same value.
    """
    picture = Image.fromarray(np.squeeze(image, axis=2) if image.shape[2] == 1 else image).convert("L")
    gray = np.asarray(picture.resize((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.BOX), np.float32).ravel()
    centered = gray - gray.mean()
    return centered / max(float(np.linalg.norm(centered)), 1e-6)


def _parse(data: bytes, key: str) -> list[SampledQuery]:
    with suppress(IntegrityError):  # the watcher reports damaged files
        return sampled_queries(data, key)
    return []
