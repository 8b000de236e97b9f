import csv
import shutil
from pathlib import Path

import pytest

from evernear.data import validate
from evernear.data.gallery import MIN_GALLERY_IMAGES, joining_gallery
from evernear.data.manifest import SPLITS, Manifest
from evernear.data.validate import NO_CHANGES, Report, require_valid, validate_dataset
from evernear.errors import DataError
from evernear.settings import ClassSettings, ValidationSettings, load
from tests.dataset_images import write_files
from tests.small_ingest import findings, opened


def check(
    manifest: Manifest, champion: tuple[str, ...] = (), classes: ClassSettings = NO_CHANGES, **settings: object
) -> Report:
    return validate_dataset(opened(manifest), ValidationSettings.model_validate(settings), champion, classes)


def test_valid_data_has_no_findings(tree, run_ingest) -> None:
    report = check(run_ingest(tree), ("1", "2", "10"))
    assert report.findings == ()
    require_valid(report)
    assert sum(report.counts["train"].values()) > 20
    assert "Nothing found." in report.markdown()
    assert f"| all | {sum(report.counts['train'].values())} |" in report.markdown()


def test_errors_stop_with_a_message_that_names_the_files(tree, run_ingest, make_image) -> None:
    (tree / "1" / "cut.png").write_bytes(make_image(500)[:40])
    (tree / "2" / "words.png").write_text("no image")
    (tree / "1" / "again.png").write_bytes((tree / "2" / "001.png").read_bytes())
    manifest = run_ingest(tree)
    report = check(manifest, max_left_out_fraction=0)
    with pytest.raises(DataError) as exc_info:
        require_valid(report)
    sentence, remedy = str(exc_info.value).split(", add --set ")
    assert sentence == (
        "The data cannot be used: 2 files cannot be decoded and were left out; fix or remove 1/cut.png, 2/words.png."
        " 1 image has several labels and was left out; keep the right one of 1/again.png, 2/001.png."
        " To use the data without the files that were left out"
    )
    accepted = load(overrides=[remedy.removesuffix(".")]).validation
    assert accepted.max_left_out_fraction < 0.1
    require_valid(check(manifest, **accepted.model_dump()))
    assert exc_info.value.exit_code == 3
    assert "- 2/words.png is not a PNG, JPEG, WebP or HEIC image." in report.markdown()


def test_few_files_may_be_left_out(tree, run_ingest, make_image) -> None:
    """A large dataset always has some, and one of them should not stop a run."""
    again = {"1/again.png": make_image(501), "2/again.png": make_image(501)}
    manifest = run_ingest(write_files(tree, {"1/cut.png": make_image(500)[:40], **again}))
    assert manifest.problem_counts == {"undecodable": 1, "conflicting_labels": 1}
    used = sum(manifest.count(split) for split in SPLITS)
    limit = 2 / (used + 2)
    report = check(manifest, max_left_out_fraction=limit)
    require_valid(report)
    assert [(finding.rule, finding.severity) for finding in report.findings] == [
        ("undecodable", "warn"),
        ("conflicting_labels", "warn"),
    ]
    with pytest.raises(DataError, match=r"1 file cannot be decoded .* 1 image has several labels"):
        require_valid(check(manifest, max_left_out_fraction=0.99 * limit))
    # What the settings accept does not count against the other rule.
    require_valid(check(manifest, max_left_out_fraction=0.99 * limit, warn=["undecodable"]))
    assert check(manifest, off=["undecodable", "conflicting_labels"]).findings == ()


def test_warnings_do_not_stop(tree, run_ingest, make_image) -> None:
    (tree / "1" / "again.png").write_bytes((tree / "1" / "000.png").read_bytes())
    (tree / "1" / "large.png").write_bytes(make_image(900, (60, 40)))
    (tree / "2" / "larger.png").write_bytes(make_image(901, (60, 40)))
    report = check(run_ingest(tree))
    assert [(finding.rule, finding.severity, finding.message) for finding in report.findings] == [
        (
            "resized",
            "warn",
            "2 images have another aspect ratio and were cropped to their centers, such as 1/large.png.",
        ),
        ("duplicate", "warn", "1 image occurs more than once and was used once: 1/000.png, 1/again.png."),
    ]
    require_valid(report)
    assert "| warn | duplicate | 1 image occurs more than once" in report.markdown()


