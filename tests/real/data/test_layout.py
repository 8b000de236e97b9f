"""Which folders are splits and which are classes. The tests run the settings that errors name."""

import hashlib
import re
import shlex
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.common.store.base import put_folder
from evernear.data.manifest import Manifest
from evernear.data.source_diff import diff_source
from evernear.data.sources import open_source
from evernear.errors import DataError, SettingsError
from evernear.review.answers import Answer, Answers
from evernear.review.label_target import open_label_target
from evernear.settings import DataSettings, ValidationSettings, load
from tests.dataset_images import write_files
from tests.small_ingest import findings

MakeTree = Callable[..., Path]
NAMES = ["a", "b"]
COUNT = 8
"""Images in each folder."""


@pytest.fixture
def make_tree(tmp_path: Path, make_image) -> MakeTree:
    """``make_tree(folders, count)`` writes ``count`` different images into each of ``folders``."""

    def make_tree(folders: Iterable[str], count: int = COUNT) -> Path:
        numbers = range(count)
        for index, folder in enumerate(folders):
            images = {f"{index}-{number:03}.png": make_image(index * 1000 + number) for number in numbers}
            write_files(tmp_path / "tree" / folder, images)
        return tmp_path / "tree"

    return make_tree


def in_each(splits: Iterable[str], classes: Iterable[str] = NAMES) -> list[str]:
    return [f"{split}/{label}" for split in splits for label in classes]


def answers(error: DataError) -> list[DataSettings]:
    """The settings that a message offers: the splits, and that all folders are classes."""
    words = re.findall(r"--set ('[^']*'|\S+)", str(error))
    values = [shlex.split(word.rstrip(",.;"))[0] for word in words]
    splits = [value for value in values if value.startswith("data.split_folders")]
    assert values == [*splits, "data.layout=classes"]
    return [load(overrides=words).data for words in (splits, values[-1:])]


def ingest_with(run_ingest, root: Path, settings: DataSettings) -> Manifest:
    return run_ingest(root, layout=settings.layout, split_folders=settings.split_folders)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folders", "split_folders"),
    [
        (in_each(["train", "eval"]), {"eval": "test"}),
        (in_each(["train", "evaluation"]), {"evaluation": "test"}),
        (in_each(["train", "holdout"]), {"holdout": "test"}),
        (in_each(["Train", "Validate"]), {"Validate": "gallery"}),
        (in_each(["train", "tests"]), {"tests": "test"}),
        (in_each(["train", "test", "extra"]), {"extra": "none"}),
        (in_each(["trainset", "testset"]), {"testset": "test", "trainset": "train"}),
        (in_each(["train", "val", "valid"]), {"val": "test", "valid": "gallery"}),
        (in_each(["Test", "test", "train"]), {"Test": "test", "test": "none"}),
        (in_each(["seg_test", "seg_train", "seg_pred"]), {"seg_pred": "none"}),
        (in_each(["train/train", "eval/eval"]), {"eval": "test"}),
        (in_each(["train", "my eval=1.0"]), {"my eval=1.0": "test"}),
        ([*in_each(["train"], "abcde"), *in_each(["eval"], "bcd")], {"eval": "test"}),
        ([*in_each(["train"]), "unlabeled"], {"unlabeled": "none"}),
        ([*in_each(["train", "test"]), "docs"], {"docs": "none"}),
        ([*in_each(["train"]), *in_each(["holdout"], ["x", "y"])], {"holdout": "none"}),
        ([*in_each(["train"]), *NAMES], {"a": "none", "b": "none"}),
    ],
)
def test_folders_beside_a_split_that_may_be_splits_are_refused(make_tree, run_ingest, folders, split_folders) -> None:
    root = make_tree(folders)
    with pytest.raises(DataError, match=r"^tree has .*, which may be splits or classes\. Give each its split") as info:
        run_ingest(root)
    as_splits, as_classes = answers(info.value)
    assert as_splits.split_folders == split_folders
    manifest = ingest_with(run_ingest, root, as_splits)
    assert set(manifest.labels) == {
        Path(folder).name for folder in folders if folder.startswith(("train", "Train", "seg_t"))
    }
    tests = [folder for folder, split in split_folders.items() if split == "test"]
    if tests:
        assert manifest.count("test") == COUNT * sum(folder.partition("/")[0] in tests for folder in folders)
    manifest = run_ingest(root, dataset="other", layout=as_classes.layout)
    assert set(manifest.labels) == {folder.partition("/")[0] for folder in folders}


