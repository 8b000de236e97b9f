"""Tables of names and labels: the dataset of the same folder, and one sentence for each mistake."""

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evernear.common.store import open_store
from evernear.common.store.base import put_folder
from evernear.data.source_diff import diff_source
from evernear.data.sources.table import Table
from evernear.errors import DataError, SettingsError
from evernear.review.label_target import open_label_target
from evernear.settings import DataSettings
from tests.small_ingest import noted

Rows = list[dict[str, str]]


def rows_of(tree: Path) -> Rows:
    return [{"path": str(path.relative_to(tree)), "label": path.parent.name} for path in sorted(tree.rglob("*.png"))]


def write_csv(path: Path, rows: Rows, **options: str) -> Path:
    encoding = options.pop("encoding", "utf-8")
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=options.get("delimiter", ","))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


@pytest.fixture
def table(tree: Path) -> Callable[[str], str]:
    """``table(text)`` writes the text as labels.csv next to the images, and returns the source."""

    def table(text: str) -> str:
        path = tree / "labels.csv"
        path.write_text(text)
        return f"table:{path}"

    return table


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_table_gives_the_dataset_of_the_folder(tree, run_ingest, tmp_path, write) -> None:
    suffix = ".csv" if write is write_csv else ".parquet"
    folder = run_ingest(tree, dataset="folder")
    path = write(tree / f"labels{suffix}", rows_of(tree))
    assert run_ingest(f"table:{path}", dataset="table").digest == folder.digest


@pytest.mark.parametrize(("encoding", "delimiter"), [("utf-8", ","), ("utf-8-sig", ";"), ("utf-16", "\t")])
def test_csv_of_spreadsheets_is_read(tree, encoding, delimiter) -> None:
    rows = [{**row, "label": f"käse {row['label']}", "note": "a, b; c"} for row in rows_of(tree)]
    path = write_csv(tree / "labels.csv", rows, encoding=encoding, delimiter=delimiter)
    entries = list(Table(str(path), DataSettings()).entries())
    assert len(entries) == 36
    assert {entry.label for entry in entries} == {"käse 1", "käse 2", "käse 10"}