def test_hidden_class_folder_is_a_warning(tree, run_ingest, make_image) -> None:
    (tree / ".net").mkdir()
    (tree / ".net" / "1.png").write_bytes(make_image(500))
    (finding,) = check(run_ingest(tree)).findings
    assert (finding.rule, finding.severity, finding.names) == ("left_out", "warn", (".net",))
    assert finding.message == (
        "1 class folder has a name that begins with a dot, and was left out; rename or remove .net."
    )


def test_severities_are_configurable(tree, run_ingest) -> None:
    (tree / "2" / "words.png").write_text("no image")
    (tree / "1" / "again.png").write_bytes((tree / "1" / "000.png").read_bytes())
    manifest = run_ingest(tree)
    require_valid(check(manifest, warn=["undecodable"]))
    assert check(manifest, off=["undecodable", "duplicate"]).findings == ()
    with pytest.raises(DataError, match="1 image occurs more than once"):
        require_valid(check(manifest, off=["undecodable"], error=["duplicate"]))
    with pytest.raises(DataError, match="1 file cannot be decoded"):
        require_valid(check(manifest, max_left_out_fraction=0))


def test_long_lists_of_names_are_truncated(tree, run_ingest) -> None:
    for number in range(50):
        (tree / "1" / f"w{number:02}.png").write_text(str(number))
    (finding,) = check(run_ingest(tree)).findings
    assert finding.count == 50
    assert finding.message == (
        "50 files cannot be decoded and were left out; fix or remove 1/w00.png, 1/w01.png, 1/w02.png, 1/w03.png,"
        " 1/w04.png and more. 50 like: 1/w00.png is not a PNG, JPEG, WebP or HEIC image."
    )


def test_tiny_and_empty_classes_are_named_with_their_counts(tree, run_ingest, make_image) -> None:
    (tree / "3").mkdir()
    write_files(tree, {f"4/{number}.png": make_image(number) for number in range(800, 803)})
    report = check(run_ingest(tree))
    message = "Classes need 10 images, but these have fewer: 3 (0), 4 (3); add images or remove the classes."
    assert ("tiny_class", "error", message) in [(f.rule, f.severity, f.message) for f in report.findings]
    disabled = check(run_ingest(tree), min_class_images=3, off=["tiny_class"])
    assert "tiny_class" not in {f.rule for f in disabled.findings}


def test_what_follows_from_a_tiny_class_is_no_other_finding(tree, run_ingest, make_image) -> None:
    manifest = run_ingest(write_files(tree, {"4/0.png": make_image(800)}))
    assert [finding.rule for finding in check(manifest).findings] == ["tiny_class"]
    warned = {finding.rule for finding in check(manifest, warn=["tiny_class"]).findings}
    assert warned == {"tiny_class", "imbalance", "missing_in_split"}


def test_splits_that_tiny_classes_leave_empty_are_no_other_reason(tmp_path, run_ingest, make_image) -> None:
    images = {f"{'abc'[number % 3]}/{number}.png": make_image(number) for number in range(6)}
    manifest = run_ingest(write_files(tmp_path / "tree", images))
    assert [finding.rule for finding in check(manifest).findings] == ["tiny_class"]
    assert "empty_split" in {finding.rule for finding in check(manifest, warn=["tiny_class"]).findings}


def test_what_follows_from_unreadable_files_is_no_other_reason(tree, run_ingest, make_image) -> None:
    broken = {f"4/{number}.png": make_image(number)[:40] for number in range(900, 920)}
    manifest = run_ingest(write_files(tree, broken))
    champion = ("1", "2", "4", "10")
    assert [finding.rule for finding in check(manifest, champion).findings] == ["undecodable"]
    # If the files are accepted as they are, the class has no images, which is another matter.
    accepted = {finding.rule: finding.message for finding in check(manifest, champion, warn=["undecodable"]).findings}
    assert accepted.keys() == {"undecodable", "tiny_class", "vanished_class"}
    assert ": 4 (0);" in accepted["tiny_class"]


def test_split_whose_images_all_have_several_labels_is_no_other_reason(tmp_path, run_ingest, make_image) -> None:
    for number in range(90):
        folders = [f"train/{'abc'[number % 3]}", *(("test/a", "test/b") if number % 3 == 0 else ())]
        write_files(tmp_path / "tree", {f"{folder}/{number}.png": make_image(number) for folder in folders})
    manifest = run_ingest(tmp_path / "tree")
    assert [finding.rule for finding in check(manifest).findings if finding.severity == "error"] == [
        "conflicting_labels"
    ]