def test_stray_images_do_not_make_a_split_a_class(make_tree, run_ingest, make_image) -> None:
    root = make_tree(in_each(["train", "eval"]))
    (root / "train" / "stray.png").write_bytes(make_image(9000))
    with pytest.raises(DataError, match=r"split folders \(train\) and others \(eval\)"):
        run_ingest(root)


@pytest.mark.parametrize(
    "folders",
    [
        ["train", "test tube", "car"],
        ["test", "trains/old", "trains/new", "cars"],
        ["testudo/old", "testudo/new", "cars/red", "cars/blue"],
        ["contest/x", "contest/y", "strain/x", "strain/y"],
        ["eval", "holdout"],
    ],
)
def test_classes_may_have_names_like_splits(make_tree, run_ingest, folders: list[str]) -> None:
    assert set(run_ingest(make_tree(folders)).labels) == {folder.partition("/")[0] for folder in folders}


@pytest.mark.parametrize(
    ("folders", "held_out"),
    [
        (["cat/train", "cat/test", "dog/train", "dog/test"], {"test": 2}),
        (["cat/train", "cat/val", "dog/train", "dog/val"], {"test": 2}),
        (["cat/Train", "cat/VAL", "cat/test", "dog/Train", "dog/VAL", "dog/test"], {"test": 2, "gallery": 2}),
        (["cat/train", "cat/test", "dog/train"], {"test": 1}),
        (["cat/train", "cat/test", "dog"], {"test": 1}),
        (
            ["bottle/train/good", "bottle/test/broken", "bottle/test/good", "cap/train/good", "cap/test/cut"],
            {"test": 3},
        ),
    ],
)
def test_splits_in_class_folders_are_recognized(make_tree, run_ingest, contents, digest_of, folders, held_out) -> None:
    root = make_tree(folders)
    manifest = run_ingest(root)
    assert set(manifest.labels) == {folder.partition("/")[0] for folder in folders}
    assert {split: manifest.count(split) / COUNT for split in held_out} == held_out
    split = contents(manifest).split
    assert {split[digest_of(path.read_bytes())] for path in root.glob("*/test/**/*.png")} <= {"test"}


@pytest.mark.parametrize(
    ("folders", "split_folders"),
    [
        (["cat/train", "cat/test", "cat/extra", "dog/train", "dog/test"], {"extra": "none"}),
        (["cat/train", "cat/eval", "dog/train", "dog/eval"], {"eval": "test"}),
        (["cat/train", "cat/val", "cat/valid", "dog/train"], {"val": "test", "valid": "gallery"}),
    ],
)
def test_other_folders_beside_splits_in_class_folders_are_refused(
    make_tree, run_ingest, folders: list[str], split_folders: dict[str, str]
) -> None:
    root = make_tree(folders)
    with pytest.raises(
        DataError, match=r"^The class folders of tree contain split folders .*train\) and others"
    ) as info:
        run_ingest(root)
    as_splits, as_classes = answers(info.value)
    assert as_splits.split_folders == split_folders
    assert ingest_with(run_ingest, root, as_splits).labels == ("cat", "dog")
    manifest = run_ingest(root, dataset="other", layout=as_classes.layout)
    assert sum(map(manifest.count, ("train", "test", "gallery", "query"))) == COUNT * len(folders)


def test_split_of_one_class_can_be_named(make_tree, run_ingest) -> None:
    """Without a train folder beside it, test may be anything, so its images are used and named."""
    root = make_tree(["dog", "dog/test", "cat"])
    (problem,) = run_ingest(root).problems
    assert problem.names == (f"dog (test: {COUNT} images)",)
    manifest = run_ingest(root, dataset="other", split_folders={"test": "test"})
    assert (manifest.count("test"), manifest.problem_counts) == (COUNT, {})


