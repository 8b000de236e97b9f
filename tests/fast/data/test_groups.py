"""Images that belong together stand in one split, and later ones follow them."""

from collections import defaultdict
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from evernear.data.group_numbers import group_numbers
from evernear.data.groups import grouping
from evernear.data.ingest import ingest_source
from evernear.data.manifest import SPLITS, Manifest
from evernear.data.near_duplicates import find_near_duplicates
from evernear.data.preprocess import decode, image_digest
from evernear.errors import DataError
from evernear.settings import DataSettings
from tests.dataset_images import saved, write_files
from tests.small_ingest import findings, opened


@pytest.mark.parametrize(
    ("setting", "name", "group"),
    [
        ("", "cup/scene-12/0001.jpg", ""),
        ("folder", "cup/scene-12/0001.jpg", "scene-12"),
        ("folder", "train/cup/day 1/scene-12/0001.jpg", "day 1/scene-12"),
        ("folder", "cup/0001.jpg", ""),
        ("stem", "cup/IMG_001_frame_03.jpg", "IMG_001_frame"),
        ("stem", "cup/video7-000123.jpg", "video7"),
        ("stem", "cup/scene-12/0001.jp2", "scene-12"),
        ("stem", "cup/0001.jpg", ""),
        ("stem", "cup/unnumbered.jpg", ""),
        ("stem", "cup/video7-000123_small.png", "video7"),
        (r"(\w+)_frame", "cup/IMG_001_frame_03.jpg", "IMG_001"),
        (r"^\w+/(\w+)-\d+-(\w+)", "cup/a-1-b.jpg", "a/b"),
        (r"(\w+)_frame", "cup/other.jpg", ""),
        (r"(a)?(b)?c", "cup/c.jpg", ""),
        ("stem", "cup/review-0123456789abcdef.png", ""),
        (r"(review)", "cup/review-0123456789abcdef.png", ""),
    ],
)
def test_group_comes_from_the_name(setting: str, name: str, group: str):
    assert grouping(DataSettings(group=setting).group)(name, "cup") == group


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("(scene", "neither folder or stem or column nor a regular expression"),
        (r"scene-\d+", "no parentheses"),
        (r"(?:a)b", "no parentheses"),
    ],
)
def test_unusable_pattern_is_refused_in_a_sentence(setting: str, sentence: str):
    with pytest.raises(ValidationError, match=sentence):
        DataSettings(group=setting)


@pytest.fixture
def scenes(tmp_path: Path, make_image) -> Path:
    """40 scenes of three frames. Every scene shows two of the four classes."""
    names = {
        number: f"{'abcd'[(number // 3 + number % 2) % 4]}/scene{number // 3}-{number}.png" for number in range(120)
    }
    return write_files(tmp_path / "scenes", {name: make_image(number) for number, name in names.items()})


def splits_of_scenes(root: Path, split: dict[bytes, str]) -> dict[str, set[str]]:
    splits: defaultdict[str, set[str]] = defaultdict(set)
    for path in root.rglob("*.png"):
        splits[path.name.partition("-")[0]].add(split[image_digest(decode(path.read_bytes(), 10**6))])
    return splits


def test_a_scene_stands_in_one_split_for_all_its_classes(scenes: Path, run_ingest, contents):
    assert sum(len(found) > 1 for found in splits_of_scenes(scenes, contents(run_ingest(scenes)).split).values()) > 10
    manifest = run_ingest(scenes, group="stem", dataset="grouped")
    splits = splits_of_scenes(scenes, contents(manifest).split)
    assert {len(found) for found in splits.values()} == {1}
    assert set.union(*splits.values()) == set(SPLITS)
    assert manifest.groups == 40
    assert all(count for split in ("train", "test", "gallery") for count in manifest.label_counts(split).values())


def test_new_frames_follow_their_scene_and_nothing_moves(scenes: Path, run_ingest, contents, make_image):
    before = contents(run_ingest(scenes, group="stem")).split
    numbers = range(900, 940)
    frames = {f"{'abcd'[number % 4]}/scene{number - 900}-{number}.png": make_image(number) for number in numbers}
    write_files(scenes, frames)
    after = contents(run_ingest(scenes, group="stem")).split
    assert {digest: after[digest] for digest in before} == before
    assert {len(found) for found in splits_of_scenes(scenes, after).values()} == {1}


