"""The pages of a class and of the runs, and renamed classes, without a browser."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from evernear.common.run_record import OUTCOME, RunRecord, StepRecord
from evernear.common.store import Store
from evernear.console.backend import ReleaseAnswers
from evernear.console.runs import LocalRuns
from evernear.console.web import list_page
from evernear.errors import DataError
from evernear.evaluation.answer_table import ANSWERS_FILE, KINDS, AnswerTable, AnswerWriter
from evernear.release.manifest import ReleaseManifest
from evernear.release.promotions import ChampionPointer, How, Promotion
from evernear.reporting.notify import RunOutcome
from evernear.reporting.runs import RunList
from evernear.review.label_target import FolderTarget
from evernear.review.renames import RENAMES, Rename, Renames, finish_renames, rename_class, with_renames
from evernear.settings import ClassSettings, DataSettings, load
from tests.consoles import TOKEN, console_client, with_csrf
from tests.review_queue import NOW, png

PAGES = ("/data", "/mistakes", "/runs", "/review/starts")


def rename(old: str, new: str) -> Rename:
    return Rename(old=old, new=new, who="ann", at=NOW)


@pytest.fixture
def pet_folder(tmp_path: Path) -> Path:
    for number, name in enumerate(["cat/a.png", "cat/deep/b.png", "dog/c.png"]):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return tmp_path / "images"


def files(images: Path) -> list[str]:
    return sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))


def test_renamed_class_moves_and_the_next_run_takes_it(pet_folder: Path, store: Store) -> None:
    target = FolderTarget(pet_folder, DataSettings())
    assert rename_class(store, target, rename("cat", "kitten")) == 2
    assert files(pet_folder) == ["dog/c.png", "kitten/a.png", "kitten/deep/b.png"]
    assert not (pet_folder / "cat").exists()
    assert with_renames(ClassSettings(), store).renamed == {"cat": "kitten"}
    rename_class(store, target, rename("kitten", "feline"))
    assert with_renames(ClassSettings(), store).renamed == {"cat": "feline", "kitten": "feline"}
    assert with_renames(ClassSettings(), store, ["cat"]).renamed == {"kitten": "feline"}, "a new class has the name"
    assert with_renames(ClassSettings(retired=("cat",)), store).renamed == {"kitten": "feline"}


def test_killed_renaming_continues(pet_folder: Path, store: Store) -> None:
    store.put(RENAMES, Renames(renames=(rename("cat", "kitten"),)).to_json())
    target = FolderTarget(pet_folder, DataSettings())
    target.move("cat/a.png", "kitten/a.png")
    finish_renames(store, target)
    assert files(pet_folder) == ["dog/c.png", "kitten/a.png", "kitten/deep/b.png"]


@pytest.mark.parametrize(("old", "new", "reason"), [("cat", "dog", "exists"), ("cow", "ox", "no image of the class")])
def test_class_is_not_renamed_to_another_and_not_without_images(
    pet_folder: Path, store: Store, old: str, new: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        rename_class(store, FolderTarget(pet_folder, DataSettings()), rename(old, new))
    assert files(pet_folder) == ["cat/a.png", "cat/deep/b.png", "dog/c.png"]


def test_a_class_is_not_renamed_to_the_name_of_another_class_of_the_live_release(
    store: Store, pet_folder: Path
) -> None:
    """Otherwise a swap of two names compares the images of one class with those of the other."""
    target = FolderTarget(pet_folder, DataSettings())
    live = ("cat", "dog")
    rename_class(store, target, rename("cat", "kitten"), live)
    with pytest.raises(DataError, match="The live release calls other images cat"):
        rename_class(store, target, rename("dog", "cat"), live)
    assert rename_class(store, target, rename("kitten", "cat"), live) == 2, "its own earlier name"


def test_runs_tell_how_they_ended(store: Store) -> None:
    started = datetime(2026, 11, 1, tzinfo=UTC)
    for name, outcome in {
        "held": RunOutcome(
            run="held", pipeline="continuous-training", state="held", candidate="v", reasons=("Worse.",)
        ),
        "failed": RunOutcome(run="failed", pipeline="reindex", state="failed", step="embed", reasons=("Full.",)),
        "killed": None,
    }.items():
        record = RunRecord(store, name)
        step = StepRecord(step="ingest", state="running" if outcome is None else "finished", started=started)
        record.save_step(step.model_copy(update={"host": "elsewhere/1"} if outcome else {"host": "", "process": 1}))
        if outcome:
            record.save(**{OUTCOME: outcome})
    store.put("runs/damaged/outcome.json", b"{")
    runs = RunList(store)
    listed = runs.page(0, 10)
    by_run = {each.run: each for each in listed.runs}
    assert (by_run["held"].kind, by_run["held"].state) == ("train", "held")
    assert (by_run["failed"].kind, by_run["failed"].sentence) == ("reindex", "failed at embed: Full.")
    assert by_run["killed"].state in ("running", "interrupted")
    assert len(listed.faults) == 1
    assert listed.total == 4
    assert [each.run for each in runs.page(3, 1).runs] or runs.page(3, 1).faults
    assert (runs.page(900, 3).first, len(runs.page(900, 3).runs) + len(runs.page(900, 3).faults)) == (3, 1)


def test_rollbacks_stand_among_the_runs(store: Store, pet_folder: Path) -> None:
    """A run deployed the first release, a command promoted the second and rolled it back, and
    another run rolled back in a cluster."""

    def promotion(number: int, how: How, version: str, run: str = "") -> Promotion:
        since = datetime(2026, 11, number, tzinfo=UTC)
        previous = "20261101.000000.aaaaaaaa" if number > 1 else None
        return Promotion(
            version=version, previous=previous, since=since, number=number, how=how, by="ann", why="Slow.", run=run
        )

    first, second = "20261101.000000.aaaaaaaa", "20261102.000000.bbbbbbbb"
    pointer, champion = ChampionPointer(store), None
    changes = [("deploy", first, "run"), ("force", second, ""), ("rollback", first, ""), ("anchor", first, "")]
    for number, (how, version, run) in enumerate(changes, 1):
        champion = pointer.move(promotion(number, cast("How", how), version, run), champion)
    RunRecord(store, "run").save(**{OUTCOME: RunOutcome(run="run", state="promoted", release=first)})
    runs = RunList(store)
    for _ in range(2):  # the second page is read from memory
        shown = [(each.kind, each.state, each.sentence, each.is_live) for each in runs.page(0, 10).runs]
        assert shown == [
            ("train", "promoted", f"promoted: release {first} is the champion; servers load it when they start", True),
            ("rollback", "rolled back", f"release {first}, rolled back by ann: Slow.", True),
            (
                "promote",
                "promoted",
                f"release {second} instead of {first}, promoted regardless of the gate by ann: Slow.",
                False,
            ),
        ]
    assert (runs.page(1, 1).runs[0].kind, runs.page(1, 1).total) == ("rollback", 3)
    settings = load(overrides=[f"store={store.uri}", f"data.source=folder:{pet_folder}"], environment={})
    client = console_client(settings, store, LocalRuns(settings, []))
    client.get(f"/?token={TOKEN}")
    text = client.get("/runs").text
    assert text.count(", live</summary>") == 2
    assert "rolled back by ann: Slow." in text


def test_filter_that_no_image_passes_is_empty(tmp_path: Path) -> None:
    with AnswerWriter(tmp_path / ANSWERS_FILE, ("cat",)):
        pass
    table = AnswerTable((tmp_path / ANSWERS_FILE).read_bytes(), ANSWERS_FILE)
    answers = ReleaseAnswers(cast(ReleaseManifest, SimpleNamespace(threshold=1.0)), table)
    assert [answers.digests(kind) for kind in KINDS] == [set(), set(), set()]


def test_a_page_beyond_the_end_of_a_list_is_the_last() -> None:
    request = Request({"type": "http", "query_string": b"page=900", "headers": []})
    assert [list_page(request, total, 60) for total in (130, 60, 0)] == [(3, 3), (1, 1), (1, 1)]


def test_pages_of_an_empty_store_say_what_is_missing(pet_folder: Path, store: Store) -> None:
    settings = load(overrides=[f"store={store.uri}", f"data.source=folder:{pet_folder}"], environment={})
    client: TestClient = console_client(settings, store, LocalRuns(settings, []))
    client.get(f"/?token={TOKEN}")
    with_csrf(client)
    texts = {path: client.get(path).text for path in PAGES}
    assert "Nothing was ingested yet" in texts["/data"]
    assert "No release has been promoted yet" in texts["/mistakes"]
    assert "No run yet" in texts["/runs"]
    assert "the first one needs a training" in texts["/review/starts"]
    assert client.get("/data/class?class=cat").status_code == 400
    assert client.get("/runs/compare?run=a").status_code == 400
    assert client.get("/runs/page/a").status_code == 404
    assert client.post("/review", data={"image": "1" * 64, "action": "keep"}).status_code == 400
    for name in ("a", "..%2Fa", "%00", "a" * 300):
        assert client.get(f"/runs/compare?run={name}&run=b").status_code == 404
        assert client.get(f"/mistakes/image/{name}/1").status_code == 404
    for name in ("%00", "a" * 300):
        assert client.get(f"/runs/page/{name}").status_code == 404