def test_split_folders_that_do_not_exist_are_named(make_tree, run_ingest) -> None:
    root = make_tree(in_each(["train", "test"]))
    for folders in ({"holdout": "test"}, {"train": "train", "holdout": "query"}):
        with pytest.raises(DataError, match=r"^data\.split_folders names holdout, but tree has no folder of this name"):
            run_ingest(root, split_folders=folders)
    assert run_ingest(root, split_folders={"holdout": "none"}).count("test") == 2 * COUNT


@pytest.mark.parametrize("folders", [["a", "b", "unlabeled"], in_each(["train", "test", "unlabeled"])])
def test_misspelled_folder_to_leave_out_is_named(make_tree, run_ingest, folders: list[str]) -> None:
    root = make_tree([*folders, *in_each(["a", "b"], ["raw2"])] if "a" in folders else folders)
    with pytest.raises(DataError, match=r"leaves out unlabled, which tree does not have; write 'unlabeled' if"):
        run_ingest(root, split_folders={"unlabled": "none"})
    used = run_ingest(root, split_folders={"unlabeled": "none", "unlabeled2": "none", "raw2": "none"})
    assert used.labels == ("a", "b")


def test_two_folders_may_have_one_split_if_the_settings_say_so(make_tree, run_ingest) -> None:
    root = make_tree(in_each(["fold1", "fold2", "fold3"]))
    manifest = run_ingest(root, split_folders={"fold1": "train", "fold2": "train", "fold3": "test"})
    assert (manifest.labels, manifest.count("test")) == (("a", "b"), 2 * COUNT)


def test_split_folders_that_are_classes(make_tree, run_ingest) -> None:
    root = make_tree(["train", "test"])
    with pytest.raises(
        DataError, match=r"contains no image in a class folder: test, train are .* data\.layout=classes"
    ):
        run_ingest(root)
    assert set(run_ingest(root, layout="classes").labels) == {"train", "test"}


def test_splits_contradict_that_all_folders_are_classes() -> None:
    with pytest.raises(SettingsError, match=r"layout=classes says that no folder is a split, .* names 'eval'"):
        load(overrides=["data.layout=classes", "data.split_folders.eval=test"])
    assert load(overrides=["data.layout=classes", "data.split_folders.docs=none"]).data.layout == "classes"


def test_nested_folders_are_reported_with_settings_that_answer(make_tree, run_ingest) -> None:
    root = make_tree(["fruit/apple", "fruit/pear", "veg/leek", "veg/carrot"], count=12)
    manifest = run_ingest(root)
    assert manifest.labels == ("fruit", "veg")
    (finding,) = findings(manifest)
    assert (finding.rule, finding.severity, finding.names) == (
        "nested_folder",
        "warn",
        ("fruit (apple, pear: 24 images)", "veg (carrot, leek: 24 images)"),
    )
    assert finding.message == (
        "2 class folders contain folders, whose names are not used: fruit (apple, pear: 24 images), veg (carrot, leek:"
        " 24 images). If the innermost folders are the classes, add --set data.layout=innermost; if the labels are"
        " right, add --set 'validation.off=[\"nested_folder\"]'."
    )
    settings = load(overrides=re.findall(r"--set ([^;]+?)[;.]?(?= |$)", finding.message)[:1])
    manifest = run_ingest(root, dataset="other", layout=settings.data.layout)
    assert set(manifest.labels) == {"apple", "pear", "leek", "carrot"}
    assert manifest.problem_counts == {}


def test_option_that_disables_a_rule_keeps_the_lists_of_other_rules(make_tree, run_ingest) -> None:
    manifest = run_ingest(make_tree(["fruit/apple", "fruit/pear", "veg/leek", "veg/carrot"], count=12))
    (finding,) = findings(manifest, off=("imbalance",), error=("nested_folder", "pixels"))
    words = shlex.split(finding.message.partition("if the labels are right, add ")[2].removesuffix("."))
    assert words[::2] == ["--set", "--set"]
    settings = load(overrides=words[1::2])
    assert settings.validation == ValidationSettings(off=("imbalance", "nested_folder"), error=("pixels",))
    assert not findings(manifest, **settings.validation.model_dump())


def test_innermost_folders_are_classes_in_splits_as_well(make_tree, run_ingest) -> None:
    root = make_tree([*in_each(["train/fruit", "test/fruit"], ["apple", "pear"])])
    manifest = run_ingest(root, layout="innermost")
    assert (manifest.labels, manifest.count("test")) == (("apple", "pear"), 2 * COUNT)


