"""The ledger of a dataset, without an ingest."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from evernear.data.ledger import Ledger
from evernear.data.sources import FileEntry
from evernear.data.sqlite import insert_rows

NAMES = [f"{number:03}.png" for number in range(250)]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A new ledger with `NAMES`, which are all pending."""
    with closing(Ledger(tmp_path / "ledger.sqlite", "folder:photos")) as ledger:
        ledger.list_files(FileEntry(name, "etag", "label", None, 1) for name in NAMES)
        yield ledger


def digest(name: str) -> bytes:
    return name.encode().ljust(32, b"\0")


def test_results_change_files_only_when_they_are_applied(ledger: Ledger) -> None:
    *images, broken, no_image = NAMES
    ledger.record_results(((name, digest(name)) for name in images), [(broken, "is broken"), (no_image, None)])
    assert ledger.count_pending() == len(NAMES)
    ledger.apply_results()
    assert ledger.count_pending() == 0
    ledger.list_files(FileEntry(name, "etag", "label", None, 1) for name in NAMES)
    assert [entry.name for entry in ledger.to_decode()] == [broken]


@pytest.mark.parametrize("image_is_first", [True, False])
def test_image_precedes_the_fault_that_another_plan_has_of_its_file(ledger: Ledger, image_is_first: bool) -> None:
    for is_image in (image_is_first, not image_is_first):
        if is_image:
            ledger.record_results([(NAMES[0], digest(NAMES[0]))], ())
        else:
            ledger.record_results((), [(NAMES[0], "cannot be read")])
    ledger.apply_results()
    ledger.list_files([FileEntry(NAMES[0], "etag", "label", None, 1)])
    assert ledger.count_pending() == len(NAMES) - 1


def test_saved_ledger_has_its_indexes(ledger: Ledger, tmp_path: Path) -> None:
    ledger.save(tmp_path / "saved.sqlite")
    with closing(sqlite3.connect(tmp_path / "saved.sqlite")) as db:
        indexes = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    assert {"files_by_digest", "files_by_turn"} <= indexes


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 250])
def test_all_rows_are_inserted(count: int) -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE numbers (number, double, word)")
        insert_rows(db, "numbers", "(?, ?, 'word')", ((number, 2 * number) for number in range(count)))
        expected = [(number, 2 * number, "word") for number in range(count)]
        assert db.execute("SELECT * FROM numbers ORDER BY number").fetchall() == expected
