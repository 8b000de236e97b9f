"""Data sets as other tools and people pack them."""

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evernear.common.store import open_store
from evernear.common.store.base import put_folder
from evernear.data.sources import FileEntry, open_source
from evernear.data.sources.base import field_text
from evernear.errors import DataError
from evernear.settings import DataSettings

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NAMES = ["ant", "bee", "cat"]
CLASS_LABEL = {"_type": "ClassLabel", "names": NAMES}


def rows(labels: Any, features: object = None, **columns: Any) -> Any:
    """A table of images and the given labels, with the metadata of `datasets`."""
    images = pa.array([{"bytes": b"image %d" % number, "path": None} for number in range(len(labels))], IMAGE)
    table = pa.table({"image": images, "label": labels, **columns})
    return table if features is None else table.replace_schema_metadata({"huggingface": json.dumps(features)})


def features(label: object, **others: object) -> object:
    return {"info": {"features": {"image": {"_type": "Image"}, "label": label, **others}}}


def write(path: Path, table: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def tar(path: Path, members: dict[str, bytes | str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            data = text.encode() if isinstance(text, str) else text
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


class Listing:
    """The images of a source, and what it leaves out."""

    def __init__(self, uri: str, **settings: object) -> None:
        source = open_source(uri, DataSettings.model_validate({"source": uri, **settings}))
        self.entries: list[FileEntry] = list(source.entries())
        self.labels = Counter(entry.label for entry in self.entries)
        self.splits = Counter(entry.explicit_split for entry in self.entries)
        self.left_out = {rule: note.names for rule, note in source.notes.items()}


@pytest.fixture
def hub(tmp_path: Path) -> Callable[..., Listing]:
    """List the Hugging Face dataset in the test's directory, or in a folder of it."""
    return lambda folder=".", **settings: Listing(f"huggingface:{tmp_path / folder}", **settings)


@pytest.fixture
def wds(tmp_path: Path) -> Callable[..., Listing]:
    """List a WebDataset that consists of one tar with the given members."""

    def wds(members: dict[str, bytes | str], name: str = "a.tar", **settings: object) -> Listing:
        tar(tmp_path / name, members)
        return Listing(f"webdataset:{tmp_path}", **settings)

    return wds


CELLS = [
    (pa.array([b"ant", b"bee"]), "ant bee"),
    (pa.array([b"ant", b"bee"], pa.large_binary()), "ant bee"),
    (pa.array(["café".encode(), b"bee"], pa.binary_view()), "café bee"),
    (pa.array(["ant", "bee"], pa.large_string()), "ant bee"),
    (pa.array(["ant", "bee", "ant"]).dictionary_encode(), "ant bee ant"),
    (pa.array([b"ant", b"bee"]).dictionary_encode(), "ant bee"),
    (pa.array([b"ant\0\0", b"moth\0"], pa.binary(5)), "ant moth"),
    (pa.array([["ant"], ["bee"]]), "ant bee"),
    (pa.array([[b"ant"], [b"bee"]], pa.large_list(pa.binary())), "ant bee"),
    (pa.array([["ant"], ["bee"]], pa.list_(pa.string(), 1)), "ant bee"),
    (pa.array([[7], [0]]), "7 0"),
    (pa.array([7, 0, 2**63], pa.uint64()), f"7 0 {2**63}"),
    (pa.array([3.0, 0.0]), "3 0"),
    (pa.array([3.0, 0.0], pa.float16()), "3 0"),
    (pa.array([Decimal("3.00"), Decimal(12)]), "3 12"),
    (pa.array([True, False]), "true false"),
]


@pytest.mark.parametrize("source", ["huggingface", "table"])
@pytest.mark.parametrize(("labels", "expected"), CELLS, ids=[f"{labels.type}" for labels, _ in CELLS])
def test_labels_and_groups_of_any_type_are_text(tmp_path: Path, source: str, labels: Any, expected: str) -> None:
    texts = expected.split()
    for number in range(len(texts)):
        (tmp_path / f"{number}.png").touch()
    paths = [f"{number}.png" for number in range(len(texts))]
    try:
        write(tmp_path / "a.parquet", rows(labels, path=paths, group=labels))
    except pa.ArrowNotImplementedError:
        write(tmp_path / "a.arrow", rows(labels, path=paths, group=labels))
        if source == "table":
            pytest.skip("Parquet has no such type")
    location = tmp_path / "a.parquet" if source == "table" else tmp_path
    assert [entry.label for entry in Listing(f"{source}:{location}", group="column").entries] == texts


def test_missing_labels_are_left_out(hub, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows(pa.array([3.0, None, float("nan"), 4.0])))
    write(tmp_path / "b.parquet", rows(pa.array([["ant"], [], None, [None]], pa.list_(pa.string()))))
    listing = hub()
    assert listing.labels == {"3": 1, "4": 1, "ant": 1}
    assert listing.left_out["no_label"] == [
        f"{name}/00000000{row}" for name, row in (("a.parquet", 1), ("a.parquet", 2))
    ] + [f"b.parquet/00000000{row}" for row in (1, 2, 3)]


NO_TEXT = [
    (pa.array([b"ant", b"\xff\xfe"]), r"row 1 of a\.parquet contains b'\\xff\\xfe', .*its type is binary"),
    (pa.array([["ant", "bee"], ["bee"]]), r"row 0 of a\.parquet contains \['ant', 'bee'\], .*its type is list<"),
    (pa.array([0.5, 1.0]), r"row 0 of a\.parquet contains 0\.5, .*its type is double"),
    (pa.array([float("inf"), 1.0]), r"row 0 of a\.parquet contains inf, .*its type is double"),
    (pa.array([{"name": "ant"}]), r"contains \{'name': 'ant'\}, .*its type is struct<name: string>"),
    (pa.array([date(2026, 1, 2)]), r"contains datetime\.date\(2026, 1, 2\), .*its type is date32"),
    (pa.array([[("ant", 1)]], pa.map_(pa.string(), pa.int64())), r"contains \('ant', 1\)|contains \[\('ant', 1\)\]"),
]


@pytest.mark.parametrize(("values", "message"), NO_TEXT, ids=[f"{values.type}" for values, _ in NO_TEXT])
def test_values_that_are_not_text_are_named_with_their_column_and_type(hub, tmp_path, values, message) -> None:
    write(tmp_path / "a.parquet", rows(values))
    with pytest.raises(DataError, match=f"The column label in {message}" if message.startswith("row") else message):
        hub()
    write(tmp_path / "a.parquet", rows(["ant"] * len(values), group=values))
    with pytest.raises(DataError, match="The column group in row"):
        hub(group="column")
    assert hub().labels == {"ant": len(values)}
    first_row = message.replace("row 1", "row 2").replace("row 0", "row 1")  # a table's rows are counted from 1
    write(tmp_path / "a.parquet", rows(values, path=[f"{number}.png" for number in range(len(values))]))
    with pytest.raises(DataError, match=first_row):
        Listing(f"table:{tmp_path / 'a.parquet'}")


@pytest.mark.parametrize(
    ("value", "text"), [("bee", "bee"), (7, "7"), (7.0, "7"), (True, "true"), (["bee"], "bee"), ("é", "é"), (-2, "-2")]
)
def test_labels_in_json_are_text(wds, value: object, text: str) -> None:
    members = {f"{n}.{k}": v for n in range(3) for k, v in (("png", b"x"), ("json", json.dumps({"label": value})))}
    assert wds(members).labels == {text: 3}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"name": "bee"}, r"\{'name': 'bee'\}, .*its type is object"),
        (["ant", "bee"], r"\['ant', 'bee'\], .*its type is list"),
        (0.5, r"0\.5, .*its type is number"),
        ("\ud800", r"'\\ud800'"),
    ],
)
def test_other_labels_in_json_are_named(wds, value: object, shown: str) -> None:
    with pytest.raises(DataError, match=r"The field label of a\.tar/0\.json contains " + shown):
        wds({"0.png": b"x", "0.json": json.dumps({"label": value})})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([b"ant", b"\xff"]).cast(pa.binary()).view(pa.string()), "whose type is string, .* cannot be read"),
        (pa.array([2**62], pa.int64()).view(pa.timestamp("s")), r"whose type is timestamp\[.*cannot be read"),
    ],
    ids=["UTF-8", "timestamp"],
)
def test_values_that_python_cannot_represent_are_named(hub, tmp_path: Path, values: Any, message: str) -> None:
    write(tmp_path / "a.arrow", rows(values))
    with pytest.raises(DataError, match="The column label of a.arrow, " + message):
        hub()


