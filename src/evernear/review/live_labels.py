"""True labels of live queries, by the id that the answer carried: ``live-labels/<time>-<random>.jsonl`` in the store.

A label is stored together with the logged answer, since the query log is removed after some time. Images are neither
read nor stored, and nothing of this enters a dataset.
"""

import csv
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from evernear.common.disk import disk_errors
from evernear.common.frozen import Frozen
from evernear.common.store import Store
from evernear.errors import DataError, IntegrityError
from evernear.evaluation.live_accuracy import LabeledQuery
from evernear.serving.query_log import MAX_FILE_BYTES, QUERIES, closed_at, parse_file

LIVE_LABELS = "live-labels/"
_COLUMNS = ["id", "label"]


class ImportedLabels(Frozen):
    """The result of `import_labels`."""

    stored: int
    missing: tuple[str, ...]
    """Ids that are not in the query log: not sampled, removed, or not shipped yet."""


def read_labels(path: Path) -> dict[str, str]:
    """Read a CSV file with the columns ``id`` and ``label``.

    Raises:
        DataError: the file is unreadable, lacks a column or a value, or contradicts itself; names the line.
    """
    labels: dict[str, str] = {}
    with disk_errors(path), path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            if not set(_COLUMNS) <= set(rows.fieldnames or ()):
                raise DataError(f"{path} needs a first line with the columns id and label, separated by commas.")
            for row in rows:
                query, label = ((row[column] or "").strip() for column in _COLUMNS)
                if not query or not label:
                    raise DataError(f"{path}, line {rows.line_num}: the id or the label is empty.")
                if labels.setdefault(query, label) != label:
                    raise DataError(f"{path}, line {rows.line_num}: the id {query} has a second label.")
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} is not a CSV file in UTF-8: {error}.") from None
    return labels


def import_labels(store: Store, labels: Mapping[str, str], now: datetime) -> ImportedLabels:
    """Store the labels, by id, of logged queries. A later label of a query replaces an earlier one.

    Raises:
        StoreError: the store fails; nothing is stored.
    """
    missing = dict(labels)
    found: list[LabeledQuery] = []
    keys = [info.key for info in store.list(QUERIES) if closed_at(info.key) and info.size_bytes <= MAX_FILE_BYTES]
    for key in sorted(keys, reverse=True):
        if not missing:
            break
        stored = store.find(key)  # it may have been removed since
        try:
            period, queries = parse_file(stored[0] if stored else b"", key)
        except IntegrityError:  # the watcher reports it
            continue
        found += [
            LabeledQuery(
                id=query.id,
                at=query.at,
                version=period.version,
                pred=query.pred,
                unknown=query.unknown,
                label=missing.pop(query.id),
                labeled_at=now,
            )
            for query in queries
            if query.id in missing
        ]
    if found:
        lines = "".join(f"{query.model_dump_json()}\n" for query in found)
        store.put(f"{LIVE_LABELS}{now:%Y%m%dT%H%M%S%fZ}-{uuid4().hex[:8]}.jsonl", lines.encode())
    return ImportedLabels(stored=len(found), missing=tuple(missing))


def labeled_queries(store: Store) -> list[LabeledQuery]:
    """All labeled live queries, each with its newest label, in the order in which the labels arrived.

    Raises:
        IntegrityError: a file is damaged.
        StoreError: the store fails.
    """
    newest: dict[str, LabeledQuery] = {}
    for key in sorted(info.key for info in store.list(LIVE_LABELS)):
        for line in store.get(key).splitlines():
            query = LabeledQuery.from_json(line, f"{store.uri}/{key}", "delete it and import its labels again")
            newest[query.id] = query
    return list(newest.values())