def test_frames_follow_a_scene_whose_images_were_removed(scenes: Path, run_ingest, contents, make_image):
    before = splits_of_scenes(scenes, contents(run_ingest(scenes, group="stem")).split)
    in_test = next(scene for scene, splits in sorted(before.items()) if splits == {"test"})
    for path in scenes.rglob(f"{in_test}-*.png"):
        path.unlink()
    run_ingest(scenes, group="stem")
    write_files(scenes, {f"a/{in_test}-999.png": make_image(999)})
    assert splits_of_scenes(scenes, contents(run_ingest(scenes, group="stem")).split)[in_test] == {"test"}


def test_setting_of_an_existing_dataset_moves_no_image_and_counts_divided_groups(scenes: Path, run_ingest, contents):
    plain = run_ingest(scenes)
    grouped = run_ingest(scenes, group="stem")
    assert contents(grouped).split == contents(plain).split
    divided = sum(len(found) > 1 for found in splits_of_scenes(scenes, contents(plain).split).values())
    assert grouped.problem_counts["split_group"] == divided > 0
    assert f"{divided} groups (data.group) have images in several splits" in messages(grouped)
    assert grouped.digest != plain.digest
    assert run_ingest(scenes, group="stem").digest == grouped.digest
    assert run_ingest(scenes).digest == plain.digest


def messages(manifest: Manifest, rule: str = "") -> str:
    """The messages of all findings, or of those of a rule."""
    return " ".join(finding.message for finding in findings(manifest) if rule in ("", finding.rule))


def test_class_of_one_scene_is_named(scenes: Path, run_ingest, make_image):
    write_files(scenes, {f"lonely/only-{number}.png": make_image(number) for number in range(300, 312)})
    message = messages(run_ingest(scenes, group="stem"))
    assert "1 class has fewer than three groups (data.group)" in message
    assert "add other scenes of lonely" in message


def test_names_without_a_group_are_counted_and_a_pattern_without_any_is_refused(scenes: Path, run_ingest, make_image):
    write_files(scenes, {"a/other.png": make_image(500)})
    manifest = run_ingest(scenes, group="stem")
    assert manifest.problem_counts["ungrouped"] == 1
    assert "a/other.png" in messages(manifest)
    with pytest.raises(DataError, match=r"data.group=\(nothing\) finds a group in none of the names .* such as a/"):
        run_ingest(scenes, group="(nothing)", dataset="other")


@pytest.mark.parametrize("setting", [r"^\w+/([a-z]+)", r"(\w)/", r"()"])
def test_pattern_that_leaves_nothing_to_test_is_refused_before_the_ingest(tmp_path, scenes, run_ingest, setting):
    """The images would all be in train, and stay there in this store."""
    with pytest.raises(DataError, match=r"finds a group in none|makes one group of all images of a class, such as "):
        run_ingest(scenes, group=setting)
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").rglob("head.json"))


def table_of(path: Path, make_image, groups: list[str]) -> str:
    """A table of images of three classes that are in the given groups."""
    write_files(path, {f"im/{number:03}.png": make_image(number) for number in range(len(groups))})
    rows = [f'im/{number:03}.png,{"abc"[number % 3]},"{group}"' for number, group in enumerate(groups)]
    (path / "labels.csv").write_text("\n".join(["path,label,group", *rows]))
    return f"table:{path / 'labels.csv'}"


@pytest.mark.parametrize("value", ["nan", "-", "0", "no scene", "n/a\u00a0"])
def test_value_that_means_no_group_stops_the_first_ingest(tmp_path: Path, run_ingest, make_image, value: str):
    groups = [value if number % 2 else f"scene {number // 4}" for number in range(60)]
    source = table_of(tmp_path, make_image, groups)
    sentence = rf"one group of '{value.strip()}' with 30 of 60 images \(50%\), of 3 classes.*leave the group empty"
    with pytest.raises(DataError, match=sentence):
        run_ingest(source, group="column")
    # the remedy
    manifest = run_ingest(table_of(tmp_path, make_image, [g if "scene " in g else "" for g in groups]), group="column")
    assert manifest.groups == 15


