"""Names that look the same are one class; names that look alike are reported."""

import json
from pathlib import Path

import pytest

from evernear.common.text import class_name, lookalike_key, spelled
from evernear.data.manifest import Manifest
from evernear.data.validate import NO_CHANGES, Report, require_valid, validate_dataset
from evernear.errors import DataError
from evernear.settings import ClassSettings, ValidationSettings
from tests.dataset_images import write_files
from tests.real.data.test_packed import FORMATS, tar
from tests.real.data.test_table import rows_of, write_csv
from tests.real.data.test_table import write_parquet as write_table
from tests.small_ingest import opened

COMPOSED, DECOMPOSED = "caf\xe9", "cafe\u0301"


@pytest.fixture
def make_folders(tmp_path: Path, make_image):
    """``make_folders(folders)`` puts 12 images into each folder, all different."""

    def make_folders(*folders: str) -> Path:
        images = {f"{folder}/{number:03}.png": make_image(number) for number, folder in enumerate(folders * 12)}
        return write_files(tmp_path / "given", images)

    return make_folders


def check(manifest: Manifest, champion: tuple[str, ...] = (), classes: ClassSettings = NO_CHANGES) -> Report:
    return validate_dataset(opened(manifest), ValidationSettings(), champion, classes)


@pytest.mark.parametrize(
    "spelling", [DECOMPOSED, f"{COMPOSED}\xa0", f"{COMPOSED}\u3000 ", f"\ufeff{COMPOSED}\u200b", f" {DECOMPOSED}\n\t"]
)
def test_spellings_of_a_name_are_one_class(make_folders, run_ingest, contents, spelling: str) -> None:
    assert class_name(spelling) == COMPOSED
    manifest = run_ingest(make_folders(COMPOSED, spelling, "th\xe9"))
    assert manifest.labels == (COMPOSED, "th\xe9")
    assert sorted(contents(manifest).label.values()) == [COMPOSED] * 24 + ["th\xe9"] * 12
    (finding,) = check(manifest).findings
    assert (finding.rule, finding.severity, finding.count) == ("merged_folders", "info", 1)
    assert spelled(spelling) in finding.names[0]
    assert spelled(COMPOSED) in finding.names[0]


def test_spellings_in_train_and_test_are_one_class(make_folders, run_ingest) -> None:
    folders = (f"train/{DECOMPOSED}", "train/plum", f"test/{COMPOSED}", "test/plum ")
    manifest = run_ingest(make_folders(*folders))
    assert manifest.labels == (COMPOSED, "plum")
    assert manifest.label_counts("test") == {COMPOSED: 12, "plum": 12}
    assert check(manifest).findings[0].rule == "merged_folders"


def test_case_and_width_are_different_classes_with_a_warning(make_folders, run_ingest) -> None:
    manifest = run_ingest(
        make_folders("Apple", "apple", "\uff21pple", "red apple", "red\xa0apple", "p\xadear", "pear", "kiwi")
    )
    assert len(manifest.labels) == 8
    report = check(manifest)
    require_valid(report)
    (finding,) = report.findings
    assert (finding.rule, finding.severity, finding.count) == ("similar_classes", "warn", 3)
    assert "'Apple' and 'apple' and '\\uff21pple'" in finding.message
    assert "'pear' and 'p\\xadear'" in finding.message
    assert "kiwi" not in finding.message


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("1", "1.0", "2", "2.5"), "look alike: '1' and '1.0'; rename"),
        (("007", "7", "-7", "70"), "look alike: '007' and '7'; rename"),
        (("nan", "None", "bee", "cat"), "like missing values: None (12 images), nan (12 images); if"),
        (("Unknown", "bee", "cat"), "like missing values: Unknown (12 images); if"),
        (("cat", "dog", "cat|dog", "cat|cow", "cat|cat"), "join names of others: cat|dog (12 images). An image"),
        (("['cat']", "['dog']", "['cat', 'dog']"), "join names of others: ['cat', 'dog'] (12 images). An image"),
        (("salt", "pepper", "salt, pepper", "a, b"), "join names of others: salt, pepper (12 images). An image"),
    ],
)
def test_names_that_are_probably_mistakes_are_shown(make_folders, run_ingest, names, said: str) -> None:
    report = check(run_ingest(make_folders(*names)))
    require_valid(report)
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("similar_classes", "warn")
    assert said in finding.message