def test_classes_of_few_groups_are_named_once(tmp_path, run_ingest, make_image) -> None:
    names = [f"{'abc'[number % 3]}/scene{number // 3}-{number}.png" for number in range(90)]
    names += [f"d/scened-{number}.png" for number in range(10)]
    root = write_files(tmp_path / "tree", {name: make_image(number) for number, name in enumerate(names)})
    manifest = run_ingest(root, group="stem")
    assert [finding.rule for finding in check(manifest).findings] == ["few_groups"]
    assert {f.rule for f in check(manifest, off=["few_groups"]).findings} == {"missing_in_split"}


def test_missing_champion_class_is_an_error(tree, run_ingest) -> None:
    first = run_ingest(tree)
    shutil.rmtree(tree / "2")
    second = run_ingest(tree)
    with pytest.raises(DataError, match="No image is left of 2, which the live release knows"):
        require_valid(check(second, ("1", "2", "10")))
    # A class that no release contains may be removed.
    assert check(second, ("1", "10")).findings == ()
    assert check(first, ("1", "2", "10")).findings == ()
    (finding,) = check(first, ("1", "0")).findings
    assert finding.names == ("0",)


def test_classes_removed_or_renamed_on_purpose_have_not_vanished(tree, run_ingest) -> None:
    (tree / "2").rename(tree / "two")
    shutil.rmtree(tree / "10")
    manifest, champion = run_ingest(tree), ("1", "2", "10")
    (finding,) = check(manifest, champion).findings
    assert finding.names == ("2", "10")
    assert "run with --retire CLASS or --rename OLD=NEW" in finding.message

    def messages(renamed: dict[str, str]) -> list[str]:
        report = check(manifest, champion, ClassSettings(retired=("10",), renamed=renamed))
        return [finding.message for finding in report.findings]

    assert messages({"2": "two"}) == []
    assert "No image is left of 2 (renamed to gone), which" in messages({"2": "gone"})[0]
    assert messages({"2": "two", "twoo": "2nd"}) == [
        "Classes that the live release does not have are declared retired or renamed (--retire, --rename): "
        "twoo; correct the names, or drop the option."
    ]
    assert check(manifest, ("1", "two"), ClassSettings(renamed={"2": "two"})).findings == (), "it took effect"
    left = "Classes that are declared retired or renamed (--retire, --rename) have images: 1 ("
    assert messages({"2": "two", "1": "one"})[0].startswith(left)


def test_files_left_out_are_grouped_by_reason_and_all_are_named_in_a_file(
    tree, run_ingest, make_image, tmp_path: Path
) -> None:
    words = {f"1/words {number}.png": b"words" for number in range(12)}
    others = {f"2/{number}.gif": make_image(number, kind="GIF") for number in range(3)}
    write_files(tree, words | others | {"2/notes": b"text", "loose.png": make_image(501)})
    write_files(tree, {f"1/text {number}.txt": b"text" for number in range(22)})
    (tree / "10" / "copy.png").write_bytes(make_image(900))
    (tree / "2" / "copy.png").write_bytes(make_image(900))
    left_out = tmp_path / "left_out.csv"
    manifest = run_ingest(tree, left_out=left_out)
    (finding,) = (finding for finding in check(manifest).findings if finding.rule == "undecodable")
    assert finding.message.endswith(
        " 12 like: 1/words 0.png is not a PNG, JPEG, WebP or HEIC image."
        " 3 like: 2/0.gif is not a PNG, JPEG, WebP or HEIC image but GIF; convert it."
    )
    with left_out.open(newline="") as file:
        rows = {row["path"]: row["reason"] for row in csv.DictReader(file)}
    texts = sorted(f"1/text {number}.txt" for number in range(22))[:20]
    assert rows.keys() == {*words, *others, *texts, "", "loose.png", "10/copy.png", "2/copy.png"}
    assert rows[texts[0]] == "1/text 0.txt is not an image of a class."
    assert rows[""] == "3 more files: each is not an image of a class."
    assert rows["10/copy.png"] == "10/copy.png has several labels."
    assert rows["loose.png"] == "loose.png is in no class folder."