@pytest.mark.parametrize(
    "text",
    [
        "label, path\nant, 1/000.png\nbee, 1/003.png\n",
        'label, path\n"ant", "1/000.png"\n"bee",  "1/003.png"\n',
        "label ,path\nant ,1/000.png \nbee\t,1/003.png\u00a0\n",
        "sep=;\nlabel;path\nant;1/000.png\nbee;1/003.png\n",
        '"sep=|"\r\nlabel|path\r\nant|1/000.png\r\nbee|1/003.png\r\n',
        "SEP=\t\nlabel\tpath\nant\t1/000.png\nbee\t1/003.png\n",
        "sep=;;;\nlabel;path;\nant;1/000.png;\nbee;1/003.png;\n",
        "label,path,,\nant,1/000.png,,\nbee,1/003.png\n,,,\n , ,,\n",
        "label,path,split,group\nant,1/000.png,,\nbee,1/003.png\n",
        ",,\n\nlabel,path,\nant,1/000.png,\nbee,1/003.png,\n",
        "\ufeff\ufeffLABEL,\u200bPath\u00a0\nant,1/000.png\nbee,\u200b1/003.png\n",
        "label,path\rant,1/000.png\rbee,1/003.png\r",
        'label,path\n="ant",./1/000.png\n"=""bee""",1//003.png\n',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be"])
def test_whatever_spreadsheets_write_is_read(tree, text: str, encoding: str) -> None:
    (tree / "labels.csv").write_bytes(text.encode(encoding))
    entries = list(Table(str(tree / "labels.csv"), DataSettings()).entries())
    assert [(entry.name, entry.label) for entry in entries] == [("1/000.png", "ant"), ("1/003.png", "bee")]


@pytest.mark.parametrize(
    ("written", "file", "shown"),
    [
        ("1/caf\u00e9.png", "1/cafe\u0301.png", r"'1/caf\\xe9\.png' (the file there is '1/cafe\\u0301\.png')"),
        ("1/cafe\u0301.png", "1/caf\u00e9.png", r"'1/cafe\\u0301\.png' (the file there is '1/caf\\xe9\.png')"),
        ("1/a b.png", "1/a\u00a0b.png", r"'1/a b\.png' (the file there is '1/a\\xa0b\.png')"),
        ("1/a\u200bb.png", "1/ab.png", r"'1/a\\u200bb\.png' (the file there is '1/ab\.png')"),
        ("1/ab.png", "1/ab.png ", r"'1/ab\.png' (the file there is '1/ab\.png ')"),
        ("Caf\u00e9/A.PNG", "cafe\u0301/a.png", r"'Caf\\xe9/A\.PNG' (the file there is 'cafe\\u0301/a\.png')"),
        (r"x\y.png", "x/y.png", r"'x\\\\y\.png' (the file there is 'x/y\.png')"),
    ],
)
@pytest.mark.parametrize("in_bucket", [False, True])
def test_difference_from_a_file_that_nobody_sees_is_shown(
    tree, table, run_ingest, bucket, written: str, file: str, shown: str, in_bucket: bool
) -> None:
    text = f"path,label\n1/000.png,a\n{written},b\n"
    if in_bucket:
        if not file.startswith("1/"):
            pytest.skip("the listing of a bucket is searched in the folder of the path")
        store = open_store(f"s3://{bucket}/images")
        for key, data in (("1/000.png", b"1"), (file, b"2"), ("labels.csv", text.encode())):
            store.put(key, data)
        source = f"table:s3://{bucket}/images/labels.csv"
    else:
        (tree / file).parent.mkdir(exist_ok=True)
        (tree / "1/000.png").rename(tree / file)
        source = table(text.replace("1/000.png", "1/003.png"))
    with pytest.raises(DataError, match=shown.replace("(", r"\(").replace(")", r"\)")):
        run_ingest(source)


@pytest.mark.slow
def test_table_in_a_bucket_and_objects_of_any_bucket(tree, run_ingest, bucket: str) -> None:
    store = open_store(f"s3://{bucket}/some/images")
    put_folder(open_store(f"s3://{bucket}"), "some/images", tree)
    folder = run_ingest(f"s3://{bucket}/some/images", dataset="folder")
    store.put("labels.csv", write_csv(tree / "labels.csv", rows_of(tree)))
    assert run_ingest(f"table:s3://{bucket}/some/images/labels.csv", dataset="table").digest == folder.digest
    rows = [row | {"path": f"s3://{bucket}/some/images/{row['path']}"} for row in rows_of(tree)]
    local = run_ingest(f"table:{write_csv(tree / 'uris.csv', rows)}", dataset="uris")
    assert sum(shard.count for shard in local.shards) == 36
    store.delete("1/000.png")
    with pytest.raises(DataError, match=r"do not exist in .*: s3://.*/1/000\.png; correct the paths"):
        run_ingest(f"table:{tree / 'uris.csv'}", dataset="uris")


def test_split_column_decides_the_split(tree, run_ingest, contents, digest_of) -> None:
    words = ("train", "Test", "val", "query", "")
    rows = [row | {"split": words[number % 5]} for number, row in enumerate(rows_of(tree))]
    found = contents(run_ingest(f"table:{write_csv(tree / 'labels.csv', rows)}"))
    expected = {"train": "train", "Test": "test", "val": "gallery", "query": "query", "": "train"}
    for row in rows:
        assert found.split[digest_of((tree / row["path"]).read_bytes())] == expected[row["split"]]


def test_settings_answer_for_an_unknown_split(tree, run_ingest) -> None:
    rows = [row | {"split": ("train", "fold 1", "fold 2")[number % 3]} for number, row in enumerate(rows_of(tree))]
    source = f"table:{write_csv(tree / 'labels.csv', rows)}"
    with pytest.raises(DataError, match=r"The split 'fold 1' in line 3 of labels.csv is unknown") as caught:
        run_ingest(source)
    assert """--set 'data.split_folders={"fold 1": "test"}'""" in str(caught.value)
    with pytest.raises(DataError, match=r"split_folders names fold 3, but no image of labels\.csv has this split"):
        run_ingest(source, split_folders={"fold 1": "test", "fold 2": "none", "fold 3": "test"})
    manifest = run_ingest(source, split_folders={"fold 1": "test", "fold 2": "none", "fold 3": "none"})
    assert manifest.count("test") == 12
    assert sum(shard.count for shard in manifest.shards) == 24


def test_misspelled_split_to_leave_out_is_named(tree, run_ingest) -> None:
    rows = [row | {"split": ("train", "test")[number % 2]} for number, row in enumerate(rows_of(tree))]
    source = f"table:{write_csv(tree / 'labels.csv', rows)}"
    with pytest.raises(DataError, match=r"leaves out tests, which labels\.csv does not have; write 'test' if you mean"):
        run_ingest(source, split_folders={"tests": "none"})


def test_table_without_a_group_column_is_refused_for_groups(tree, run_ingest) -> None:
    with pytest.raises(DataError, match=r"labels\.csv names the group of no image, such as 1/000\.png; name it in the"):
        run_ingest(f"table:{write_csv(tree / 'labels.csv', rows_of(tree))}", group="column")


def test_another_label_moves_the_image_and_nothing_is_read_again(tree, run_ingest, contents, digest_of) -> None:
    rows = rows_of(tree)
    source = f"table:{write_csv(tree / 'labels.csv', rows)}"
    first = run_ingest(source)
    (tree / rows[1]["path"]).chmod(0)  # a second read would fail
    old = digest_of((tree / rows[0]["path"]).read_bytes())
    rows[0]["label"] = "2"
    write_csv(tree / "labels.csv", rows)
    second = contents(run_ingest(source))
    assert second.label[old] == "2"
    assert contents(first).label[old] == "1"


def test_watcher_counts_another_label_as_new(tree, run_ingest, tmp_path) -> None:
    rows = rows_of(tree)
    source = f"table:{write_csv(tree / 'labels.csv', rows)}"
    manifest = run_ingest(source)
    store = open_store(manifest.store_uri)
    values = DataSettings(source=source)
    assert diff_source(values, store, [manifest])[0].new == 0
    rows[0]["label"] = "2"
    write_csv(tree / "labels.csv", rows)
    assert diff_source(values, store, [manifest])[0].new == 1


def test_left_out_rows_are_counted_and_named(tree, table, run_ingest) -> None:
    rows = "".join(f"{row['path']},{row['label']}\n" for row in rows_of(tree))
    (tree / "1" / "._000.png").write_bytes(b"resource fork")
    (tree / "1" / "notes.txt").write_text("notes")
    (tree / "1" / "words.png").write_text("no image")
    extra = "1/._000.png,1\n1/notes.txt,1\n1/words.png,1\n1/000.png,1\n./1/003.png, 1 \n2/001.png,\n\n"
    manifest = run_ingest(table("path,label\n" + rows.replace("2/001.png,2\n", "") + extra))
    assert noted(manifest, "litter") == ["1/._000.png"]
    assert noted(manifest, "not_an_image") == ["1/notes.txt"]
    assert noted(manifest, "undecodable") == ["1/words.png"]
    assert noted(manifest, "duplicate_row") == ["1/000.png", "1/003.png"]
    assert noted(manifest, "no_label") == ["2/001.png"]
    assert manifest.problem_counts["duplicate_row"] == 2


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "labels.csv has no column path and no column label, but no columns"),
        ("file,class\na,b\n", "labels.csv has no column path and no column label, but 'file', 'class'; call the"),
        ("path,label,PATH\na,b,c\n", "has two columns called path"),
        ("path,label\n1/000.png,a,b\n", "Line 2 of labels.csv has 3 of 2 columns"),
        ("path,label\n1/000.png\n", "Line 2 of labels.csv has 1 of 2 columns"),
        ('path,label\n"1/000.png,a\n', "labels.csv is not valid CSV after line"),
        (
            'path,label,note\n1/000.png,a,"big\n1/001.png,a,\n2/001.png,b,small"\n',
            r"A quotation mark in line 2 of labels\.csv opens a value .* rows, such as '1/001\.png,a,'; remove it",
        ),
        ("path,label\n,a\n", "The path '' in line 2 of labels.csv is empty"),
        ("path,label\n../secret.png,a\n", r"leads out of the table's folder with '\.\.'"),
        ("path,label\n1/../../secret.png,a\n", r"leads out of the table's folder with '\.\.'"),
        ("path,label\n/etc/hostname,a\n", "'/etc/hostname' in line 2 of labels.csv is neither relative"),
        ("path,label\n~/a.png,a\n", "is neither relative"),
        ("path,label\nC:\\images\\a.png,a\n", "is neither relative"),
        ("path,label\nC:/images/a.png,a\n", "is neither relative"),
        ("path,label\n\\\\server\\images\\a.png,a\n", "is neither relative"),
        (POINTER, r"^labels\.csv is a Git LFS pointer .* `git lfs pull`"),
        ("path,label\nhttps://example.org/a.png,a\n", "is neither relative"),
        ("path,label\ns3://bucket,a\n", "names no object"),
        (
            "path,label\n1/000.png,a\n1/000.png,b\n",
            r"contradicts itself: .* for 1/000.png \(line 3\); keep the right row",
        ),
        ("path,label\n1/000.png,a\nmissing.png,b\n", "files that do not exist in .*: missing.png; correct the paths"),
        ("path,label\n1/000.png,a\n1,b\n", "files that do not exist in .*: 1; correct the paths"),
        ("path,label\n1\\000.png,a\n2/001.png,b\n", r"Separate folders by / instead of \\"),
        ("path,label,split\n1/000.png,a,test\n2/001.png,b,test\n", "but no image in train"),
        (
            "path,label\n",
            r"names no image with a label; give each image a row with its path and its label\.$",
        ),
        ("path,label\n1/000.png,\n", "names no image with a label.* 1 file was left out: 1/000.png"),
        ("path,label\n1/000.png,a\n", r"images of only one class \('a'\); a recognizer needs at least two\.$"),
    ],
)
def test_mistakes_are_one_sentence(table, run_ingest, text: str, message: str) -> None:
    source = table(text)
    with pytest.raises(DataError, match=message):
        run_ingest(source)


