"""The ledger of a dataset, without an ingest."""

import random
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


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 250])
def test_all_rows_are_inserted(count: int) -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE numbers (number, double, word)")
        insert_rows(db, "numbers", "(?, ?, 'word')", ((number, 2 * number) for number in range(count)))
        expected = [(number, 2 * number, "word") for number in range(count)]
        assert db.execute("SELECT * FROM numbers ORDER BY number").fetchall() == expected


# Listings


ETAGS = ("old", "new")


def entry(number: int, etag: str = "old") -> FileEntry:
    return FileEntry(f"{number % 3}/{number:04}.png", etag, str(number % 3), None, 100)


def ingest(path: Path, listing: list[FileEntry], broken: str = "") -> tuple[list[FileEntry], set[str]]:
    """List files, and return those in the ledger and the names of the pending ones."""
    saved = path.with_suffix(".saved")
    with closing(Ledger(path, "folder:/images")) as ledger:
        ledger.list_files(listing)
        ledger.forget_unlisted()
        listed = [*ledger.in_order()]
        ledger.save(saved)
    saved.replace(path)
    with closing(sqlite3.connect(path)) as db:
        pending = {name for (name,) in db.execute("SELECT name FROM files WHERE pending")}
        db.execute("UPDATE files SET pending = 0, fault = CASE WHEN name = ? THEN 'broken' END", (broken,))
        db.commit()
    return listed, pending


@pytest.mark.parametrize("order", ["sorted", "folders", "shuffled"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_names_gives_the_same_ledger(tmp_path, monkeypatch, order: str, seed: int) -> None:
    monkeypatch.setattr("evernear.data.ledger._PAGE", 7)
    mixed = random.Random(seed)
    ledger, known, broken = tmp_path / "ledger.sqlite", dict[str, FileEntry](), ""
    for _ in range(6):
        gap = mixed.randrange(150)
        numbers = [number for number in range(200) if mixed.random() < 0.9 and not gap <= number < gap + 60]
        listing = [entry(number, mixed.choice(ETAGS)) for number in numbers]
        if order == "shuffled":
            mixed.shuffle(listing)
        else:
            listing.sort(key=lambda each: (each.label if order == "sorted" else -int(each.label), each.name))
        expected = {each.name for each in listing if known.get(each.name) != each or each.name == broken}
        broken = mixed.choice(listing).name if mixed.random() < 0.5 else ""
        listed, pending = ingest(ledger, listing, broken)
        assert listed == sorted(listing)
        assert pending == expected
        known = {each.name: each for each in listing}


def test_name_that_is_listed_twice_is_kept(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    ingest(ledger, [entry(number) for number in range(9)])
    again = [entry(8), entry(3), entry(3), entry(8)]
    assert ingest(ledger, again) == (sorted({entry(3), entry(8)}), set())