def test_blank_name_is_refused(make_folders, run_ingest) -> None:
    with pytest.raises(DataError, match=r"The name of the class folder '\\u200b ' of given is blank; rename it\."):
        run_ingest(make_folders("\u200b ", "a", "b"))


TWO_LINES, SHOWN = "cat\ndog", r"'cat\ndog', which has a line break"


def write_json(path: Path, images: list[bytes], labels: list[str]) -> None:
    rows = [json.dumps({"label": label}).encode() for label in labels]
    pairs = enumerate(zip(images, rows, strict=True))
    tar(path.with_suffix(".tar"), [m for n, (i, row) in pairs for m in ((f"{n:04}.png", i), (f"{n:04}.json", row))])


@pytest.mark.parametrize(("kind", "write"), [*FORMATS, ("webdataset", write_json)])
def test_label_of_two_lines_in_a_packed_dataset_is_refused(run_ingest, make_image, tmp_path: Path, kind, write) -> None:
    """The trailing line break of a .cls is no second line."""
    images = [make_image(number) for number in range(24)]
    labels = ["cat\n", "dog\r\n"] * 12
    write(tmp_path / "good" / "train", images, labels)
    assert run_ingest(f"{kind}:{tmp_path / 'good'}").labels == ("cat", "dog")
    write(tmp_path / "bad" / "train", images, [*labels[:-1], TWO_LINES])
    with pytest.raises(DataError) as refused:
        run_ingest(f"{kind}:{tmp_path / 'bad'}", dataset="bad")
    assert SHOWN in str(refused.value)
    assert "train." in str(refused.value), "the file is named"


@pytest.mark.parametrize("write", [write_csv, write_table])
def test_label_of_two_lines_in_a_table_is_refused(make_folders, run_ingest, write) -> None:
    tree = make_folders("cat", "dog")
    rows = rows_of(tree)
    rows[3]["label"] = TWO_LINES
    path = write(tree / ("labels.csv" if write is write_csv else "labels.parquet"), rows)
    with pytest.raises(DataError) as refused:
        run_ingest(f"table:{path}")
    assert SHOWN in str(refused.value)
    assert path.name in str(refused.value)


@pytest.mark.parametrize("name", ["cat\ndog", "cat\rdog", "a\x1b[31m", "a\x7fb", "a\x85b", "a\u2028b", "a\tb"])
def test_class_folder_with_a_control_character_is_refused(make_folders, run_ingest, name: str) -> None:
    with pytest.raises(DataError) as refused:
        run_ingest(make_folders(name, "plum"))
    assert f"The name of a class folder of given is {name!a}, which has a line break or another" in str(refused.value)


def test_classes_are_retired_and_renamed_in_any_spelling(make_folders, run_ingest) -> None:
    manifest = run_ingest(make_folders("th\xe9", "plum"))
    for champion in ((COMPOSED, "pear"), (DECOMPOSED, " pear")):
        for retired, old in ((DECOMPOSED, "pear"), (COMPOSED, "pear ")):
            classes = ClassSettings(retired=(retired,), renamed={old: "the\u0301"})
            assert classes.current_labels(champion) == ("th\xe9",)
            require_valid(check(manifest, champion, classes))
    with pytest.raises(DataError, match="No image is left of"):
        require_valid(check(manifest, (DECOMPOSED,)))
    assert ClassSettings(renamed={DECOMPOSED: COMPOSED}).current(DECOMPOSED) == COMPOSED
    with pytest.raises(ValueError, match="both retired and renamed"):
        ClassSettings(retired=(DECOMPOSED,), renamed={COMPOSED: "coffee"})


def test_names_are_composed_and_trimmed_only() -> None:
    for name in ("Apple", "a", "A", "red apple", "x\xb2", "\u0d28\u0d4d\u200d", "a.b", "-", "_"):
        assert class_name(name) == name
    assert lookalike_key("Stra\xdfe") == lookalike_key("STRASSE")
    assert spelled("pear ") == "'pear '"
    assert spelled(DECOMPOSED) == f"'cafe\\u0301' ({DECOMPOSED})"