@pytest.mark.parametrize("left", [(), (".DS_Store",), ("Thumbs.db", "notes.txt")])
def test_folder_of_a_retired_or_renamed_class_may_stay_empty(tree, run_ingest, left: tuple[str, ...]) -> None:
    shutil.copytree(tree / "2", tree / "two")
    for label in ("2", "10"):
        for file in (tree / label).iterdir():
            file.unlink()
        write_files(tree / label, dict.fromkeys(left, b"litter"))
    manifest, champion = run_ingest(tree), ("1", "2", "10")
    assert {finding.rule for finding in check(manifest, champion).findings} >= {"tiny_class", "vanished_class"}
    report = check(manifest, champion, ClassSettings(retired=("10",), renamed={"2": "two"}))
    assert "error" not in {finding.severity for finding in report.findings}, report.findings
    (finding,) = (
        f for f in check(manifest, champion, ClassSettings(retired=("10",))).findings if f.rule == "tiny_class"
    )
    assert finding.names == ("2",)


def test_emptied_class_folder_below_a_split_may_stay(tmp_path: Path, run_ingest, make_image) -> None:
    images = {
        f"{split}/{label}/{n}.png": make_image(n + 100 * label + 30 * (split == "test"))
        for split in ("train", "test")
        for label in (1, 2)
        for n in range(20)
    }
    for split in ("train", "test"):
        (tmp_path / split / "old").mkdir(parents=True)
    manifest = run_ingest(write_files(tmp_path, images))
    retired = ClassSettings(retired=("old",))
    assert "tiny_class" in {finding.rule for finding in check(manifest, ("1", "2", "old")).findings}
    assert "error" not in {finding.severity for finding in check(manifest, ("1", "2", "old"), retired).findings}


def test_images_over_the_limit_name_its_setting_and_value(tree, run_ingest, make_image) -> None:
    (tree / "1" / "a-broken.png").write_bytes(b"text")
    (tree / "1" / "photo.png").write_bytes(make_image(7, (200, 100)))
    message = check(run_ingest(tree, max_pixels=10_000)).findings[0].message
    assert message == (
        "2 files cannot be decoded and were left out; fix or remove 1/a-broken.png, 1/photo.png. 1/photo.png is too"
        " large: 200 x 100 pixels, 10000 are allowed by data.max_pixels."
    )


def test_imbalance_is_a_ratio(tree, run_ingest, make_image, monkeypatch) -> None:
    more = {f"10/more-{number}.png": make_image(number) for number in range(3000, 3030)}
    manifest = run_ingest(write_files(tree, more))
    assert check(manifest).findings == ()
    monkeypatch.setattr(validate, "MAX_IMBALANCE", 3)
    (finding,) = check(manifest).findings
    assert finding.message == "Classes are out of balance: 42 images of 10, 12 of 1; more than 3 to 1."


def test_empty_split_and_missing_class_are_reported(tmp_path: Path, run_ingest, make_image) -> None:
    counts = {"train/a": 20, "train/b": 20, "test/a": 5, "test/c": 12, "gallery/a": 5}
    folders = [folder for folder, count in counts.items() for _ in range(count)]
    images = {f"{folder}/{number}.png": make_image(number) for number, folder in enumerate(folders)}
    write_files(tmp_path / "tree", images)
    report = check(run_ingest(tmp_path / "tree", query_fraction=0.0))
    messages = {finding.rule: (finding.severity, finding.message) for finding in report.findings}
    assert messages == {
        "empty_split": (
            "error",
            "No images in the split query; add images, or raise data.query_fraction in a new dataset"
            " (--set data.dataset=NAME), because images never change their splits.",
        ),
        "missing_in_gallery": (
            "error",
            "Classes without an image in train or the gallery cannot be recognized: c; add training images of them, or"
            " remove their other images.",
        ),
        "missing_in_split": (
            "warn",
            "Some classes have no image in a split: b in test; add images of them. 1 class has no image in"
            " the gallery split: b; training images fill the gallery instead.",
        ),
    }