def test_numbers_of_any_length_are_in_order(tree, table, run_ingest) -> None:
    labels = [f"{'9' * 5000}", "10", "0002", "1"]
    rows = [f"{row['path']},{label}" for row, label in zip(rows_of(tree), labels, strict=False)]
    assert run_ingest(table("\n".join(["path,label", *rows]))).labels == (*labels[::-1],)


def test_other_encodings_are_refused(tree, run_ingest) -> None:
    path = tree / "labels.csv"
    path.write_bytes("path,label\n1/000.png,käse\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"Line 2 of labels.csv is not UTF-8; save it as CSV UTF-8"):
        run_ingest(f"table:{path}")
    path.write_bytes("path,label\n1/000.png,käse\n".encode("utf-16")[:-1])
    with pytest.raises(DataError, match=r"^labels.csv is not UTF-8; save it as CSV UTF-8"):
        run_ingest(f"table:{path}")


def test_parquet_types(tree, run_ingest) -> None:
    paths = [row["path"] for row in rows_of(tree)][:4]
    path = tree / "labels.parquet"
    pq.write_table(pa.table({"path": paths, "label": pa.array([1.0, 2.0, None, 1.0])}), path)
    assert [entry.label for entry in Table(str(path), DataSettings()).entries()] == ["1", "2", "1"]
    pq.write_table(pa.table({"path": [1, 2, 3, 4], "label": ["a"] * 4}), path)
    with pytest.raises(
        DataError, match=r"labels.parquet names files that do not exist in .*: 1, 2, 3, 4; correct the paths"
    ):
        run_ingest(f"table:{path}")
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"labels.parquet is not a valid Parquet or Arrow file"):
        run_ingest(f"table:{path}")


