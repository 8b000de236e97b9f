"""The kinds of objects in a store, and the check that this version of evernear wrote them all."""

import gzip
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial

from evernear.common.frozen import require_format
from evernear.common.parquet import require_table_format
from evernear.common.parts import concurrently
from evernear.common.store import Store
from evernear.errors import IntegrityError, MissingObjectError

_GZIP = b"\x1f\x8b"
Compare = Callable[[bytes, str], object]


def _document(data: bytes, source: str) -> None:
    """A JSON document, which is compressed in a record of a pruned release."""
    if data.startswith(_GZIP):
        with suppress(OSError, EOFError):
            data = gzip.decompress(data)
    require_format(data, source)


def _lines(data: bytes, source: str) -> None:
    """Documents, one on each line."""
    for line in data.splitlines():
        require_format(line, source)


def _first_line(data: bytes, source: str) -> None:
    require_format(data.partition(b"\n")[0], source)


KINDS: dict[str, Compare | None] = {
    "_evernear.txt": None,
    "store.json": _document,
    "doctor.json": _document,
    "maintenance/prune.json": _document,
    "datasets/*/head.json": _document,
    "datasets/*/manifests/*.json": _document,
    "datasets/*/*/*.parquet": require_table_format,
    "datasets/*/shards/*.npy": None,
    "datasets/*/parts/*/parts.json": _document,
    "datasets/*/parts/*/results/*": _first_line,
    "datasets/*/parts/*": None,
    "weights/*": None,
    "embeddings/*.npy": None,
    "checkpoints/*/result.json": _document,
    "checkpoints/*": None,
    "parts/*/parts.json": _document,
    "parts/*/results/*": _first_line,
    "parts/*": None,
    "runs/starting/*": None,
    "runs/*.json": _document,
    "runs/*.parquet": require_table_format,
    "runs/*": None,
    "releases/champion.json": _document,
    "releases/history/*.json": _document,
    "releases/manifests/*.json": _document,
    "releases/pruned/*.json": _document,
    "releases/archives/*.mar": None,
    "triggers/*.json": _document,
    "review/answers.jsonl": _lines,
    "review/suspects.json": _document,
    "review/submitted/*.json": _document,
    "review/originals/*": None,
    "review/pending/*": None,
    "live-labels/*.jsonl": _lines,
    "queries/*": _first_line,
}
"""How to compare the format of the objects whose keys match a pattern (`fnmatch`), of which the
first counts. None: the object has no format of its own, and a document says how to read it."""


def require_all_current(store: Store) -> None:
    """Compare the format of every document in the store with this version's.

    Raises:
        FormatError: another version of evernear wrote one of them.
    """
    read = store.reader()
    keys = ((info.key, compare) for info in store.list("") if (compare := _compare_of(info.key)))
    for _ in concurrently(partial(_compare, store, read), keys):
        pass


def _compare_of(key: str) -> Compare | None:
    return next((compare for pattern, compare in KINDS.items() if fnmatchcase(key, pattern)), None)


def _compare(store: Store, read: Callable[[str], bytes], item: tuple[str, Compare]) -> None:
    key, compare = item
    with suppress(IntegrityError, MissingObjectError):  # damage is reported elsewhere
        compare(read(key), f"{store.uri}/{key}")
