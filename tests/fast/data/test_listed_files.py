"""The comparison of a listing with the ledger gives the same result for any order of names."""

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from evernear.data.ledger import Ledger
from evernear.data.sources import FileEntry

ETAGS = ("old", "new")


def entry(number: int, etag: str = "old") -> FileEntry:
    return FileEntry(f"{number % 3}/{number:04}.png", etag, str(number % 3), None, 100)


def ingest(path: Path, listing: list[FileEntry], broken: str = "") -> tuple[list[FileEntry], set[str]]:
    """List files, and decode the pending files without pixels. Return the files in the ledger, and
    the names of the decoded files."""
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
def test_any_order_of_names_gives_the_same_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, seed: int
) -> None:
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