def test_a_formula_is_a_label_like_any_other(table) -> None:
    source = table("path,label\n1/000.png,=1+1\n2/001.png,-2\n")
    assert [entry.label for entry in Table(source.removeprefix("table:"), DataSettings()).entries()] == ["=1+1", "-2"]


def test_links_out_of_the_folder_are_noted(tree, table, tmp_path, run_ingest) -> None:
    outside = tmp_path / "outside"
    (tree / "2").rename(outside)
    (tree / "2").symlink_to(outside)
    text = "path,label\n" + "".join(f"{row['path']},{row['label']}\n" for row in rows_of(tree))
    text += "".join(f"2/{path.name},2\n" for path in sorted(outside.iterdir()))
    assert noted(run_ingest(table(text)), "outside_link") == [f"2 -> {outside}"]


def test_each_link_is_counted_once(tree, table, tmp_path) -> None:
    outside, rows = os.fsdecode(os.fsencode(tmp_path) + b"/out\xffside"), "path,label\n"
    for folder in "xy":
        Path(outside, folder).mkdir(parents=True)
        Path(outside, folder, "0.png").write_bytes(b"")
        rows += "".join(f"link{number:02}/{folder}/0.png,{folder}\n" for number in range(22))
    for number in range(22):
        (tree / f"link{number:02}").symlink_to(outside)
    source = Table(table(rows).removeprefix("table:"), DataSettings())
    assert len(list(source.entries())) == 44
    assert source.notes["outside_link"].count == 22
    assert source.notes["outside_link"].names[0] == rf"link00 -> {tmp_path}/out\xffside"


def test_labels_of_a_table_cannot_be_written(table) -> None:
    source = table("path,label\n1/000.png,1\n2/001.png,2\n")
    with pytest.raises(SettingsError, match=r"Labels cannot be written to table:.*: correct them where it was made"):
        open_label_target(source)


def test_locations_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("labels.csv", "table:labels.csv", str(tmp_path / "labels.csv")):
        assert DataSettings(source=source).source == f"table:{tmp_path / 'labels.csv'}"
    assert DataSettings(source="s3://bucket/labels.parquet").source == "table:s3://bucket/labels.parquet"
    assert DataSettings(source="table:s3://bucket/labels.csv").source == "table:s3://bucket/labels.csv"
    assert DataSettings(source="folder:a.csv").source == f"folder:{tmp_path / 'a.csv'}"
    with pytest.raises(SettingsError, match=r"is not a table; name a file that ends with .csv, .tsv or .parquet"):
        Table("labels.xlsx", DataSettings())
    with pytest.raises(DataError, match=r"The table missing.csv does not exist"):
        Table("missing.csv", DataSettings())
