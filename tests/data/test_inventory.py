"""A report of S3 Inventory as the listing of a bucket."""

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import quote_plus

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evernear.common.store import Store, open_store
from evernear.data.manifest import SPLITS, Manifest
from evernear.data.sources import name_of, open_source
from evernear.errors import DataError, SettingsError

REPORTS = "reports/photos/daily"
COLUMNS = ["Bucket", "Key", "Size", "LastModifiedDate", "ETag"]
RunIngest = Callable[..., Manifest]


@pytest.fixture
def images(tree: Path, bucket: str) -> Store:
    """A bucket of images, two of which have unusual keys."""
    (tree / "1" / "000.png").rename(tree / "1" / "a b+ü%.png")
    store = open_store(f"s3://{bucket}/images")
    for path in filter(Path.is_file, tree.rglob("*")):
        store.put(path.relative_to(tree).as_posix(), path)
    return store


def report(
    images: Store, bucket: str, kind: Literal["CSV", "Parquet"] = "CSV", at: str = "2026-11-01T01-00Z", files: int = 3
) -> None:
    """Write a report as S3 does: rows in no order, over several files."""
    rows = [
        {"Bucket": bucket, "Key": f"images/{info.key}", "Size": info.size_bytes, "ETag": info.etag}
        for info in images.list("")
    ]
    rows.append({"Bucket": bucket, "Key": "elsewhere/3/1.png", "Size": 10, "ETag": "x"})
    parts = [rows[start::files][::-1] for start in range(files)]
    write_report(bucket, kind, at, [csv_file(part) if kind == "CSV" else parquet_file(part) for part in parts])


def write_report(bucket: str, kind: str, at: str, contents: list[bytes], **changes: object) -> None:
    store = open_store(f"s3://{bucket}")
    files = [
        {
            "key": f"{REPORTS}/data/{at}-{number}.{kind.lower()}",
            "size": len(content),
            "MD5checksum": hashlib.md5(content, usedforsecurity=False).hexdigest(),
        }
        for number, content in enumerate(contents)
    ]
    for file, content in zip(files, contents, strict=True):
        store.put(str(file["key"]), content)
    parquet = "message s3.inventory { required binary bucket (UTF8); required binary key (UTF8); optional int64 size;"
    manifest = {
        "sourceBucket": bucket,
        "destinationBucket": f"arn:aws:s3:::{bucket}",
        "version": "2016-11-30",
        "creationTimestamp": "1514944800000",
        "fileFormat": kind,
        "fileSchema": ", ".join(COLUMNS) if kind == "CSV" else f"{parquet} optional binary e_tag (UTF8); }}",
        "files": files,
    } | changes
    store.put(f"{REPORTS}/{at}/manifest.json", json.dumps(manifest).encode())


