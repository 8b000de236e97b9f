"""``evernear labels import`` as a user types it."""

from datetime import UTC, datetime
from pathlib import Path

from evernear.common.store import Store, open_store
from evernear.review.live_labels import labeled_queries
from evernear.serving.configuration import logged_queries
from evernear.serving.endpoints import home_of
from evernear.serving.query_log_files import LoggedQuery, Period
from tests.command_line import evernear


def log_file(*ids: str, queries: int = 0) -> tuple[str, bytes]:
    now = datetime.now(UTC)
    period = Period(version="v1", since=now, until=now, queries=queries or len(ids), unknown=0)
    rows = [LoggedQuery(at=now, pred="cat", dist=0.1, unknown=False, id=each) for each in ids]
    lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
    return f"{now:%Y%m%dT%H%M%SZ}-v1-host-1-00000000.jsonl", lines.encode()


def log_answers(store: Store, *ids: str, queries: int = 0) -> None:
    name, content = log_file(*ids, queries=queries)
    store.put(f"queries/{name[:8]}/{name}", content)


def test_last_label_of_a_growing_log_counts_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    """A reviewer exports a log in which labels arrive later and are corrected."""
    store = open_store((tmp_path / "store").as_uri())
    log_answers(store, "a", "b", "c")
    file = tmp_path / "labels.csv"
    file.write_text("id,label\na,dog\nb,\nc, \n,cat\na,cat\nother,cat\nb,dog\nb,dog\nc,cat\na,\n")
    ended = evernear("labels", "import", file, "--store", store.uri)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[:5] == [
        "3 of 4 labels stored.",
        "Several labels in the file, of which the last one counts: a",
        "3 rows left out: no label.",
        "1 row left out: no id.",
        "1 id not in the query log: not written yet (every 300 s, and when a server stops; import the file again):"
        " other",
    ]
    labels = {query.id: query.label for query in labeled_queries(store).queries}
    assert labels == {"a": "cat", "b": "dog", "c": "cat"}


def test_file_without_labels_yet_changes_nothing(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    log_answers(store, "a")
    file = tmp_path / "labels.csv"
    file.write_text("id,label\na,\n")
    ended = evernear("labels", "import", file, "--store", store.uri)
    assert (ended.returncode, ended.stdout) == (0, "0 of 0 labels stored.\n1 row left out: no label.\n")
    file.write_text("id,class\na,cat\n")
    ended = evernear("labels", "import", file, "--store", store.uri)
    assert ended.returncode == 3
    assert "has no column label, but 'id', 'class'" in ended.stderr


def test_id_of_a_sampled_log_may_be_missing_for_two_reasons(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    log_answers(store, "a", queries=1000)
    file = tmp_path / "labels.csv"
    file.write_text("id,label\na,dog\nb,dog\nc,dog\n")
    ended = evernear("labels", "import", file, "--store", store.uri)
    assert (
        "2 ids not in the query log: not in its sample of the queries, or not written yet (every 300 s, and when a"
        " server stops; import the file again): b, c"
    ) in ended.stdout.splitlines()


def test_log_of_a_stopped_server_is_uploaded_and_complete(tmp_path: Path) -> None:
    queries = logged_queries(home_of(tmp_path))
    queries.mkdir(parents=True)
    name, content = log_file("a", queries=1000)
    (queries / name).write_bytes(content)
    file = tmp_path / "labels.csv"
    file.write_text("id,label\na,dog\nb,dog\n")
    ended = evernear("labels", "import", file, "--workdir", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[:2] == [
        "1 of 2 labels stored.",
        "1 id not in the query log, which has a sample of the queries: b",
    ]
