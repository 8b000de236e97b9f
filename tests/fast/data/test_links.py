"""Links to folders are followed, and those that lead nowhere stop the ingest."""

import os
from pathlib import Path

import pytest

from evernear.data.sources import open_source
from evernear.errors import StoreError
from tests.dataset_images import write_files
from tests.small_ingest import findings


@pytest.fixture
def disk(tmp_path: Path, make_image) -> Path:
    """A folder outside of the source with 30 images, some of them in a folder."""
    images = {f"{'deeper/' * (number % 2)}{number}.png": make_image(1000 + number) for number in range(30)}
    return write_files(tmp_path / "disk", images)


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in open_source(f"folder:{root}").entries())


@pytest.mark.parametrize(("link", "relative"), [("1/disk", False), ("1/a/b/disk", True), ("disk", True)])
def test_linked_folder_is_used_and_reported(tree, disk: Path, run_ingest, contents, link: str, relative: bool) -> None:
    (tree / link).parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(disk, (tree / link).parent) if relative else str(disk)
    (tree / link).symlink_to(target)
    (tree / "2" / "chain").symlink_to(tree / "10")  # in the source, which needs no word
    manifest = run_ingest(tree)
    assert len(contents(manifest)) == 66 - 12  # those of 10 have two labels
    assert set(contents(manifest).label.values()) == {"1", "2", *([] if "/" in link else ["disk"])}
    (finding,) = [finding for finding in findings(manifest) if finding.rule == "outside_link"]
    assert (finding.severity, finding.names) == ("info", (f"{link} -> {target}",))
    assert finding.message == (
        f"1 link leads out of the source, to a folder whose images are used: {link} -> {target}."
    )


def test_many_links_out_of_the_source_are_counted_and_some_named(tree, disk: Path, run_ingest) -> None:
    for number in range(30):
        (disk.parent / f"disk{number}").mkdir()
        (tree / "1" / f"disk{number:02}").symlink_to(disk.parent / f"disk{number}")
    manifest = run_ingest(tree)
    assert manifest.problem_counts == {"outside_link": 30}
    (finding,) = findings(manifest)
    assert (finding.count, finding.message.count(" -> "), finding.message[-10:]) == (30, 5, " and more.")


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("1/loop", "."),
        ("1/loop", ".."),
        ("1/loop", "../.."),
        ("1/deeper/loop", ".."),
        ("1/deeper/loop", "../../1"),
        ("loop", "."),
        ("loop", ".."),
        ("1/loop", "/"),
    ],
)
def test_link_to_a_folder_that_contains_it_is_a_loop(tree, link: str, target: str) -> None:
    before = names(tree)
    (tree / link).parent.mkdir(exist_ok=True)
    (tree / link).symlink_to(target)
    assert names(tree) == before


def test_loop_outside_of_the_source_ends(tree, disk: Path) -> None:
    (disk / "up").symlink_to("..")  # contains the source as well
    (tree / "1" / "disk").symlink_to(disk)
    listed = names(tree)
    assert len(listed) == len(set(listed)) == 66


def test_links_among_classes_do_not_multiply(tree) -> None:
    """Each class gets the images of the others once."""
    classes = [f"c{number}" for number in range(12)]
    for name in classes:
        (tree / name).mkdir()
        (tree / name / "x.png").write_bytes((tree / "1" / "000.png").read_bytes())
        for other in classes:
            if other != name:
                (tree / name / f"to-{other}").symlink_to(f"../{other}")
    listed = names(tree)
    assert len(listed) == 36 + 12 * 12
    by_class = {name: sum(each.startswith(f"{name}/") for each in listed) for name in classes}
    assert set(by_class.values()) == {12}


def test_folder_behind_two_links_is_used_once_in_a_class_and_conflicts_in_two(tree, disk: Path, run_ingest) -> None:
    (tree / "1" / "a").symlink_to(disk)
    (tree / "1" / "b").symlink_to(disk)
    assert run_ingest(tree).problem_counts == {"outside_link": 2}
    (tree / "2" / "c").symlink_to(disk)
    assert run_ingest(tree).problem_counts == {"conflicting_labels": 30, "outside_link": 3}