def test_number_of_nested_folders_does_not_matter(make_tree, run_ingest) -> None:
    root = make_tree(in_each(["cat", "dog"], [*map(str, range(30))]), count=1)
    assert run_ingest(root).problems[0].names == ("cat (0, 1, 10, 11, 12, and more: 30 images)",)


def test_watcher_and_review_follow_the_layout(make_tree, tmp_path: Path) -> None:
    root = make_tree(in_each(["train", "eval"]))
    uri, store = f"folder:{root}", open_store(tmp_path.as_uri())
    with pytest.raises(DataError, match=r"data\.split_folders\.eval=test"):
        diff_source(DataSettings(source=uri), store, [None])
    with pytest.raises(DataError, match=r"data\.split_folders\.eval=test"):
        open_label_target(uri)
    settings = DataSettings(source=uri, split_folders={"eval": "test"})
    (diff,) = diff_source(settings, store, [None])
    assert (diff.labels, diff.explicit) == ({"a": 2 * COUNT, "b": 2 * COUNT}, {"test": 2 * COUNT})
    target = open_label_target(uri, settings)
    assert (target.labels, target.layout.class_folder("c")) == (["a", "b"], "train/c")
    assert target.layout.class_folder("b", "eval/a/0.png") == "eval/b"


def test_review_of_splits_in_class_folders(make_tree, make_image, tmp_path: Path) -> None:
    root = make_tree(["cat/train", "cat/test", "dog/train"], count=1)
    target = open_label_target(f"folder:{root}")
    assert target.labels == ["cat", "dog"]
    answers = Answers(open_store((tmp_path / "store").as_uri()), target)

    def answer(image: bytes, label: str = "", files: tuple[str, ...] = ()) -> Answer:
        digest = hashlib.sha256(image).hexdigest()
        action = "label" if label else "undo"
        return Answer(image=digest, action=action, label=label, files=files, who="me", at=datetime.now(UTC))

    def listed() -> set[tuple[str, str | None]]:
        entries = open_source(f"folder:{root}").entries()
        return {(entry.label, entry.explicit_split) for entry in entries if "review" in entry.name}

    moved, live = (root / "cat/test/1-000.png").read_bytes(), make_image(77)
    answers.label(moved, answer(moved, "dog", ("cat/test/1-000.png",)))
    answers.label(live, answer(live, "owl"))
    assert listed() == {("dog", "test"), ("owl", None)}
    answers.undo(answer(live))
    assert not (root / "owl").exists()


def upload(bucket: str, root: Path) -> str:
    put_folder(open_store(f"s3://{bucket}"), "images", root)
    return f"s3://{bucket}/images"


@pytest.mark.parametrize(
    "folders",
    [
        in_each(["train", "eval"]),
        in_each(["trainset", "testset"]),
        [*in_each(["train"]), "unlabeled"],
        ["cat/train", "cat/test", "cat/extra", "dog/train", "dog/test"],
        in_each(["test"]),
    ],
)
def test_bucket_and_folder_are_refused_alike(make_tree, run_ingest, bucket: str, folders: list[str]) -> None:
    root = make_tree(folders, count=2)
    uri = upload(bucket, root)
    with pytest.raises(DataError) as local:
        run_ingest(root)
    with pytest.raises(DataError) as remote:
        run_ingest(uri)
    assert str(remote.value).replace(f"{bucket}-images", "tree") == str(local.value)


@pytest.mark.parametrize(
    ("folders", "settings"),
    [
        (in_each(["train", "eval"]), {"split_folders": {"eval": "test"}}),
        (["cat/train", "cat/test", "dog/train", "dog/test"], {}),
        (["fruit/apple", "fruit/pear", "veg/leek"], {}),
        (["fruit/apple", "fruit/pear", "veg/leek"], {"layout": "innermost"}),
        (["cat", "dog", "docs"], {"split_folders": {"docs": "none"}}),
    ],
)
def test_bucket_and_folder_have_one_layout(make_tree, run_ingest, bucket: str, folders, settings) -> None:
    root = make_tree(folders, count=2)
    assert run_ingest(upload(bucket, root), **settings).digest == run_ingest(root, **settings).digest