@pytest.mark.parametrize("value", ["nan", "?"])
def test_value_that_means_no_group_is_a_finding_with_its_share(tmp_path: Path, run_ingest, make_image, value: str):
    groups = [f"scene {number // 8}" if number % 4 else value for number in range(80)]
    manifest = run_ingest(table_of(tmp_path, make_image, groups), group="column")
    assert f"'{value}' with 20 of 80 images (25%), of 3 classes" in messages(manifest, "few_groups")


def test_later_images_of_one_value_are_a_finding(tmp_path: Path, run_ingest, make_image):
    groups = [f"scene {number // 4}" for number in range(60)]
    run_ingest(table_of(tmp_path, make_image, groups), group="column")
    manifest = run_ingest(table_of(tmp_path, make_image, [*groups, *["none"] * 90]), group="column")
    assert "'none' with 90 of 150 images (60%), of 3 classes" in messages(manifest)


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("stem", "{label}/{scene}IMG_{number:03}.png", "IMG"),
        ("folder", "{label}/{scene}misc/{number:03}.png", "misc"),
        (r"_(scene\d+|x)", "{label}/{number:03}_{scene}x.png", "x"),
        (r"/(\D*)\d+_(scene\d+)?", "{label}/a{number:03}_{scene}.png", "a/"),
    ],
)
def test_large_group_of_names_is_refused(tmp_path: Path, run_ingest, make_image, setting: str, name: str, value: str):
    for number in range(60):
        scene = "" if number % 2 else f"scene{number // 6}"
        file = name.format(label="abc"[number % 3], scene=scene, number=number)
        write_files(tmp_path / "in", {file: make_image(number)})
    with pytest.raises(DataError, match=rf"'{value}' with 30 of 60 images.* finds none in names such as [abc]/"):
        run_ingest(tmp_path / "in", group=setting)


