"""The labeled live queries that a release named wrong or called unknown, with their images from the
query log."""

import base64
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from evernear.common.store import Store
from evernear.errors import DataError, IntegrityError
from evernear.evaluation.live_accuracy import LabeledQuery
from evernear.review.live_labels import labels_of_release
from evernear.review.queue import read_all, thumbnail
from evernear.serving.query_log_files import QUERIES, LoggedQuery, closed_at, parse_file


class LiveMistakes(NamedTuple):
    queries: list[LabeledQuery]
    """Those with an image in the log, whose label no user has corrected or kept: first those named
    wrong, then those called unknown, the most certain answers first."""
    without_image: int
    """Number of others that were logged without an image, or whose log file was deleted."""


def live_mistakes(store: Store, version: str) -> LiveMistakes:
    queries = labels_of_release(store, version).queries
    mistakes = [query for query in queries if not query.first_label and (query.unknown or not query.label_right)]
    logs = {info.key for info in store.list(QUERIES)} if mistakes else set[str]()
    shown = [query for query in mistakes if query.log in logs]
    return LiveMistakes(
        sorted(shown, key=lambda query: (query.unknown, query.dist)), without_image=len(mistakes) - len(shown)
    )


def nearest_of_logged(store: Store, queries: Sequence[LabeledQuery]) -> Mapping[str, tuple[int, ...]]:
    """The rows of each query's neighbors in the gallery, by query ID."""
    logs = read_all(lambda key: _rows(store, key), sorted({query.log for query in queries}))
    return {row.id: row.neighbors for rows in logs for row in rows}


def logged_picture(store: Store, log: str, query: str, side_px: int) -> bytes:
    """A PNG version of a logged image.

    Raises:
        DataError: the log no longer has the image, or the image is damaged.
    """
    rows = _rows(store, log) if log.startswith(QUERIES) and closed_at(log) else ()
    row = next((row for row in rows if row.id == query), None)
    if row is None:
        raise DataError("The query log no longer has the image.")
    try:
        return thumbnail(base64.b64decode(row.file or row.image, validate=True), side_px)
    except ValueError:  # includes binascii.Error
        raise DataError("The image in the query log is damaged.") from None


def _rows(store: Store, log: str) -> Sequence[LoggedQuery]:
    stored = store.find(log)  # the file may have been removed since
    try:
        return parse_file(stored[0], log)[1] if stored else ()
    except IntegrityError:  # the watcher reports the damage
        return ()