def csv_file(rows: list[dict[str, object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    for row in rows:
        writer.writerow([row["Bucket"], quote_plus(str(row["Key"]), "/"), row["Size"], "2026-10-31", row["ETag"]])
    return gzip.compress(text.getvalue().encode())


def parquet_file(rows: list[dict[str, object]]) -> bytes:
    columns = {"bucket": "Bucket", "key": "Key", "size": "Size", "e_tag": "ETag"}
    file = io.BytesIO()
    pq.write_table(pa.table({name: [row[column] for row in rows] for name, column in columns.items()}), file)
    return file.getvalue()


def images_of(manifest: Manifest) -> int:
    return sum(manifest.count(split) for split in SPLITS)


@pytest.mark.parametrize("kind", ["CSV", "Parquet"])
def test_report_gives_the_dataset_of_the_bucket(
    images: Store, bucket: str, run_ingest: RunIngest, kind: Literal["CSV", "Parquet"]
) -> None:
    report(images, bucket, kind)
    listed = run_ingest(f"s3://{bucket}/images")
    reported = run_ingest(f"inventory:s3://{bucket}/{REPORTS}#images")
    assert reported.digest == listed.digest
    assert (
        reported.name == f"{bucket}-reports-photos-daily-images" == name_of(f"inventory:s3://{bucket}/{REPORTS}#images")
    )


def test_newest_complete_report_counts(images: Store, bucket: str, run_ingest: RunIngest, make_image) -> None:
    report(images, bucket)
    old = run_ingest(f"inventory:s3://{bucket}/{REPORTS}#images")
    images.put("2/new.png", make_image(1000))
    assert run_ingest(f"inventory:s3://{bucket}/{REPORTS}#images").digest == old.digest, "not in the report yet"
    report(images, bucket, at="2026-11-02T01-00Z")
    open_store(f"s3://{bucket}").put(f"{REPORTS}/2026-11-03T01-00Z/manifest.checksum", b"no manifest yet")
    assert images_of(run_ingest(f"inventory:s3://{bucket}/{REPORTS}#images")) == images_of(old) + 1


def test_object_that_was_deleted_after_the_report_is_left_out_and_named(
    images: Store, bucket: str, run_ingest: RunIngest
) -> None:
    report(images, bucket)
    images.delete("1/003.png")
    (problem,) = run_ingest(f"inventory:s3://{bucket}/{REPORTS}#images").problems
    assert problem.names == ("1/003.png",)


def test_earlier_versions_and_deleted_objects_are_no_images(images: Store, bucket: str) -> None:
    rows = [("1/a.png", "true", "false"), ("1/a.png", "false", "false"), ("1/b.png", "true", "true")]
    lines = "".join(f'"{bucket}","{key}","x","{latest}","{deleted}","9","e"\n' for key, latest, deleted in rows)
    schema = "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, ETag"
    write_report(bucket, "CSV", "2026-11-01T01-00Z", [gzip.compress(lines.encode())], fileSchema=schema)
    source = open_source(f"inventory:s3://{bucket}/{REPORTS}")
    assert [entry.name for entry in source.entries()] == ["1/a.png"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fileFormat": "ORC"}, "are ORC files; set the format of the inventory to Parquet or CSV"),
        ({"fileSchema": "Bucket, Key, Size"}, "lack ETag; add Size and ETag to the optional fields of the inventory"),
        ({"files": [{"key": "x"}]}, "is not a manifest of S3 Inventory: files.0.MD5checksum is invalid or missing"),
        ({"sourceBucket": "../x"}, "is not a manifest of S3 Inventory: sourceBucket is invalid or missing"),
    ],
)
def test_manifests_that_cannot_be_used(bucket: str, changes: dict[str, object], message: str) -> None:
    write_report(bucket, "CSV", "2026-11-01T01-00Z", [], **changes)
    with pytest.raises(DataError, match=message):
        open_source(f"inventory:s3://{bucket}/{REPORTS}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "is not valid CSV"),
        (gzip.compress(b'"bucket","key"\n'), "is not valid CSV"),
        (gzip.compress(b'"bucket","1/a.png","large","","e"\n'), "is not valid inventory"),
        (gzip.compress(b'"bucket","1/%ff.png","9","","e"\n'), "is not valid CSV"),
    ],
    ids=["no gzip", "too few cells", "a size that is no number", "a key that is not UTF-8"],
)
def test_broken_files_of_a_report(bucket: str, content: bytes, message: str) -> None:
    write_report(bucket, "CSV", "2026-11-01T01-00Z", [content])
    with pytest.raises(DataError, match=message):
        list(open_source(f"inventory:s3://{bucket}/{REPORTS}").entries())


def test_file_that_differs_from_its_checksum(images: Store, bucket: str) -> None:
    report(images, bucket, files=1)
    open_store(f"s3://{bucket}").put(f"{REPORTS}/data/2026-11-01T01-00Z-0.csv", gzip.compress(b""))
    with pytest.raises(DataError, match="differs from its checksum in the manifest"):
        list(open_source(f"inventory:s3://{bucket}/{REPORTS}#images").entries())


def test_folder_without_a_report_and_a_path(bucket: str) -> None:
    with pytest.raises(DataError, match="contains no report of S3 Inventory; name the folder"):
        open_source(f"inventory:s3://{bucket}/{REPORTS}")
    with pytest.raises(SettingsError, match="is not in a bucket"):
        open_source("inventory:reports")