@pytest.mark.parametrize("twice", ["label", "image", "group"])
def test_a_column_that_occurs_twice(hub, tmp_path: Path, twice: str) -> None:
    table = rows(["ant", "bee"], group=["x", "y"])
    write(tmp_path / "a.arrow", table.append_column(twice, table.column(twice)))
    if twice == "group":
        assert hub().labels == {"ant": 1, "bee": 1}
        return
    with pytest.raises(
        DataError, match=f"has no column {twice}.*, or several; its columns: image, label, group, {twice}"
    ):
        hub()


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(DataError) as caught:
        field_text({"bytes": bytes(1000)}, "The column label")
    assert len(str(caught.value)) < 250


def class_label(**others: object) -> object:
    return {**CLASS_LABEL, **others}


@pytest.mark.parametrize(
    "feature",
    [
        class_label(),
        class_label(num_classes=3, names_file=None, id=None),
        {"_type": "List", "feature": class_label()},
        {"_type": "Sequence", "feature": class_label(), "length": -1},
        [class_label()],
    ],
)
@pytest.mark.parametrize("numbers", [[0, 2], [0.0, 2.0], [[0], [2]]], ids=["int", "float", "list"])
def test_class_names_of_every_form_of_features(hub, tmp_path: Path, feature: object, numbers: Any) -> None:
    others = {"tags": [{"dtype": "string", "_type": "Value"}], "box": {"x": {"dtype": "int64"}}, "odd": None, "new": 7}
    write(tmp_path / "a.parquet", rows(numbers, features(feature, **others)))
    assert hub().labels == {"ant": 1, "cat": 1}


