"""The labeled live queries that a release named wrong or called unknown, with their images from the
query log."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from evernear.common.store import Store
from evernear.evaluation.live_accuracy import LabeledQuery
from evernear.review.live_labels import labels_of_release
from evernear.review.queue import read_all
from evernear.serving.query_log_files import QUERIES, read_log


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
    logs = read_all(lambda key: read_log(store, key), sorted({query.log for query in queries}))
    return {row.id: row.neighbors for log in logs if log for row in log.queries}