def test_folder_behind_links_in_two_splits_is_in_both(tree, disk: Path, run_ingest, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    tree.rename(tmp_path / "given" / "train")
    for folder in ("train/1", "test/1"):
        (tmp_path / "given" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "given" / folder / "disk").symlink_to(disk)
    manifest = run_ingest(tmp_path / "given")
    assert (manifest.count("test"), manifest.problem_counts["duplicate_across_splits"]) == (30, 30)


def test_split_folder_and_source_may_be_links(tree, run_ingest, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    for path in sorted(tree.rglob("*.png"))[::3]:
        write_files(tmp_path / "held", {f"{path.parent.name}/{path.name}": path.read_bytes()})
        path.unlink()
    (tmp_path / "given" / "train").symlink_to(tree)
    (tmp_path / "given" / "test").symlink_to(tmp_path / "held")
    (tmp_path / "link").symlink_to("given")
    manifest = run_ingest(tmp_path / "link")
    assert (manifest.name, manifest.count("test"), manifest.problem_counts) == ("given", 12, {"outside_link": 2})


@pytest.mark.parametrize("where", ["class", "split", "class in a split", "in a class", "deep", "image", "no image"])
def test_link_that_leads_nowhere_stops_the_ingest(tree, run_ingest, tmp_path: Path, where: str) -> None:
    root = tree
    link = {"class": "new", "in a class": "1/disk.2023", "deep": "1/a/b/disk", "image": "1/0.png"}.get(where, "1/0.txt")
    if "split" in where:
        root = tmp_path / "given"
        root.mkdir()
        tree.rename(root / "train")
        link = "test" if where == "split" else "train/new"
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to("/unmounted/disk")
    with pytest.raises(StoreError) as info:
        run_ingest(root)
    assert str(info.value) == (
        f"{root} contains a link that leads nowhere: {link} -> /unmounted/disk (No such file or directory); mount or"
        " restore the target, or remove the link."
    )
    (root / link).unlink()
    assert run_ingest(root).problem_counts == {}


def test_all_links_that_lead_nowhere_are_counted_and_some_named(tree, run_ingest) -> None:
    for number in range(9):
        (tree / "12"[number % 2] / f"d{number}").symlink_to("/unmounted")
    (tree / "1" / "self").symlink_to("self")
    (tree / "1" / "under a file").symlink_to("000.png/x")
    with pytest.raises(StoreError, match=r"contains 11 links that lead nowhere: 1/d0 -> .* and 6 more; mount"):
        run_ingest(tree)
    for path in tree.glob("*/d*"):
        path.unlink()
    with pytest.raises(
        StoreError,
        match=r"1/self -> self \(Too many levels of symbolic links\), 1/under a file -> 000\.png/x \(Not a dir",
    ):
        run_ingest(tree)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every directory")
def test_link_to_a_folder_without_permission_is_named(tree, disk: Path, run_ingest) -> None:
    (tree / "1" / "disk").symlink_to(disk / "deeper")
    disk.chmod(0)
    try:
        with pytest.raises(StoreError, match=r"1/disk -> .*/deeper \(Permission denied\)"):
            run_ingest(tree)
        (tree / "1" / "disk").unlink()
        (tree / "1" / "disk").symlink_to(disk)
        with pytest.raises(StoreError, match=r"1/disk cannot be read or written: Permission denied"):
            run_ingest(tree)
    finally:
        disk.chmod(0o700)


def test_links_under_hidden_names_are_not_followed(tree, disk: Path, run_ingest) -> None:
    (tree / ".hidden").symlink_to(disk)
    (tree / ".gone").symlink_to("/unmounted")
    (tree / "1" / ".cache").symlink_to(disk)
    (tree / "1" / ".gone").symlink_to("/unmounted")
    manifest = run_ingest(tree)
    assert [(problem.kind, problem.names) for problem in manifest.problems] == [
        ("hidden_folder", (".hidden",)),
        ("litter", ("1/.cache",)),
        ("litter", ("1/.gone",)),
    ]
