"""Checks from end to end: a real folder, a real champion, real query logs; the pipeline server is
in memory."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from evernear.common.disk import sha256_bytes
from evernear.common.run_record import RunRecord, StepRecord
from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Split, save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.errors import SettingsError
from evernear.index.build import build_index
from evernear.kubeflow.runs import Run, State
from evernear.release.registry import Registry
from evernear.review.answers import Answer, Answers
from evernear.review.label_target import FolderTarget, open_label_target
from evernear.review.live_labels import import_labels
from evernear.review.queue import SUBMITTED
from evernear.review.renames import Rename, rename_class
from evernear.serving.configuration import logged_queries
from evernear.serving.endpoints import home_of
from evernear.serving.query_log_files import LoggedQuery, Period
from evernear.settings import DataSettings, IndexSettings, Settings, of_run
from evernear.triggers.requests import Person, Request, RequestStore
from evernear.triggers.watch.watcher import Watcher
from tests.real.triggers.watch.watched import NOON, WatchedSystem, digits, negatives, noise, png
from tests.releases import System, release_maker

MANY = [noise(number) for number in range(400)]
FIRST_RUN = "00000001-0000-4000-8000-000000000000"


def test_unchanged_source_leads_to_nothing(watched: WatchedSystem) -> None:
    report = watched.watcher().check()
    assert report.action == "nothing"
    assert report.faults == ()
    assert report.reasons[0] == "Nothing is new."
    assert report.figures["listed_files"] == 1617
    assert report.figures["trained_on"] == watched.dataset().count("train")
    assert watched.proposals == []


def test_many_new_images_are_proposed_once_across_restarts(watched: WatchedSystem) -> None:
    watched.add("3", MANY)
    report = watched.watcher().check()
    assert report.action == "retrain"
    assert report.figures["new_train_images"] == pytest.approx(400 * 0.6)
    assert "About 240 new training images" in report.reasons[0]
    (proposal,) = watched.proposals
    assert (proposal.id, proposal.pipeline, proposal.state) == (report.proposal, "continuous-training", "pending")
    assert proposal.figures == report.figures
    assert watched.runs.runs == []
    for _ in range(3):
        again = watched.watcher().check()
        assert (again.action, again.proposal) == ("retrain", None)
        assert again.reasons[-1] == f"Proposal {proposal.id} waits for an answer."
    assert watched.proposals == [proposal]


def test_answers_of_a_review_lead_to_a_reindex(watched: WatchedSystem) -> None:
    answers = Answers(watched.store, open_label_target(f"folder:{watched.images}"))
    labeled = [Answer(image=sha256_bytes(image), action="label", label="3", who="ann", at=NOON) for image in MANY[:20]]
    for answer, image in zip(labeled, MANY, strict=False):
        answers.label(image, answer)
    try:
        report = watched.watcher(new_gallery_images=1).check()
        assert report.action == "reindex"
        assert [proposal.pipeline for proposal in watched.proposals] == ["reindex"]
    finally:
        for answer in labeled:
            answers.undo(answer.model_copy(update={"action": "undo", "label": ""}))
    assert watched.watcher(new_gallery_images=1).check().reasons[0] == "Nothing is new."


def test_few_new_images_lead_to_nothing(watched: WatchedSystem) -> None:
    watched.add("3", MANY[:100])
    report = watched.watcher().check()
    assert report.action == "nothing"
    assert report.reasons[0] == "The source has 100 new files, below the thresholds."


def test_declined_proposal_stays_quiet_until_it_is_worse(watched: WatchedSystem) -> None:
    watched.add("3", MANY[:200])
    watch: dict[str, Any] = {"cooldown_s": 6 * 3600, "new_train_images": 100, "new_gallery_images": 1000}
    watched.watcher(**watch).check()
    (first,) = watched.proposals
    decline(watched, first)
    for _ in range(3):
        watched.wait(hours=9)
        report = watched.watcher(**watch).check()
        assert report.proposal is None
        assert report.reasons[-1] == (
            f"Declined in proposal {first.id}; proposed again when it is worse or another release is live."
        )

    watched.add("3", MANY[200:])  # twice as many
    report = watched.watcher(**watch).check()
    assert report.proposal == watched.proposals[-1].id != first.id
    decline(watched, watched.proposals[-1])
    watched.wait(days=3)
    assert watched.watcher(**watch).check().proposal is None
    assert [proposal.id for proposal in watched.proposals] == sorted(proposal.id for proposal in watched.proposals)


def test_declined_cause_does_not_silence_another(watched: WatchedSystem) -> None:
    watched.ask(negatives(180))
    watched.watcher().check()
    (first,) = watched.proposals
    assert first.causes == ("drift",)
    decline(watched, first)
    assert watched.watcher().check().proposal is None
    watched.add("9", digits(9)[:30])
    report = watched.watcher().check()
    assert report.proposal is None, "the drift alone is no reason to train, and the new class needs no training"
    watched.add("3", MANY)
    report = watched.watcher().check()
    assert report.proposal == watched.proposals[-1].id != first.id
    assert watched.proposals[-1].causes == ("training_images", "drift")


@pytest.mark.slow
def test_declined_drift_is_proposed_again_for_another_release(
    watched: WatchedSystem, trained: tuple[Path, System], tmp_path: Path
) -> None:
    watched.ask(negatives(180))
    watched.watcher().check()
    decline(watched, watched.proposals[0])
    reindexed(watched, trained[1], tmp_path)
    watched.wait(hours=7)
    watched.ask(negatives(180))
    assert watched.watcher().check().proposal == watched.proposals[-1].id != watched.proposals[0].id


@pytest.mark.slow
def test_unanswered_proposal_grows_and_does_not_multiply(watched: WatchedSystem) -> None:
    watched.add("3", MANY[:200])
    watched.watcher().check()
    (proposal,) = watched.proposals
    for _ in range(5):
        watched.wait(days=2)
        assert watched.watcher().check().reasons[-1] == f"Proposal {proposal.id} waits for an answer."
    watched.add("3", MANY[200:])
    grown = f"Proposal {proposal.id} waits for an answer, and has grown."
    assert watched.watcher().check().reasons[-1] == grown
    watched.ask(negatives(180))  # another cause
    assert watched.watcher().check().reasons[-1] == grown
    (after,) = watched.proposals
    assert (after.state, after.grown, after.causes) == ("pending", 2, ("training_images", "drift"))
    assert "About 240 new training images" in after.reasons[0]
    assert after.figures["new_train_images"] == pytest.approx(240)


@pytest.mark.slow
def test_proposal_of_drift_survives_checks_that_miss_it(watched: WatchedSystem) -> None:
    watched.ask(negatives(180))
    watched.watcher(drift_window_s=3600).check()
    watched.wait(hours=5)
    assert watched.watcher(min_queries=1000).check().action == "nothing"
    assert [proposal.state for proposal in watched.proposals] == ["pending"]
    watched.wait(hours=2)
    watched.watcher(min_queries=1000).check()
    assert [proposal.state for proposal in watched.proposals] == ["expired"]


def test_reindex_waits_for_an_answer_to_a_proposed_training_and_not_the_other_way_round(watched: WatchedSystem) -> None:
    watched.add("9", digits(9)[:30])
    watched.watcher().check()
    watched.add("3", MANY)
    watched.watcher().check()
    assert [(proposal.pipeline, proposal.state) for proposal in watched.proposals] == [
        ("reindex", "expired"),
        ("continuous-training", "pending"),
    ]


def decline(watched: WatchedSystem, proposal: Request) -> None:
    RequestStore(watched.store).change(proposal, state="declined", answered_by=Person(id="U1"), answered=watched.now)


def test_new_class_with_enough_images_leads_to_a_reindex(watched: WatchedSystem) -> None:
    nines = digits(9)
    watched.add("9", nines[:9])
    assert watched.watcher().check().action == "nothing"
    watched.add("9", nines[9:30])
    report = watched.watcher().check()
    assert report.action == "reindex"
    assert report.reasons[0] == "A new class in the source: 9 (30 images)."
    assert watched.proposals[0].pipeline == "reindex"


def test_training_takes_precedence_over_a_reindex(watched: WatchedSystem) -> None:
    watched.add("9", digits(9))
    report = watched.watcher(new_train_images=50).check()
    assert report.action == "retrain"
    assert report.figures["new_classes"] == 1


@pytest.mark.slow
def test_training_images_are_counted_since_the_training_after_a_reindex(
    watched: WatchedSystem, trained: tuple[Path, System], tmp_path: Path
) -> None:
    """A reindex moves the champion to a newer snapshot, which its network has not seen."""
    _, system = trained
    watched.add("3", MANY[:200])
    reindexed(watched, system, tmp_path)
    report = watched.watcher(policy="start").check()
    assert [run.pipeline for run in watched.runs.runs] == ["continuous-training"]
    assert report.figures["new_files"] == 0
    assert report.figures["new_gallery_images"] == 0
    assert report.figures["new_train_images"] == pytest.approx(200 * 0.6)
    assert report.figures["trained_on"] == system.dataset.count("train")
    assert report.action == "retrain"
    assert [reason for reason in report.reasons if "nothing new" in reason] == []
    watched.add("3", MANY[200:])
    report = watched.watcher().check()
    assert report.figures["new_gallery_images"] == pytest.approx(200 * 0.2)
    assert report.figures["new_train_images"] == pytest.approx(400 * 0.6)


def test_images_of_a_class_renamed_in_the_console_are_not_new_to_its_network(
    watched: WatchedSystem, trained: tuple[Path, System], tmp_path: Path
) -> None:
    target = FolderTarget(watched.images, watched.settings().data)
    rename_class(watched.store, target, Rename(old="3", new="three", who="ann", at=watched.now))
    try:
        reindexed(watched, trained[1], tmp_path)
        figures = watched.watcher().check().figures
    finally:
        (watched.images / "three").rename(watched.images / "3")
    assert (figures["new_train_images"], figures["new_gallery_images"], figures["new_classes"]) == (0, 0, 0)


def reindexed(watched: WatchedSystem, system: System, directory: Path) -> None:
    """Promote a release with the same network and an index over the current source."""
    save_manifest(ingest_source(watched.settings().data, watched.store.uri), directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    embed_dataset(system.network_dir, dataset, directory / "embeddings")
    build_index(Embeddings.open(directory / "embeddings"), dataset.labels, IndexSettings(), directory / "index")
    registry = Registry(watched.store)
    champion = registry.champion()
    assert champion is not None
    make_release = release_maker(
        System(dataset, system.network_dir, directory / "index"), lambda: directory / "release"
    )
    (directory / "release").mkdir()
    release = make_release(parent=champion.version)
    registry.publish(release.archive)
    registry.set_champion(release.version, champion)


def test_queries_like_the_reference_are_not_drift(watched: WatchedSystem) -> None:
    queries = stored(watched, "query")
    watched.ask(queries)
    report = watched.watcher().check()
    assert report.action == "nothing"
    assert report.figures["queries"] == len(queries)
    assert report.figures["drift_found"] == 0
    assert f"No drift in {len(queries)} live queries of the last 24 h." in report.reasons
    (smallest,) = (reason for reason in report.reasons if "the smallest shifts that are found" in reason)
    assert report.figures["sampled_queries"] == 100
    assert f"100 queries and {len(queries) + watched.dataset().count('test')} reference images" in smallest
    assert report.figures["unknown_rise_detectable"] >= 0.05


def stored(watched: WatchedSystem, split: Split, label: str | None = None) -> list[bytes]:
    """The images of a split, all or those of one label, as PNG files."""
    dataset = watched.dataset()
    return [
        png(image[:, :, 0])
        for block in dataset.blocks(split)
        for image, its in zip(block.images, block.labels, strict=True)
        if label is None or dataset.labels[its] == label
    ]


def test_loss_of_accuracy_in_life_is_proposed_once_and_again_when_it_is_worse(watched: WatchedSystem) -> None:
    number = 0

    def label(correct: int, wrong: int) -> None:
        nonlocal number
        version, asked = watched.champion(), watched.now - timedelta(days=3)
        rows = [
            LoggedQuery(at=asked, pred="3", dist=0.1, unknown=False, id=f"id-{number + row}")
            for row in range(correct + wrong)
        ]
        period = Period(version=version, since=asked, until=asked, queries=len(rows), unknown=0)
        lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
        key = f"{asked:%Y%m%d}/{asked:%Y%m%dT%H%M%SZ}-{version}-host-1-0000000{number:03}.jsonl"
        watched.store.put(f"queries/{key}", lines.encode())
        labels = {row.id: "3" if position < correct else "5" for position, row in enumerate(rows)}
        assert import_labels(watched.store, labels, watched.now).stored == len(rows)
        number += len(rows)

    assert "live_labels" not in watched.watcher(min_queries=1000).check().figures
    label(100, 0)
    report = watched.watcher(min_queries=1000).check()
    assert report.action == "nothing"
    assert report.figures["live_labels"] == 100
    assert any("Of 100 labeled live queries: 100 named right" in reason for reason in report.reasons)
    label(0, 60)
    report = watched.watcher(min_queries=1000).check()
    assert report.action == "retrain"
    assert "significantly less than the 90.0% on the test split" in report.reasons[0]
    assert report.reasons[1].startswith("But the source has nothing new to train on")
    assert watched.watcher(min_queries=1000).check().proposal is None
    (proposal,) = watched.proposals
    assert proposal.causes == ("label right",)
    RequestStore(watched.store).change(proposal, state="declined", answered=watched.now)
    watched.wait(days=1)
    assert watched.watcher(min_queries=1000).check().reasons[-1].startswith(f"Declined in proposal {proposal.id}")
    label(0, 60)
    assert watched.watcher(min_queries=1000).check().proposal is not None


def test_drift_leads_to_a_training(watched: WatchedSystem) -> None:
    watched.add("9", digits(9)[:5])  # something to train on
    watched.ask([*stored(watched, "test")[:60], *negatives(180)])
    report = watched.watcher().check()
    assert report.action == "retrain"
    assert report.figures["drift_found"] >= 2
    assert report.figures["unknown_rise"] > 0.05
    assert "of the live queries are unknown" in report.reasons[0]
    assert "Embeddings of live queries have shifted" in report.reasons[1]
    assert not report.reasons[-1].startswith("But the source")


def test_too_few_and_old_queries_are_not_tested(watched: WatchedSystem) -> None:
    watched.ask(negatives(39))
    only = "Only 39 live queries of the last 30 h sampled, too few to test for drift."
    assert watched.watcher().check().reasons[-1] == only
    watched.ask(negatives(39))
    assert watched.watcher().check().action == "retrain"
    watched.wait(days=15)
    assert watched.watcher().check().figures["queries"] == 0


def test_few_queries_a_day_are_tested_together(watched: WatchedSystem) -> None:
    asked = negatives(120)
    for day in range(4):
        watched.wait(days=day > 0)
        watched.ask(asked[30 * day : 30 * day + 30])
    report = watched.watcher(min_queries=100).check()
    assert report.action == "retrain"
    assert report.figures["queries"] == 120
    assert any("120 queries of the last " in reason and " days" in reason for reason in report.reasons)


def test_window_is_not_extended_beyond_the_retention_or_without_need(watched: WatchedSystem) -> None:
    watched.ask(negatives(60))
    watched.wait(days=3)
    watched.ask(negatives(60))
    assert watched.watcher(min_queries=60).check().figures["queries"] == 60
    retention_s = 2 * 24 * 3600
    assert watched.watcher(min_queries=100, query_retention_s=retention_s).check().figures["queries"] == 60


def test_mix_of_classes_is_shown_and_is_not_drift(watched: WatchedSystem) -> None:
    """The reference's own images, most of them of one class: as new images would be without any
    drift."""
    reference = [*stored(watched, "query"), *stored(watched, "test")]
    of_one_class = [image for split in ("query", "test") for image in stored(watched, split, "1")]
    watched.ask([*reference, *of_one_class * 9])
    report = watched.watcher().check()
    assert report.figures["class_mix_difference"] > 0.2
    assert report.figures["drift_found"] == 0
    assert [
        reason for reason in report.reasons if reason.startswith("The mix of classes differs, which is not drift: ")
    ]


def test_damaged_query_log_is_reported(watched: WatchedSystem) -> None:
    watched.ask(stored(watched, "query"))
    at = watched.now - timedelta(minutes=2)
    key = f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-{watched.champion()}-host-1-12345678.jsonl"
    watched.store.put(key, b"damage")
    report = watched.watcher().check()
    assert len(report.faults) == 1
    assert key in report.faults[0]
    assert report.figures["drift_found"] == 0


def test_policy_starts_a_run_with_the_watched_source(watched: WatchedSystem) -> None:
    watched.add("3", MANY)
    report = watched.watcher(policy="start").check()
    (proposal,), (run,) = watched.proposals, watched.runs.runs
    assert (proposal.state, proposal.run, run.key) == ("started", run.id, proposal.id)
    assert report.proposal == proposal.id
    assert run.pipeline == "continuous-training"
    assert run.parameters["source"] == f"folder:{watched.images}"
    assert run.parameters["started_by"] == f"the watcher, proposal {proposal.id}"
    gate = of_run(run.parameters["settings"]).gate
    assert gate.on_undetected_loss == "hold", "nobody decided on this run"
    assert run.parameters["store"] == watched.store.uri
    watched.wait(hours=12)
    assert watched.watcher(policy="start").check().reasons[-1] == f"Run {run.name} of continuous-training is running."
    assert len(watched.runs.runs) == 1


def test_source_of_the_champion_is_watched_unless_the_settings_name_one(watched: WatchedSystem) -> None:
    watched.add("3", MANY)
    settings = watched.settings(policy="start")
    fractions = settings.data.model_dump(include={"gallery_fraction", "query_fraction"})

    def watcher(**data: object) -> Watcher:
        chosen = settings.model_copy(update={"data": DataSettings.model_validate(fractions | data)})
        return Watcher(chosen, watched.store, watched.runs, watched.directory, lambda: watched.now)

    report = watcher().check()
    assert report.source == f"folder:{watched.images}"
    assert report.figures["new_files"] == len(MANY)
    assert watched.runs.runs[0].parameters["source"] == f"folder:{watched.images}"
    assert watcher(source="").check(act=False).source == report.source, "an empty variable names none"
    report = watcher(source="digits").check(act=False)
    assert (report.source, report.figures["listed_files"]) == ("digits", 1797)


def test_settings_decide_what_to_watch_before_the_first_release(watched: WatchedSystem, tmp_path: Path) -> None:
    store = open_store((tmp_path / "empty").as_uri())
    watcher = Watcher(Settings(store=store.uri), store, None, tmp_path)
    report = watcher.check(act=False)
    assert report.source == "digits"
    assert report.reasons == (
        "No release has been promoted yet, and digits has 1,797 images.",
        "digits is the default; set data.source to watch another source.",
    )


def test_policy_start_needs_a_pipeline_server(watched: WatchedSystem) -> None:
    with pytest.raises(SettingsError, match="needs a pipeline server"):
        Watcher(watched.settings(policy="start"), watched.store, None, watched.directory)


def test_drift_without_new_images_needs_a_person(watched: WatchedSystem) -> None:
    watched.ask(negatives(180))
    report = watched.watcher(policy="start").check()
    assert report.action == "retrain"
    assert [reason.startswith("But the source has nothing new") for reason in report.reasons].count(True) == 1
    assert report.reasons[-1].startswith("But the source has nothing new")
    assert [proposal.state for proposal in watched.proposals] == ["pending"]
    assert watched.runs.runs == []


@pytest.mark.parametrize("fault", ["down", "answer lost"])
def test_failed_start_is_repeated_by_the_next_check(watched: WatchedSystem, fault: str) -> None:
    watched.add("3", MANY)
    if fault == "answer lost":
        watched.runs.lost_answers = 1
        report = watched.watcher(policy="start").check()
        assert report.faults == ("KFP broke off.",)
        (proposal,) = watched.proposals
        assert (proposal.state, proposal.run) == ("accepted", "")
    else:
        watched.runs.is_down = True
        report = watched.watcher(policy="start").check()
        assert report.faults == ("Kubeflow Pipelines at http://kfp.example cannot be reached.",)
        assert watched.proposals == [], "active runs are unknown"
        watched.runs.is_down = False
    watched.wait(hours=1)
    watched.watcher(policy="start").check()
    (proposal,), (run,) = watched.proposals, watched.runs.runs
    assert (proposal.run, run.key) == (run.id, proposal.id)


def test_active_run_of_others_blocks_a_proposal(watched: WatchedSystem) -> None:
    watched.add("3", MANY)
    run = watched.runs.start("continuous-training", {}, "by hand")
    report = watched.watcher().check()
    assert report.reasons[-1] == f"Run {run.name} of continuous-training is running."
    assert watched.proposals == []
    for number in range(60):  # others also use this server
        watched.runs.end(watched.runs.start("translation", {}, f"theirs {number}").id)
    assert watched.watcher().check().proposal is None
    watched.runs.end(run.id, State.FAILED)
    assert watched.watcher().check().proposal is not None


def test_held_training_is_not_repeated_without_more_images(watched: WatchedSystem) -> None:
    watched.add("3", MANY[:250])
    watched.watcher(policy="start").check()
    (run,) = watched.runs.runs
    watched.runs.end(run.id)
    watched.save_outcome(run.id, "held")
    watched.wait(days=3)
    report = watched.watcher(policy="start").check()
    assert report.reasons[-1].startswith(f"The gate held the run of proposal {watched.proposals[0].id}")
    watched.add("3", MANY[250:])
    watched.watcher(policy="start", new_train_images=90).check()
    assert len(watched.runs.runs) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outcome", "ended"),
    [("failed", "failed"), ("stopped", "was stopped"), ("rolled back", "was rolled back"), ("", "led to no release")],
)
def test_run_without_a_release_is_repeated_only_after_a_change(
    watched: WatchedSystem, outcome: str, ended: str
) -> None:
    """Without an outcome, the run was killed or canceled before it could report one."""
    watched.add("3", MANY)
    watched.watcher(policy="start").check()
    watched.runs.end(FIRST_RUN, State.FAILED if outcome else State.CANCELED)
    if outcome:
        watched.save_outcome(FIRST_RUN, outcome)
    assert "was started; it may be proposed again after" in watched.watcher(policy="start").check().reasons[-1]
    for _ in range(3):
        watched.wait(days=1)
        report = watched.watcher(policy="start").check()
    assert len(watched.runs.runs) == 1
    assert report.reasons[-1] == (
        f"The run of proposal {watched.proposals[0].id} {ended}, and nothing has changed in the source since. Mend the"
        " cause, then start the run yourself."
    )
    watched.add("3", [noise(1000)])
    watched.watcher(policy="start").check()
    assert len(watched.runs.runs) == 2


@pytest.mark.parametrize(("step", "exit_code", "runs"), [("ingest", 4, 2), ("ingest", 3, 1), ("deploy", 4, 1)])
def test_run_whose_ingest_could_not_read_the_source_is_repeated(
    watched: WatchedSystem, step: str, exit_code: int, runs: int
) -> None:
    watched.add("3", MANY)
    watched.watcher(policy="start").check()
    watched.runs.end(FIRST_RUN, State.FAILED)
    watched.save_outcome(FIRST_RUN, "failed")
    record = StepRecord(step=step, state="failed", exit_code=exit_code, started=datetime.now(UTC))
    RunRecord(watched.store, FIRST_RUN).save_step(record)
    watched.wait(days=1)
    watched.watcher(policy="start").check()
    assert len(watched.runs.runs) == runs


@pytest.mark.slow
def test_run_is_repeated_after_another_one_led_to_a_release(
    watched: WatchedSystem, trained: tuple[Path, System], tmp_path: Path
) -> None:
    """A person started it; the network is still the old one."""
    watched.add("3", MANY)
    watched.watcher(policy="start").check()
    watched.runs.end(FIRST_RUN, State.FAILED)
    watched.save_outcome(FIRST_RUN, "failed")
    reindexed(watched, trained[1], tmp_path)
    watched.wait(hours=6)
    watched.watcher(policy="start").check()
    assert [run.pipeline for run in watched.runs.runs] == ["continuous-training"] * 2


@pytest.fixture
def touch(watched: WatchedSystem) -> Iterator[Callable[[], None]]:
    """Give all files of the source the current time; afterwards they have their own again."""
    times = {path: path.stat() for path in watched.images.rglob("*.png")}
    yield lambda: [path.touch() for path in times] and None
    for path, stat in times.items():
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_touched_files_do_not_repeat_a_failed_run(watched: WatchedSystem, touch: Callable[[], None]) -> None:
    watched.add("3", MANY)
    watched.watcher(policy="start").check()
    watched.runs.end(FIRST_RUN, State.FAILED)
    touch()
    watched.wait(days=1)
    assert "nothing has changed in the source" in watched.watcher(policy="start").check().reasons[-1]
    assert len(watched.runs.runs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["held", "failed", "reindexed"])
def test_files_that_a_run_has_read_are_new_only_if_their_images_are(
    watched: WatchedSystem, trained: tuple[Path, System], tmp_path: Path, touch: Callable[[], None], ending: str
) -> None:
    """The champion's snapshot, or the one of its training, is not the newest and lists the former
    times."""
    watch: dict[str, Any] = {"policy": "start", "new_gallery_images": 5, "new_train_images": 50, "new_train_share": 0.0}
    touch()
    watched.add("3", MANY[:5])
    (watched.images / "3" / "broken.png").write_text("no image")
    watched._added.append(watched.images / "3" / "broken.png")
    if ending == "reindexed":
        reindexed(watched, trained[1], tmp_path)
    else:
        ingest_source(watched.settings().data, watched.store.uri)
    report = watched.watcher(**watch).check()
    assert report.action == "nothing"
    assert report.figures["new_files"] == (0 if ending == "reindexed" else 5)
    assert report.figures["new_train_images"] == pytest.approx(5 * 0.6)


def test_renamed_class_is_started_once_and_named(watched: WatchedSystem) -> None:
    renamed = (watched.images / "8").rename(watched.images / "eight")
    try:
        report = watched.watcher(policy="start", new_train_images=1000).check()
        watched.runs.end(FIRST_RUN, State.FAILED)
        watched.save_outcome(FIRST_RUN, "failed")
        for _ in range(3):
            watched.wait(days=1)
            watched.watcher(policy="start", new_train_images=1000).check()
    finally:
        renamed.rename(watched.images / "8")
    assert report.action == "reindex"
    assert report.reasons == watched.proposals[0].reasons
    assert report.reasons[:2] == (
        "A new class in the source: eight (174 images).",
        "About 35 new gallery images.",
    )
    assert report.reasons[2] == (
        "A class is gone from the source: 8 (174 images). Validation stops a run until it is back; if that is on"
        " purpose, start the run yourself with --retire 8 or --rename 8=NEW."
    )
    assert len(watched.runs.runs) == 1
    assert watched.watcher(policy="start", new_train_images=1000).check().reasons[0] == "Nothing is new."


def test_source_that_lists_nothing_is_a_fault(watched: WatchedSystem) -> None:
    """As the mount point of a disk that is away."""
    watched.add("3", MANY)
    watched.watcher().check()
    moved = watched.images.rename(watched.images.with_name("elsewhere"))
    watched.images.mkdir()
    try:
        report = watched.watcher().check()
    finally:
        watched.images.rmdir()
        moved.rename(watched.images)
    assert report.action == "nothing"
    assert report.faults == (
        f"folder:{watched.images} lists no image, and the release was made from 1,617 files of it: check that it is"
        " mounted and complete.",
    )
    assert [proposal.state for proposal in watched.proposals] == ["pending"]


@pytest.mark.parametrize("years", [10, -10])
def test_jump_of_the_clock_during_a_check_dates_nothing_ahead(watched: WatchedSystem, years: int) -> None:
    """It was wrong before or is now; then it is right again."""
    watched.add("3", MANY)
    times = [NOON, NOON + timedelta(days=365 * years)]
    clock = iter(sorted(times, reverse=years > 0))
    watcher = Watcher(watched.settings(), watched.store, watched.runs, watched.directory / "cache", lambda: next(clock))
    report = watcher.check()
    assert report.at == watched.proposals[0].created == min(times)
    for _ in range(2):
        watched.wait(hours=7)
        later = watched.watcher().check()
        assert watched.watcher().schedule.read().last == later
        (pending,) = (proposal for proposal in watched.proposals if proposal.state == "pending")
        assert pending.created <= watched.now


def test_proposal_and_report_of_a_wrong_clock_are_replaced(watched: WatchedSystem) -> None:
    watched.add("3", MANY)
    for policy in ("ask", "start"):
        watched.now = NOON + timedelta(days=3650)
        watched.watcher(policy=policy).check()
        watched.now = NOON
        report = watched.watcher(policy=policy).check()
        if policy == "start":
            watched.runs.end(FIRST_RUN, State.FAILED)
            report = watched.watcher(policy=policy).check()
        assert report.proposal == watched.proposals[-1].id
        assert watched.proposals[-1].created == NOON
        assert watched.watcher().schedule.read().last == report
        for proposal in watched.proposals:
            watched.store.delete(f"triggers/requests/{proposal.id}.json")


def test_run_started_by_another_watcher_during_a_check_is_not_started_again(
    watched: WatchedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.add("3", MANY)
    first, second, list_runs = watched.watcher(policy="start"), watched.watcher(policy="start"), watched.runs.list

    def list_before_the_other_starts(pipeline: str) -> Sequence[Run]:
        monkeypatch.undo()
        runs = list_runs(pipeline)
        second.check()
        return runs

    monkeypatch.setattr(watched.runs, "list", list_before_the_other_starts)
    assert first.check().reasons[-1] == "Another watcher proposed it first."
    assert len(watched.proposals) == len(watched.runs.runs) == 1


def test_concurrent_watchers_start_one_run(watched: WatchedSystem) -> None:
    watched.add("3", MANY)
    watchers = [watched.watcher(policy="start") for _ in range(4)]
    barrier = threading.Barrier(len(watchers))
    raised: list[BaseException] = []

    def check(watcher: Watcher) -> None:
        try:
            barrier.wait()
            watcher.check()
        except BaseException as error:
            raised.append(error)

    for round_number in range(1, 4):
        threads = [threading.Thread(target=check, args=(watcher,)) for watcher in watchers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert raised == []
        assert len(watched.proposals) == len(watched.runs.runs) == round_number
        watched.runs.end(watched.runs.runs[-1].id, State.FAILED)
        watched.add("3", [noise(1000 + round_number)])
        watched.wait(hours=7)


@pytest.mark.parametrize("reason", ["gone", "overtaken"])
def test_pending_proposal_expires(watched: WatchedSystem, reason: str) -> None:
    watched.add("3", MANY)
    watched.watcher().check()
    (first,) = watched.proposals
    if reason == "gone":
        watched.remove_added()
    else:
        registry = Registry(watched.store)
        champion = registry.champion()
        assert champion is not None
        # The registry uses the machine's clock; the proposal uses the test's clock.
        RequestStore(watched.store).change(first, created=champion.promotion.since - timedelta(hours=1))
    report = watched.watcher().check()
    assert watched.proposals[0].state == "expired"
    if reason == "gone":
        assert len(watched.proposals) == 1
    else:
        assert report.proposal == watched.proposals[-1].id != first.id


def test_drift_is_tested_while_the_source_is_unavailable(watched: WatchedSystem) -> None:
    watched.ask(negatives(180))
    moved = watched.images.rename(watched.images.with_name("elsewhere"))
    try:
        report = watched.watcher(policy="start").check()
    finally:
        moved.rename(watched.images)
    assert report.faults == (f"The image directory {watched.images} does not exist.",)
    assert report.action == "retrain"
    assert [proposal.state for proposal in watched.proposals] == ["pending"], "the images to train on are unknown"


def test_missing_snapshot_is_reported(watched: WatchedSystem) -> None:
    for entry in list(watched.store.list("datasets/")):
        if "/manifests/" in entry.key:
            watched.store.delete(entry.key)
    report = watched.watcher().check()
    assert len(report.faults) == 1
    assert "New images cannot be counted: datasets/images/manifests/" in report.faults[0]
    assert report.action == "nothing"


def test_check_without_acting_changes_nothing(watched: WatchedSystem) -> None:
    watched.add("3", MANY)
    before = sorted(path for path in (watched.directory / "store").rglob("*"))
    report = watched.watcher().check(act=False)
    assert report.action == "retrain"
    assert sorted(path for path in (watched.directory / "store").rglob("*")) == before


@pytest.mark.slow
def test_query_logs_are_shipped_and_old_ones_removed(watched: WatchedSystem) -> None:
    waiting = logged_queries(home_of(watched.settings().workdir))
    waiting.mkdir(parents=True)
    old = f"{watched.now - timedelta(days=15):%Y%m%dT%H%M%SZ}-20260101.000000.12345678-host-1-aaaaaaaa.jsonl"
    new = f"{watched.now - timedelta(days=13):%Y%m%dT%H%M%SZ}-20260101.000000.12345678-host-1-bbbbbbbb.jsonl"
    for name in (old, new):
        (waiting / name).write_text("{}\n")
    for name, days in (("old", 15), ("new", 13)):
        key, at_s = f"{SUBMITTED}{name}.json", (watched.now - timedelta(days=days)).timestamp()
        watched.store.put(key, b"{}\n")
        os.utime(watched.store.path(key), (at_s, at_s))
    watched.watcher().check()
    assert list(waiting.iterdir()) == []
    watched.wait(hours=1)
    report = watched.watcher().check()
    assert [info.key.rpartition("/")[2] for info in watched.store.list("queries/")] == [new]
    assert [info.key for info in watched.store.list(SUBMITTED)] == [f"{SUBMITTED}new.json"]
    assert report.reasons[-1] == "Removed 1 old file of logged queries. Removed 1 old file sent to review."
    watched.wait(hours=1)
    assert "Removed" not in " ".join(watched.watcher().check().reasons)


def test_clock_that_jumps_ahead_removes_no_logged_queries(watched: WatchedSystem) -> None:
    names = [
        f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-20260101.000000.12345678-host-1-aaaaaaaa.jsonl"
        for at in (watched.now - timedelta(days=days) for days in (1, 13))
    ]
    for name in names:
        watched.store.put(name, b"{}\n")

    def left() -> list[str]:
        return sorted(info.key for info in watched.store.list("queries/"))

    watched.watcher().check()
    watched.wait(days=3650)
    warning = watched.watcher().check().reasons[-1]
    assert warning.startswith("The last check was at 2027-03-01 12:00 UTC. If this machine's clock is wrong, set it ")
    assert left() == sorted(names)
    watched.now = NOON + timedelta(hours=1)
    watched.watcher().check()
    assert left() == sorted(names), "the clock was set right"
    watched.wait(days=3650)
    watched.watcher().check()
    watched.wait(hours=1)
    assert watched.watcher().check().reasons[-1] == "Removed 2 old files of logged queries."
    assert left() == [], "the clock is right: nobody has used this store for ten years"


def test_watcher_works_with_a_bucket(watched: WatchedSystem, bucket: str) -> None:
    """The store is in S3, and two watchers use it."""
    store = open_store(f"s3://{bucket}/prod")
    for path in sorted((watched.directory / "store").rglob("*.*")):
        key = path.relative_to(watched.directory / "store").as_posix()
        if path.is_file() and "/shards/" not in key and not key.startswith("."):
            store.put(key, path)
    watched.add("3", MANY)
    watcher = Watcher(watched.settings(policy="start"), store, watched.runs, watched.directory, lambda: NOON)
    assert watcher.check().action == "retrain"
    (proposal,) = RequestStore(store).list()
    assert proposal.run == watched.runs.runs[0].id
    again = Watcher(watched.settings(policy="start"), store, watched.runs, watched.directory, lambda: NOON).check()
    assert again.proposal is None
    assert watcher.schedule.read().last == again
