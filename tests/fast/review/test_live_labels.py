"""Labels of live queries by id: files that people export, and their way into the store."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from evernear.common.store import Store, open_store
from evernear.errors import DataError
from evernear.maintenance.check import check_store
from evernear.review.live_labels import (
    LIVE_LABELS,
    correct_label,
    import_labels,
    labeled_queries,
    labels_of_release,
    read_labels,
)
from evernear.serving.query_log_files import LoggedQuery, Period

NOW = datetime(2026, 2, 3, tzinfo=UTC)


@pytest.fixture
def logged_store(tmp_path: Path) -> Store:
    store = open_store((tmp_path / "store").as_uri())
    period = Period(version="v1", since=NOW, until=NOW, queries=9, unknown=0)
    rows = [LoggedQuery(at=NOW, pred="a", dist=0.1, unknown=False, id=f"id-{number}") for number in range(3)]
    rows.append(LoggedQuery(at=NOW, pred="a", dist=0.1, unknown=False))
    lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
    store.put("queries/20260203/20260203T000000Z-v1-host-1-00000000.jsonl", lines.encode())
    store.put("queries/20260203/20260203T000001Z-v1-host-1-00000000.jsonl", b"damaged")
    return store


def test_labels_are_stored_with_the_logged_answer(logged_store: Store) -> None:
    result = import_labels(logged_store, {"id-0": "a", "id-2": "b", "other": "a"}, NOW)
    assert (result.stored, result.missing) == (2, ("other",))
    stored = {query.id: query for query in labeled_queries(logged_store).queries}
    assert {name: (query.label_right, query.version) for name, query in stored.items()} == {
        "id-0": (True, "v1"),
        "id-2": (False, "v1"),
    }


def test_label_is_compared_as_a_class_name(logged_store: Store) -> None:
    """macOS writes folder names decomposed, and a table may contain them."""
    key = "queries/20260203/20260203T000002Z-v1-host-1-00000000.jsonl"
    period = Period(version="v1", since=NOW, until=NOW, queries=1, unknown=0)
    row = LoggedQuery(at=NOW, pred="caf\xe9", dist=0.1, unknown=False, id="coffee")
    logged_store.put(key, f"{period.model_dump_json()}\n{row.model_dump_json()}\n".encode())
    import_labels(logged_store, {"coffee": "cafe\u0301\u200b"}, NOW)
    (query,) = labeled_queries(logged_store).queries
    assert (query.label, query.label_right) == ("caf\xe9", True)


def test_a_growing_file_is_imported_again_and_again(logged_store: Store) -> None:
    """Only what is new is stored, so that old labels do not count as labels of this month, and a
    correction reaches queries that the log no longer has."""
    import_labels(logged_store, {"id-0": "b", "id-2": "a"}, NOW)
    before = labeled_queries(logged_store).queries
    assert import_labels(logged_store, {"id-0": "b", "id-2": "a"}, NOW + timedelta(days=40)).stored == 2
    assert labeled_queries(logged_store).queries == before
    assert len(list(logged_store.list(LIVE_LABELS))) == 1
    for info in list(logged_store.list("queries/")):
        logged_store.delete(info.key)
    later = NOW + timedelta(days=50)
    result = import_labels(logged_store, {"id-0": "a", "id-1": "a", "id-2": "a"}, later)
    assert (result.stored, result.missing) == (2, ("id-1",))
    labeled = {
        query.id: (query.label, query.label_right, query.labeled_at) for query in labeled_queries(logged_store).queries
    }
    assert labeled == {"id-0": ("a", True, later), "id-2": ("a", True, NOW)}


def test_corrections_stay_when_the_file_is_imported_again(logged_store: Store) -> None:
    """A user keeps one label, with its place among the others, and corrects another."""
    import_labels(logged_store, {"id-0": "b", "id-1": "b", "id-2": "a"}, NOW)
    kept, corrected, _ = labeled_queries(logged_store).queries
    later = NOW + timedelta(days=40)
    correct_label(logged_store, kept, "b", later)
    correct_label(logged_store, corrected, " a ", later)

    def stored() -> list[tuple[str, str, str, datetime]]:
        queries = labeled_queries(logged_store).queries
        return [(query.id, query.label, query.first_label, query.labeled_at) for query in queries]

    expected = [("id-0", "b", "b", NOW), ("id-2", "a", "", NOW), ("id-1", "a", "b", later)]
    assert stored() == expected
    import_labels(logged_store, {"id-0": "b", "id-1": "b", "id-2": "a"}, later, keep_corrections=True)
    assert stored() == expected
    latest = later + timedelta(days=1)
    import_labels(logged_store, {"id-1": "c"}, latest, keep_corrections=True)
    assert stored()[-1] == ("id-1", "c", "", latest)


def test_damaged_labels_are_named_and_hide_no_others(logged_store: Store) -> None:
    import_labels(logged_store, {"id-0": "a"}, NOW)
    key = f"{LIVE_LABELS}20260203T000000000000Z-1.jsonl"
    logged_store.put(key, b"{}\n")
    labels = labeled_queries(logged_store)
    assert [query.id for query in labels.queries] == ["id-0"]
    assert labels.damaged.keys() == {key}
    assert key in labels.damaged[key]
    (damage,) = [damage for damage in check_store(logged_store) if damage.key == key]
    assert damage.needed_by == ("live accuracy",)
    assert "import the labels again" in damage.consequence


def test_only_labels_since_the_release_was_made_are_read(logged_store: Store) -> None:
    import_labels(logged_store, {"id-0": "a"}, NOW)
    import_labels(logged_store, {"id-1": "a"}, NOW + timedelta(days=9))
    assert [query.id for query in labeled_queries(logged_store, NOW + timedelta(days=8)).queries] == ["id-1"]
    elsewhere = timezone(timedelta(hours=9))
    assert len(labeled_queries(logged_store, NOW.astimezone(elsewhere)).queries) == 2
    assert labels_of_release(logged_store, "20260210.000000.0a1b2c3d").queries == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column id and no column label, but no columns; call the columns id and label"),
        ("name,label\n1,a\n", "no column id, but 'name', 'label'"),
        ("id,label,label\n1,a,b\n", "two columns called label"),
        ("id,label\n1\n", "Line 2 of .* has 1 of 2 columns"),
        ("id,label\n1,red, large\n", "Line 2 of .* has 3 of 2 columns"),
        ('id,label\n1,"a\n', "not valid CSV"),
    ],
)
def test_unusable_file_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_labels(path)


def test_files_of_spreadsheets_are_read(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes("\ufeffnote,label,id\r\nx,a b,1\r\n,a b,1\r\ny,ü, 2 \r\n".encode())
    assert read_labels(path).labels == {"1": "a b", "2": "ü"}
    path.write_text("ID; Label\n1;a, b\n")
    assert read_labels(path).labels == {"1": "a, b"}
    path.write_text("id\tlabel\n1\tü\n", encoding="utf-16")
    assert read_labels(path).labels == {"1": "ü"}
    path.write_bytes(b"id,label\n1,\xfc\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_labels(path)