def test_numbers_with_and_without_names_are_not_mixed(hub, tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", rows([0, 1, 2], features(CLASS_LABEL)))
    write(tmp_path / "train-1.parquet", rows([0, 1, 2]))
    message = r"features of train-0\.parquet name the classes of its column label, and train-1\.parquet has numbers"
    with pytest.raises(DataError, match=message):
        hub()
    write(tmp_path / "train-1.parquet", rows([0, 1, 2], features(CLASS_LABEL)))
    assert hub().labels == dict.fromkeys(NAMES, 2)
    write(tmp_path / "train-1.parquet", rows(NAMES))  # names in the rows
    assert hub().labels == dict.fromkeys(NAMES, 2)
    write(tmp_path / "test-0.parquet", rows([-1, -1]))
    with pytest.raises(
        DataError, match=r"2 images of test in .* have no label, .* --set data\.split_folders\.test=none"
    ):
        hub()


def test_class_numbers_are_positions_even_if_the_names_are_numbers(hub, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows([0, 1, 2], features({"_type": "ClassLabel", "names": ["2", "1", "0"]})))
    assert [entry.label for entry in hub().entries] == ["2", "1", "0"]
    write(tmp_path / "a.parquet", rows(["0", "bee"], features(CLASS_LABEL)))  # text is a name already
    assert [entry.label for entry in hub().entries] == ["0", "bee"]
    write(tmp_path / "a.parquet", rows([5], features(CLASS_LABEL)))
    with pytest.raises(DataError, match=r"The label 5 in row 0 of a\.parquet has no name: it has 3 classes"):
        hub()


def test_class_names_of_a_table_and_of_groups(hub, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.png").touch()
    found = features(CLASS_LABEL, group=CLASS_LABEL)
    write(tmp_path / "a.parquet", rows([0, 2], found, path=["0.png", "1.png"], group=[1, 1]))
    assert Listing(f"table:{tmp_path / 'a.parquet'}").labels == {"ant": 1, "cat": 1}
    assert hub().labels == {"ant": 1, "cat": 1}


@pytest.mark.parametrize(
    "metadata",
    [
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b'{"info": null}',
        b'{"info": []}',
        b'{"info": {"features": []}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel"}}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": null}}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": {"0": "ant"}}}}}',
        b'{"info": {"features": {"label": {"_type": "Unknown"}, "gone": {"_type": "ClassLabel", "names": ["a"]}}}}',
        b'{"info": {"features": {"label": [[[]]]}}}',
        b"[" * 100_000,
    ],
)
def test_metadata_of_another_form_is_ignored(hub, tmp_path: Path, metadata: bytes) -> None:
    write(tmp_path / "a.parquet", rows([0, 1]).replace_schema_metadata({b"huggingface": metadata}))
    assert hub().labels == {"0": 1, "1": 1}


def save(folder: Path, *files: str, **state: object) -> None:
    """Write a dataset as `save_to_disk` does."""
    for number, file in enumerate(files):
        write(folder / file, rows([number % 3] * 3, features(CLASS_LABEL)))
    entries = [{"filename": file} for file in files]
    (folder / "state.json").write_text(json.dumps({"_data_files": entries, "_split": None, **state}))
    (folder / "dataset_info.json").write_text("{}")


def test_only_the_files_of_a_saved_dataset_are_used(hub, tmp_path: Path) -> None:
    save(tmp_path, "data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    (tmp_path / "README.md").write_text("# Insects")
    (tmp_path / ".gitattributes").write_text("*.arrow filter=lfs")
    strays = [
        "cache-e955a3ff94534fe8.arrow",
        "cache-e955a3ff94534fe8_00000_of_00004.arrow",
        "data-00002-of-00003.arrow",
    ]
    for name in strays:
        write(tmp_path / name, rows(["stray"] * 3))
    listing = hub()
    assert listing.labels == {"ant": 3, "bee": 3}
    assert listing.left_out == {"litter": strays}


def test_a_saved_dataset_in_a_bucket(tmp_path: Path, bucket: str) -> None:
    save(tmp_path / "train", "data-00000-of-00001.arrow")
    write(tmp_path / "train" / "cache-e955a3ff94534fe8.arrow", rows(["stray"]))
    (tmp_path / "README.md").write_text(README)
    put_folder(open_store(f"s3://{bucket}"), "insects", tmp_path)
    listing = Listing(f"huggingface:s3://{bucket}/insects")
    assert listing.labels == {"ant": 3}
    assert listing.left_out == {"litter": ["train/cache-e955a3ff94534fe8.arrow"]}


def test_a_directory_of_caches(hub, tmp_path: Path) -> None:
    write(tmp_path / "cache-e955a3ff94534fe8.arrow", rows(["stray"]))
    with pytest.raises(DataError, match=r"no Parquet or Arrow files .*, except cache-e955a3ff94534fe8\.arrow, which"):
        hub()


def test_a_cache_is_left_out_without_state(hub, tmp_path: Path) -> None:
    write(tmp_path / "insects-train.arrow", rows(["ant", "bee"]))
    write(tmp_path / "cache-e955a3ff94534fe8.arrow", rows(["stray"]))
    (tmp_path / "state.json").write_text('{"_data_files": "unknown"}')
    assert hub().labels == {"ant": 1, "bee": 1}


def test_a_dataset_dict_names_its_splits(hub, tmp_path: Path) -> None:
    for split in ("train", "test", "old", "test-before"):
        save(tmp_path / split, "data-00000-of-00001.arrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    listing = hub()
    assert listing.splits == {None: 3, "test": 3}
    assert {Path(name).parts[0] for name in listing.left_out["litter"]} == {"old", "test-before"}


def test_a_saved_dataset_is_complete(hub, tmp_path: Path) -> None:
    save(tmp_path, "data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json names data-00001-of-00002\.arrow, which does not exist"):
        hub()


@pytest.mark.parametrize("name", ["huggingface/a.parquet", "huggingface/a.arrow", "webdataset/a.tar"])
def test_git_lfs_pointers_are_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n")
    kind = path.parent.name
    with pytest.raises(DataError, match=rf"^{re.escape(path.name)} is a Git LFS pointer .* `git lfs pull`"):
        Listing(f"{kind}:{tmp_path / kind}")


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (("train-00000-of-00003.parquet", "train-00002-of-00003.parquet"), "train-00001-of-00003.parquet"),
        (("data/train-00001-of-00002.parquet",), "data/train-00000-of-00002.parquet"),
        (("train-1-of-2.parquet",), "train-0-of-2.parquet"),
        (("train-2-of-2.parquet",), "train-1-of-2.parquet"),
        (("train-00000-of-00002-0123456789abcdef.parquet",), "train-00001-of-00002.parquet"),
    ],
)
def test_missing_files_of_a_dataset_are_named(hub, tmp_path: Path, files: tuple[str, ...], missing: str) -> None:
    for name in files:
        write(tmp_path / name, rows(NAMES))
    message = (
        rf"contains {len(files)} of the \d files of .*train-\*-of-\d+\.parquet, and {re.escape(missing)} is missing"
    )
    with pytest.raises(DataError, match=message):
        hub()
    for name in files:  # the way on that the message names
        (tmp_path / name).rename(tmp_path / re.sub(r"-of-\d+", "", name))
    assert hub().labels == dict.fromkeys(NAMES, len(files))


def test_files_that_an_earlier_upload_left_behind_are_complete(hub, tmp_path: Path) -> None:
    for name in ("train-00000-of-00001-0123456789abcdef.parquet", "train-00000-of-00001-fedcba9876543210.parquet"):
        write(tmp_path / name, rows(NAMES))
    assert hub().labels == dict.fromkeys(NAMES, 2)


def test_a_selection_of_rows_is_refused(hub, tmp_path: Path) -> None:
    save(tmp_path, "dataset.arrow", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match=r"state\.json refers to a selection of the rows .* flatten_indices\(\)"):
        hub()


@pytest.mark.parametrize(
    "files",
    [
        ("{}/train-00000-of-00001.parquet", "{}/test-00000-of-00001.parquet"),
        ("data/{}/train/0000.parquet", "data/{}/test/0000.parquet"),
        ("{}/0.0.0/insects-train.arrow",),
    ],
)
def test_configurations_are_not_mixed(hub, tmp_path: Path, files: tuple[str, ...]) -> None:
    for name, label in (("cropped", "ant"), ("plain_text", "bee")):
        for file in files:
            write(tmp_path / file.format(name), rows([label] * 4))
    with pytest.raises(DataError, match=r"several configurations of a dataset: .*cropped.*, .*plain_text.*") as caught:
        hub()
    folder = str(caught.value).partition(f"--source huggingface:{tmp_path}/")[2].partition(". If")[0]
    assert hub(folder).labels == {"ant": 4 * len(files)}
    assert hub(split_folders={"cropped": "none"}).labels == {"bee": 4 * len(files)}


def test_a_configuration_with_another_number_of_files(hub, tmp_path: Path) -> None:
    write(tmp_path / "a" / "train-00000-of-00001.parquet", rows(["ant"]))
    for number in range(2):
        write(tmp_path / "b" / f"train-0000{number}-of-00002.parquet", rows(["bee"]))
    with pytest.raises(DataError, match="several configurations of a dataset: a, b"):
        hub()
    for number in range(2):
        (tmp_path / "b" / f"train-0000{number}-of-00002.parquet").rename(tmp_path / "b" / f"train-b-{number}.parquet")
    assert hub().labels == {"ant": 1, "bee": 2}  # the names differ


def test_folders_of_one_dataset_are_no_configurations(hub, tmp_path: Path) -> None:
    for number, folder in enumerate(("2025", "2026")):
        write(tmp_path / folder / f"train-{number}.parquet", rows(["ant"]))
        write(tmp_path / folder / "train" / folder / "0.parquet", rows(["bee"]))
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: '**/*.parquet'\n---\n")
    assert hub().labels == {"ant": 2, "bee": 2}


README = """---
license: mit
configs:
- config_name: en
  data_files:
  - {split: train, path: data/en_train-*}
  - split: test
    path: [data/en_test-0*]
- config_name: fr
  data_files: {train: data/fr_train-*}
---
# Insects
"""


@pytest.mark.slow
def test_configurations_that_the_readme_names(hub, tmp_path: Path) -> None:
    for name in ("en_train", "en_test", "fr_train"):
        write(tmp_path / "data" / f"{name}-00000-of-00001.parquet", rows([name[:2]] * 2))
    assert hub().labels == {"en": 4, "fr": 2}
    (tmp_path / "README.md").write_text(README)
    with pytest.raises(DataError, match=r"configurations of a dataset: en, fr\..*copy .*data/en_test-00000-of-00001"):
        hub()
    assert hub(split_folders={"fr_train": "none"}).labels == {"en": 4}
    for header in ("configs: [}", "date: 2024-02-30", f"a: {'[' * 5000}"):  # no YAML, no date, too deep
        (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
        assert hub().labels == {"en": 4, "fr": 2}
    (tmp_path / "dataset_dict.json").write_text("[" * 100_000)
    assert hub().labels == {"en": 4, "fr": 2}


def test_a_split_without_labels_is_named_with_the_option_that_leaves_it_out(hub, tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", rows([0, 1, 2, -1], features(CLASS_LABEL)))
    write(tmp_path / "test-0.parquet", rows([-1] * 5, features(CLASS_LABEL)))
    write(tmp_path / "val" / "0.parquet", rows(pa.array([None] * 3, pa.int64()), features(CLASS_LABEL)))
    with pytest.raises(DataError) as caught:
        hub()
    message = str(caught.value)
    assert "5 images of test and 3 images of val in" in message
    assert "add --set data.split_folders.test=none --set data.split_folders.val=none." in message
    listing = hub(split_folders={"test": "none", "val": "none"})
    assert listing.labels == {"ant": 1, "bee": 1, "cat": 1}
    assert listing.left_out["no_label"] == ["train-0.parquet/000000003"]


def test_labels_of_a_test_file_that_are_all_minus_one(hub, tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", rows([1, -1, 1, -1]))  # two classes
    write(tmp_path / "test-0.parquet", rows(pa.array([-1, -1, None, -1, -1])))
    with pytest.raises(DataError, match=r"5 images of test in .* have no label"):
        hub()
    assert hub(split_folders={"test": "none"}).labels == {"1": 2, "-1": 2}


def test_a_test_file_without_a_label_column(hub, tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", rows(["ant", "bee"]))
    write(tmp_path / "test-0.parquet", rows(["x"]).drop_columns(["label"]))
    with pytest.raises(DataError, match=r"test-0\.parquet has no column label.* --set data\.split_folders\.test=none"):
        hub()
    assert hub(split_folders={"test": "none"}).labels == {"ant": 1, "bee": 1}
    write(tmp_path / "train-0.parquet", rows(["x"]).drop_columns(["label"]))
    with pytest.raises(DataError, match=r"train-0\.parquet has no column label.*\(`rename_column` of datasets\)\.$"):
        hub(split_folders={"test": "none"})


def test_a_tar_of_test_images_without_labels(wds, tmp_path: Path) -> None:
    tar(tmp_path / "train-0.tar", {"0.png": b"x", "0.cls": "ant", "1.png": b"y", "2.png": b"z", "2.json": "{}"})
    with pytest.raises(DataError, match=r"1 image of test in .* have no label.* --set data\.split_folders\.test=none"):
        wds({"0.png": b"x"}, "test-0.tar")
    with pytest.raises(DataError, match=r"1 image of test in .* have no label"):
        wds({"0.png": b"x", "0.cls": "-1"}, "test-0.tar")
    listing = wds({"0.png": b"x"}, "test-0.tar", split_folders={"test": "none"})
    assert listing.labels == {"ant": 1}
    assert listing.left_out["no_label"] == ["train-0.tar/1.png", "train-0.tar/2.png"]


def test_training_images_without_labels_cannot_be_left_out(hub, tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", rows(pa.array([None, None], pa.string())))
    write(tmp_path / "test-0.parquet", rows(["ant", "bee"]))
    with pytest.raises(DataError, match=r"2 images of train in .* have no label, and .* has one; add them\.$"):
        hub()


def names_of(listing: Listing) -> list[str]:
    return [entry.name.removeprefix("a.tar/") for entry in listing.entries]


@pytest.mark.parametrize(
    ("members", "used"),
    [
        (["0.png", "0.mask.png", "0.cls"], "0.png"),
        (["0.cls", "0.mask.png", "0.png"], "0.png"),
        (["0.jpg", "0.seg.png", "0.depth.tif", "0.cls"], "0.jpg"),
        (["0.jpg", "0.png", "0.cls"], "0.jpg"),
        (["0.png", "0.JPEG", "0.cls"], "0.JPEG"),
        (["./0.png", "./0.mask.png", "./0.cls"], "./0.png"),
        (["a.b/0.png", "a.b/0.mask.png", "a.b/0.cls"], "a.b/0.png"),
        (["0.mask.png", "0.cls"], "0.mask.png"),
        (["0.rgb.png", "0.meta.json", "0.cls"], "0.rgb.png"),
    ],
)
def test_one_image_of_a_sample_is_used(wds, members: list[str], used: str) -> None:
    listing = wds({name: "1" if name.endswith("cls") else "not JSON" for name in members})
    assert names_of(listing) == [used]
    others = [f"a.tar/{name}" for name in members if name != used and not name.endswith(("cls", "json"))]
    assert listing.left_out.get("not_an_image", []) == sorted(others)


@pytest.mark.parametrize("members", [("0.left.jpg", "0.right.jpg"), ("0.png", "0.tif"), ("0.rgb.png", "0.depth.png")])
def test_two_equal_images_of_a_sample_are_refused(wds, members: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"The sample 0 of a\.tar has one label and several images: " + members[0]):
        wds({**dict.fromkeys(members, b"x"), "0.cls": "1"})
    renamed = {"0.jpg": b"x", f"0.mask.{members[1].rpartition('.')[2]}": b"y", "0.cls": "1"}  # as the message says
    assert names_of(wds(renamed)) == ["0.jpg"]


def test_names_with_dots(wds) -> None:
    members = {f"img_2.00{n}.{kind}": text for n, text in enumerate(NAMES) for kind in ("png", "mask.png", "cls")}
    listing = wds(members)
    assert listing.labels == {"ant": 1, "bee": 1, "cat": 1}
    assert len(listing.left_out["not_an_image"]) == 3
    by_json = {f"v1.{n}.{k}": v for n in NAMES for k, v in (("jpg", b"x"), ("json", json.dumps({"label": n})))}
    assert wds(by_json).labels == {"ant": 1, "bee": 1, "cat": 1}


def test_names_with_dots_and_no_labels(wds) -> None:
    members: dict[str, bytes | str] = {f"img_2.00{n}.png": b"x" for n in range(3)}
    with pytest.raises(DataError) as caught:
        wds({**members, "img_2.000.txt": "ant"})
    message = str(caught.value)
    shown = "img_2.000.png, img_2.001.png, img_2.002.png, img_2.000.txt"
    assert f"has the members {shown}, and none is the label of img_2.000.png: add img_2.000.cls" in message
    with pytest.raises(DataError, match=r"several images.*such as img_2\.000\.cls, and remove the label of img_2"):
        wds({**members, "img_2.cls": "1"})  # all images would have one class
    assert wds({**members, "img_2.000.cls": "1"}).labels == {"1": 1}


def test_problems_of_packed_files_speak_of_images(tmp_path: Path, make_image, run_ingest) -> None:
    members: dict[str, bytes | str] = {}
    for number in range(40):
        members |= {f"{number}.png": make_image(number), f"{number}.mask.png": make_image(1000 + number)}
        members |= {f"{number}.cls": str(number % 2)} if number else {}
    tar(tmp_path / "wds" / "a.tar", members)
    for _ in range(2):  # the notes of an unchanged file remain
        manifest = run_ingest(f"webdataset:{tmp_path / 'wds'}")
        assert sum(shard.count for shard in manifest.shards) == 39
        assert manifest.problem_counts["no_label"] == 2
        assert manifest.problem_counts["not_an_image"] == 39