def test_split_without_a_group_is_filled_by_a_larger_share(tmp_path: Path, run_ingest, make_image) -> None:
    names = [f"{label}/scene-{scene}/{number}.png" for label in "ab" for scene in range(6) for number in range(4)]
    write_files(tmp_path / "tree", {name: make_image(number) for number, name in enumerate(names)})
    (finding,) = check(run_ingest(tmp_path / "tree", group="folder")).findings
    remedy = "add other scenes, choose smaller groups, or raise data.query_fraction in a new dataset"
    assert finding.message.startswith("No images in the split query; a group is in one split, and data.group makes 6 ")
    assert f" groups: {remedy} (--set data.dataset=NAME)" in finding.message
    assert not check(run_ingest(tmp_path / "tree", group="folder", dataset="new", query_fraction=0.2)).findings


def test_a_given_gallery_may_lack_classes(tmp_path: Path, run_ingest, make_image) -> None:
    """As that of public data sets, whose rare classes are only in train and test."""
    folders = [f"{split}/{label}" for split in ("train", "test") for label in "abcdef"] + ["val/a", "val/b"]
    images = {f"{folder}/{number}.png": make_image(number) for number, folder in enumerate(folders * 20)}
    manifest = run_ingest(write_files(tmp_path / "tree", images))
    report = check(manifest)
    require_valid(report)
    (finding,) = report.findings
    assert (finding.rule, finding.severity, finding.names) == ("missing_in_split", "warn", ("c", "d", "e", "f"))
    assert finding.message == (
        "4 classes have no image in the gallery split: c, d, e, f; training images fill the gallery instead."
    )
    joining = joining_gallery(manifest)
    assert joining == {label: 0 if label in "ab" else MIN_GALLERY_IMAGES for label in "abcdef"}
    assert joining_gallery(manifest, untrained="f")["f"] == manifest.label_counts("train")["f"] > MIN_GALLERY_IMAGES


def test_a_class_without_a_gallery_image_names_the_copies_in_another_split(tmp_path, run_ingest, make_image) -> None:
    """All training images of b are also test images."""
    for folder, first, count in (("train/a", 50, 12), ("test/a", 0, 30), ("train/b", 100, 12), ("test/b", 100, 30)):
        images = {f"{folder}/{number}.png": make_image(first + number) for number in range(count)}
        write_files(tmp_path / "tree", images)
    with pytest.raises(DataError) as error:
        require_valid(check(run_ingest(tmp_path / "tree")))
    assert str(error.value).startswith(
        "The data cannot be used: Classes without an image in train or the gallery cannot be recognized: b; add"
        " training images of them, or remove their other images. 12 images are in several splits, and each was added to"
        " one of them; keep one of test/b/0.png, train/b/0.png, test/b/1.png, "
    )


def test_report_survives_unusual_names(tree, run_ingest) -> None:
    (tree / "a|b").mkdir()
    (tree / "a|b" / "x\ny.png").write_text("words")
    (tree / "a|b" / "\x1b[31m.png").write_text("words")
    (tree / "2").rename(tree / "<b>")
    (tree / "1").rename(tree / "![x](evil.example) *_`")
    manifest = run_ingest(tree)
    with pytest.raises(DataError, match=r"Classes .*: a\|b \(0\)"):
        require_valid(check(manifest, warn=["undecodable"]))
    report = check(manifest, max_left_out_fraction=0)
    table = [line for line in report.markdown().splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in table} <= {4, 6}
    with pytest.raises(DataError, match=r"fix or remove a\|b/\\x1b\[31m\.png, a\|b/x\\ny\.png\. "):
        require_valid(report)
    assert "| <b>" not in report.markdown()
    assert r"| \!\[x\](evil.example) \*\_\` |" in report.markdown()
    assert all(line.isprintable() for line in report.markdown().splitlines())
    assert Report.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(("shape", "named"), [((96, 64, 3), True), ((63, 96, 3), False), ((96, 96, 1), False)])
def test_photographs_from_scratch_get_a_recommendation(tree, run_ingest, shape, named) -> None:
    manifest = run_ingest(tree).model_copy(update={"shape": shape})
    report = validate_dataset(opened(manifest), ValidationSettings(), from_scratch=True)
    assert [(finding.rule, finding.severity) for finding in report.findings] == [("from_scratch", "info")] * named
    assert (report.summary(), len(report.notes())) == ("no problems", named), "the recommendation stands alone"
    assert not named or "--preset photos" in report.findings[0].message
    assert findings(manifest) == ()
    off = ValidationSettings(off=["from_scratch"])
    assert validate_dataset(opened(manifest), off, from_scratch=True).findings == ()
