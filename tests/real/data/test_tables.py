"""The tables of a snapshot, as others open them, and what they do not depend on."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from evernear.data import database, tables
from evernear.data.example_queries import duckdb_query, pandas_query
from evernear.data.tables import SCHEMAS, TABLES
from tests.dataset_images import write_files

DOCUMENT = Path(__file__).parents[3] / "docs/dataset-export.md"
DATASET, GROUP = "mine/store/datasets/photos", "scene-17"


@pytest.fixture
def grouped(tmp_path: Path, run_ingest, make_image):
    """Scenes of three frames, and a broken file."""
    names = {
        f"{'ab'[scene % 2]}/scene-{scene}-{frame}.png": scene * 3 + frame for scene in range(30) for frame in range(3)
    }
    write_files(tmp_path / "photos", {name: make_image(number) for name, number in names.items()})
    (tmp_path / "photos/a/broken.png").write_text("no image")
    return run_ingest(tmp_path / "photos", group=r"(scene-\d+)")


def test_document_shows_the_queries_of_the_console() -> None:
    blocks = re.findall(
        r"```(?:sql|python)\n(.*?)```", DOCUMENT.read_text().partition("## The tables of a dataset")[2], re.DOTALL
    )
    assert blocks == [query(DATASET, GROUP) for query in (duckdb_query, pandas_query)]


def test_queries_find_counts_groups_and_reasons(grouped, tmp_path: Path) -> None:
    dataset = f'{tmp_path}/it\'s "my" {{1}} [store]\\photos'
    shutil.copytree(tmp_path / "store/datasets/photos", dataset)
    with duckdb.connect() as db:
        results = [db.execute(text).fetchall() for text in duckdb_query(dataset, GROUP).split(";\n") if text.strip()]
    counts, images, left_out = results[-3:]
    assert counts == [(label, count) for label, count in sorted(grouped.label_counts("test").items()) if count]
    assert [label for _, label, _, _ in images] == ["b"] * 3
    assert {shard for _, _, shard, _ in images} <= {shard.sha256 for shard in grouped.shards}
    assert [name for name, _ in left_out] == ["a/broken.png"]
    program = pandas_query(dataset, GROUP) + "print(len(images[images['group'] == 'scene-17']), len(files))\n"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "3 91"
    assert "a/broken.png" in shown


def test_files_explain_their_columns(grouped, tmp_path: Path) -> None:
    for table, partitions in grouped.tables.items():
        for partition in partitions:
            schema = pq.read_schema(tmp_path / f"store/datasets/photos/{table}/{partition.sha256}.parquet")
            assert schema.equals(SCHEMAS[table], check_metadata=True)
            assert all(field.metadata[b"meaning"].endswith(b".") for field in schema)
    assert grouped.tables.keys() <= {*TABLES}


def test_file_has_the_time_of_the_source(grouped, tmp_path: Path) -> None:
    folder = tmp_path / "store/datasets/photos/files"
    files = [str(folder / f"{partition.sha256}.parquet") for partition in grouped.tables["files"]]
    rows = duckdb.sql("SELECT name, epoch_us(modified) FROM read_parquet($1)", params=[files]).fetchall()
    assert {name: (tmp_path / "photos" / name).stat().st_mtime_ns // 1000 for name, _ in rows} == dict(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threads", "memory_bytes", "partition_rows"),
    [(1, 2**31, 10**6), (4, 2**31, 10**6), (2, 2**26, 10**6), (4, 2**27, 10)],
)
def test_digest_depends_on_nothing_but_the_images(
    grouped, tmp_path: Path, run_ingest, make_image, monkeypatch, threads: int, memory_bytes: int, partition_rows: int
) -> None:
    monkeypatch.setattr(database, "available_cpus", lambda: threads)
    monkeypatch.setattr(database, "memory_limit_bytes", lambda: 8 * memory_bytes)
    monkeypatch.setattr(database, "THREAD_BYTES", 2**24)
    monkeypatch.setattr(tables, "PARTITION_ROWS", partition_rows)
    source, pattern = tmp_path / "photos", r"(scene-\d+)"
    again = run_ingest(source, group=pattern, dataset="again")
    assert (again.digest, again.problems) == (grouped.digest, grouped.problems)
    (source / "a/new.png").write_bytes(make_image(1000))
    (source / "b/scene-1-0.png").unlink()
    assert run_ingest(source, group=pattern, dataset="again").digest == run_ingest(source, group=pattern).digest