@pytest.mark.parametrize("of_class", ["", "{label}-"])
def test_three_scenes_of_a_class_are_no_finding(tmp_path: Path, run_ingest, make_image, of_class: str):
    sizes = [14, 10, 8]  # images of each scene in each class
    scenes = [scene for scene, size in enumerate(sizes) for _ in range(size)]
    for number in range(96):
        label, scene = "abc"[number // 32], scenes[number % 32]
        folder = tmp_path / f"in/{label}/{of_class.format(label=label)}scene{scene}"
        write_files(folder, {f"{number}.png": make_image(number)})
    assert messages(run_ingest(tmp_path / "in", group="folder"), "few_groups") == ""


def test_groups_of_all_classes_fill_every_split(tmp_path: Path, run_ingest, make_image):
    """30 persons show each of six signs. A person counts in all classes at once."""
    photos = {f"sign{number % 6}/{number // 6:02}/photo.png": make_image(number) for number in range(180)}
    manifest = run_ingest(write_files(tmp_path / "signs", photos), group="folder")
    persons = {split: manifest.count(split) / 6 for split in SPLITS}
    assert manifest.groups == 30
    assert persons["test"] in (2, 3, 4)
    assert persons["gallery"] in (2, 3, 4)
    assert persons["query"] in (1, 2, 3)


def test_pattern_that_makes_a_group_of_every_image_is_said(tmp_path: Path, scenes: Path):
    said: list[str] = []
    settings = DataSettings(source=f"folder:{scenes}", group="(.*)")
    assert ingest_source(settings, (tmp_path / "store").as_uri(), warn=said.append).groups == 120
    assert said == ["data.group=(.*) makes a group of every image, so it has no effect"]


def test_folders_that_are_groups_are_not_called_unused(tmp_path: Path, run_ingest, make_image):
    names = {number: f"{'ab'[number % 2]}/scene{number % 8}/{number}.png" for number in range(40)}
    root = write_files(tmp_path / "two", {name: make_image(number) for number, name in names.items()})
    assert "names are not used" in messages(run_ingest(root))
    for form in ("folder", "stem"):
        assert "names are not used" not in messages(run_ingest(root, group=form, dataset=form))


def test_class_as_group_is_accepted_if_the_source_gives_the_splits(tmp_path: Path, run_ingest, make_image):
    names = {number: f"{'train' if number % 4 else 'test'}/{'ab'[number % 2]}" for number in range(48)}
    images = {f"{name}/{name[-1]}-{number}.png": make_image(number) for number, name in names.items()}
    assert run_ingest(write_files(tmp_path / "split", images), group="stem").groups == 2


def test_class_of_two_scenes_is_trained_and_tested(tmp_path: Path, run_ingest, make_image):
    images = {f"{'ab'[number % 2]}/scene{number % 4}/{number}.png": make_image(number) for number in range(40)}
    manifest = run_ingest(write_files(tmp_path / "two", images), group="folder")
    for split in ("train", "test"):
        assert manifest.label_counts(split) == {"a": 10, "b": 10}


def test_groups_of_test_images_are_numbered(scenes: Path, run_ingest):
    manifest = run_ingest(scenes, group="stem")
    dataset = opened(manifest)
    (block,) = dataset.blocks("test")
    assert np.unique(block.groups, return_counts=True)[1].tolist() == [3] * (len(block) // 3)
    numbers = group_numbers(dataset)
    assert numbers is not None
    counts = numbers.label_counts()
    assert len(counts) == manifest.groups
    assert {sum(labels.values()) for labels in counts.values()} == {3}
    manifest = run_ingest(scenes, dataset="plain")
    assert group_numbers(opened(manifest)) is None
    (block,) = opened(manifest).blocks("test")
    assert len(np.unique(block.groups)) == len(block), "an image without a group counts as one"


# Near-duplicates


@cache
def burst_frames(shown: int) -> dict[tuple[int, int], bytes]:
    """Scenes of smooth noise with ten frames each, shifted by a pixel and of other brightness."""
    rng, frames = np.random.default_rng(0), dict[tuple[int, int], bytes]()
    for scene in range(shown):
        base = np.kron(rng.uniform(40, 200, (6, 6)), np.ones((6, 6)))
        for frame in range(10):
            moved = np.roll(base, rng.integers(-1, 2, 2), (0, 1)) * rng.uniform(0.94, 1.06)
            pixels = np.clip(moved + rng.normal(0, 1, moved.shape), 0, 255).astype(np.uint8)
            frames[scene, frame] = saved(Image.fromarray(pixels))
    return frames


def bursts(root: Path, name: str, shown: int = 30) -> Path:
    """The `burst_frames` of classes a and b in turns."""
    frames = burst_frames(shown).items()
    return write_files(root, {f"{'ab'[s % 2]}/{name.format(scene=s, frame=f)}": data for (s, f), data in frames})


@pytest.mark.parametrize(
    ("name", "proposed"),
    [
        ("scene{scene}-{frame}.png", "data.group=stem"),
        ("scene{scene}/{scene}{frame}_x.png", "data.group=stem"),
        ("IMG_20240101_10{scene:02}{frame:02}.png", r"'data.group=([^/]*\d)\d\.\w+$'"),
    ],
)
def test_near_duplicates_are_seen_and_a_pattern_is_proposed(tmp_path: Path, run_ingest, name: str, proposed: str):
    source = bursts(tmp_path / "bursts", name)
    manifest = run_ingest(source)
    found, shown = find_near_duplicates(opened(manifest))
    assert found.is_leak
    assert 0 < len(shown.pairs) <= 6
    assert f"Ingest them with --set {proposed}, which makes 30 groups" in found.advice
    setting = proposed.strip("'").removeprefix("data.group=")
    manifest = run_ingest(source, group=setting, dataset="grouped")
    found, shown = find_near_duplicates(opened(manifest), setting)
    assert (found.found, shown.pairs, found.advice) == (0, (), "")


def test_advice_does_not_repeat_the_setting(tmp_path: Path, run_ingest):
    source = bursts(tmp_path / "bursts", "scene{scene}-{frame}.png")
    run_ingest(source)
    advice = burst_advice(source, run_ingest, group="stem")
    assert "groups have images in several splits, since they were ingested before it was set" in advice
    assert "with --set" not in advice
    advice = burst_advice(source, run_ingest, group=r"(\d)\.png", dataset="wrong")
    assert "with --set data.group=stem, which makes 30 groups" in advice


def burst_advice(source: Path | str, run_ingest, **settings: str) -> str:
    return find_near_duplicates(opened(run_ingest(source, **settings)), settings.get("group", ""))[0].advice


def test_successive_numbers_of_a_camera_are_proposed_as_groups(tmp_path: Path, run_ingest):
    """No part of a name names the scene, but ten successive images are mostly of one."""
    source = bursts(tmp_path / "bursts", "scene{scene:03}-{frame}.png")
    for path in source.rglob("*-9.png"):
        path.unlink()
    for label in "ab":
        for number, path in enumerate(sorted((source / label).iterdir())):
            path.rename(path.with_name(f"IMG_{number:04}.png"))
    pattern = r"([^/]*\d)\d\.\w+$"
    assert f"--set 'data.group={pattern}', which makes 14 groups" in burst_advice(source, run_ingest)
    assert burst_advice(source, run_ingest, group=pattern, dataset="grouped") == ""


@pytest.mark.parametrize("group", ["", "stem"])
def test_scenes_that_the_source_divides_are_named(tmp_path: Path, run_ingest, group: str):
    source = bursts(tmp_path / "bursts", "scene{scene}-{frame}.png")
    for path in sorted(source.rglob("*.png")):
        split = "test" if path.stem.endswith("-9") else "train"
        write_files(tmp_path / "split" / split, {f"{path.parent.name}/{path.name}": path.read_bytes()})
    advice = burst_advice(tmp_path / "split", run_ingest, group=group)
    assert "The source itself puts them into different splits, such as " in advice
    assert "test/" in advice
    assert "train/" in advice
    assert "Give all images of a scene one split there" in advice


def test_group_column_of_a_table_is_proposed_and_its_neglect_is_said(tmp_path: Path, run_ingest):
    source = bursts(tmp_path / "bursts", "scene{scene}-{frame}.png")
    rows = ["path,label,group"]
    for path in sorted(source.rglob("*.png")):
        scene, name = path.stem.partition("-")[0], f"{sha256(path.name.encode()).hexdigest()}.png"
        rows.append(f"{name},{path.parent.name},{scene}")
        path.rename(source / name)
    (source / "labels.csv").write_text("\n".join(rows))
    table = f"table:{source}/labels.csv"
    assert "column group of the table, and ingest them with --set data.group=column" in burst_advice(table, run_ingest)
    said: list[str] = []
    settings = DataSettings(source=table, dataset="again")
    ingest_source(settings, (tmp_path / "store").as_uri(), warn=said.append)
    (sentence,) = said
    assert "--set data.group=column" in sentence
    grouped = settings.model_copy(update={"group": "column", "dataset": "grouped"})
    assert ingest_source(grouped, (tmp_path / "store").as_uri(), warn=said.append).groups == 30
    assert len(said) == 1


@pytest.mark.parametrize("of_class", ["", "a"], ids=["hashes", "numbers after the class"])
def test_names_that_do_not_tell_the_scene_get_no_pattern(tmp_path: Path, run_ingest, of_class: str):
    source = bursts(tmp_path / "bursts", "scene{scene}-{frame}.png")
    for path in sorted(source.rglob("*.png")):
        digest = sha256(path.name.encode()).hexdigest()
        path.rename(path.with_name(f"{path.parent.name}{int(digest, 16) % 10**9}.png" if of_class else f"{digest}.png"))
    assert "Set data.group to a pattern that finds the scene in names such as " in burst_advice(source, run_ingest)


def test_digits_have_groups_by_their_names_and_no_near_duplicates_to_speak_of(run_ingest):
    manifest = run_ingest("digits", group=r"digits\[(\d+)\d\]")
    assert manifest.groups == 179
    found, _ = find_near_duplicates(opened(manifest))
    assert 0 < found.compared == found.test_images
    assert not found.is_leak
