"""Checks from end to end: a real folder, a real champion, real query logs; the pipeline server is in memory."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from releases import System, release_maker
from watched import NOON, MemoryRuns, World, digits, noise, png

from evernear.data.ingest import ingest
from evernear.data.manifest import Split, save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed
from evernear.embedding.embeddings import Embeddings
from evernear.errors import SettingsError, StoreError
from evernear.index.build import build
from evernear.kubeflow.runs import State
from evernear.release.registry import Registry
from evernear.serving.configuration import logged_queries
from evernear.serving.endpoints import home_of
from evernear.settings import DataSettings, IndexSettings, Settings
from evernear.store import open_store
from evernear.triggers.requests import Person, RequestStore
from evernear.triggers.watch.watcher import Watcher

MANY = [noise(number) for number in range(400)]


def test_unchanged_source_leads_to_nothing(world: World) -> None:
    report = world.watcher().check()
    assert report.action == "nothing"
    assert report.faults == ()
    assert report.reasons[0] == "Nothing is new."
    assert report.figures["listed_files"] == 1617
    assert report.figures["trained_on"] == world.dataset().count("train")
    assert world.proposals == []


def test_many_new_images_are_proposed_once_across_restarts(world: World) -> None:
    world.add("3", MANY)
    report = world.watcher().check()
    assert report.action == "retrain"
    assert report.figures["new_train_images"] == pytest.approx(400 * 0.6)
    assert "About 240 new training images" in report.reasons[0]
    (proposal,) = world.proposals
    assert (proposal.id, proposal.pipeline, proposal.state) == (report.proposal, "continuous-training", "pending")
    assert proposal.figures == report.figures
    assert world.runs.runs == []
    for _ in range(3):
        again = world.watcher().check()
        assert (again.action, again.proposal) == ("retrain", None)
        assert again.reasons[-1] == f"Proposal {proposal.id} waits for an answer."
    assert world.proposals == [proposal]


def test_few_new_images_lead_to_nothing(world: World) -> None:
    world.add("3", MANY[:100])
    report = world.watcher().check()
    assert report.action == "nothing"
    assert report.reasons[0] == "The source has 100 new files, below the thresholds."


def test_declined_proposal_is_repeated_after_the_cooldown_or_growth(world: World) -> None:
    world.add("3", MANY[:200])
    watch = {"cooldown_s": 6 * 3600, "new_train_images": 100, "new_gallery_images": 1000}
    world.watcher(**watch).check()
    (first,) = world.proposals
    RequestStore(world.store).change(first, state="declined", answered_by=Person(id="U1"), answered=world.now)
    world.wait(hours=3)
    report = world.watcher(**watch).check()
    assert report.proposal is None
    assert report.reasons[-1].startswith(
        f"Proposal {first.id} was declined; it may be proposed again after 2027-03-01 18"
    )

    world.add("3", MANY[200:])  # twice as many
    report = world.watcher(**watch).check()
    assert report.proposal == world.proposals[-1].id != first.id
    RequestStore(world.store).change(
        world.proposals[-1], state="declined", answered_by=Person(id="U1"), answered=world.now
    )

    world.wait(hours=5, minutes=59)
    assert world.watcher(**watch).check().proposal is None
    world.wait(minutes=1)
    assert world.watcher(**watch).check().proposal is not None
    assert len(world.proposals) == 3
    assert [proposal.id for proposal in world.proposals] == sorted(proposal.id for proposal in world.proposals)


def test_new_class_with_enough_images_leads_to_a_reindex(world: World) -> None:
    nines = digits(9)
    world.add("9", nines[:9])
    assert world.watcher().check().action == "nothing"
    world.add("9", nines[9:30])
    report = world.watcher().check()
    assert report.action == "reindex"
    assert report.reasons[0] == "A new class in the source: 9 (30 images)."
    assert world.proposals[0].pipeline == "reindex"


def test_training_takes_precedence_over_a_reindex(world: World) -> None:
    world.add("9", digits(9))
    report = world.watcher(new_train_images=50).check()
    assert report.action == "retrain"
    assert report.figures["new_classes"] == 1


def test_training_images_are_counted_since_the_training_after_a_reindex(
    world: World, trained: tuple[Path, System], tmp_path: Path
) -> None:
    """A reindex moves the champion to a newer snapshot, which its network has not seen."""
    _, system = trained
    world.add("3", MANY[:200])
    reindexed(world, system, tmp_path)
    report = world.watcher().check()
    assert report.figures["new_files"] == 0
    assert report.figures["new_gallery_images"] == 0
    assert report.figures["new_train_images"] == pytest.approx(200 * 0.6)
    assert report.figures["trained_on"] == system.dataset.count("train")
    assert report.action == "retrain"
    assert [reason for reason in report.reasons if "nothing new" in reason] == []
    world.add("3", MANY[200:])
    report = world.watcher().check()
    assert report.figures["new_gallery_images"] == pytest.approx(200 * 0.2)
    assert report.figures["new_train_images"] == pytest.approx(400 * 0.6)


def test_policy_trains_on_images_that_were_only_indexed(
    world: World, trained: tuple[Path, System], tmp_path: Path
) -> None:
    _, system = trained
    world.add("3", MANY[:200])
    reindexed(world, system, tmp_path)
    world.watcher(policy="start").check()
    assert [run.pipeline for run in world.runs.runs] == ["continuous-training"]


def reindexed(world: World, system: System, directory: Path) -> None:
    """Promote a release with the same network and an index over the current source."""
    save_manifest(ingest(world.settings().data, world.store.uri), directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    embed(system.network_dir, dataset, directory / "embeddings")
    build(Embeddings.open(directory / "embeddings"), dataset.labels, IndexSettings(), directory / "index")
    registry = Registry(world.store)
    champion = registry.champion()
    assert champion is not None
    make_release = release_maker(
        System(dataset, system.network_dir, directory / "index"), lambda: directory / "release"
    )
    (directory / "release").mkdir()
    release = make_release(parent=champion.version)
    registry.publish(release.archive)
    registry.set_champion(release.version, champion)


def test_queries_like_the_reference_are_no_drift(world: World) -> None:
    test = stored(world, "test")
    world.ask(test)
    report = world.watcher().check()
    assert report.action == "nothing"
    assert report.figures["queries"] == len(test)
    assert report.figures["drift_found"] == 0
    assert report.reasons[-1] == f"No drift in {len(test)} live queries."


def stored(world: World, split: Split) -> list[bytes]:
    return [png(image[:, :, 0]) for block in world.dataset().blocks(split) for image in block.images]


def test_drift_leads_to_a_training(world: World) -> None:
    world.add("9", digits(9)[:5])  # something to train on
    world.ask([*stored(world, "test")[:60], *digits(9)])
    report = world.watcher().check()
    assert report.action == "retrain"
    assert report.figures["drift_found"] >= 2
    assert report.figures["unknown_rise"] > 0.05
    assert "Distances to the gallery have shifted" in report.reasons[0]
    assert not report.reasons[-1].startswith("But the source")


def test_too_few_and_old_queries_are_not_tested(world: World) -> None:
    world.ask(digits(9)[:39])
    assert world.watcher().check().reasons[-1] == "Only 39 live queries were sampled, too few to test for drift."
    world.ask(digits(9)[:39])
    assert world.watcher().check().action == "retrain"
    world.wait(days=2)
    assert world.watcher().check().figures["queries"] == 0


def test_queries_of_busy_and_quiet_periods_have_equal_weight(world: World) -> None:
    """The sample of a period of 900 keeps 100 and that of one of 100 all: unthinned, the quiet one would weigh nine."""
    known, strange = stored(world, "train")[:100], digits(9)[:100]
    world.ask(known)
    world.wait(minutes=10)
    world.ask(strange * 9, per_file=900)
    report = world.watcher(min_queries=20).check()
    assert report.figures["queries"] == 1000
    assert report.figures["sampled_queries"] == pytest.approx(100 + 11, abs=2)


def test_damaged_query_log_is_reported(world: World) -> None:
    world.ask(stored(world, "test"))
    at = world.now - timedelta(minutes=2)
    key = f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-{world.champion()}-host-1-12345678.jsonl"
    world.store.put(key, b"damage")
    report = world.watcher().check()
    assert len(report.faults) == 1
    assert key in report.faults[0]
    assert report.figures["drift_found"] == 0


def test_policy_starts_a_run_with_the_watched_source(world: World) -> None:
    world.add("3", MANY)
    report = world.watcher(policy="start").check()
    (proposal,), (run,) = world.proposals, world.runs.runs
    assert (proposal.state, proposal.run, run.key) == ("started", run.id, proposal.id)
    assert report.proposal == proposal.id
    assert run.pipeline == "continuous-training"
    assert run.parameters["source"] == f"folder:{world.images}"
    assert run.parameters["started_by"] == f"the watcher, proposal {proposal.id}"
    assert run.parameters["store"] == world.store.uri
    world.wait(hours=12)
    assert world.watcher(policy="start").check().reasons[-1] == f"Run {run.name} of continuous-training is running."
    assert len(world.runs.runs) == 1


def test_source_of_the_champion_is_watched_unless_the_settings_name_one(world: World) -> None:
    world.add("3", MANY)
    settings = world.settings(policy="start")
    fractions = settings.data.model_dump(include={"gallery_fraction", "query_fraction"})

    def watcher(**data: object) -> Watcher:
        chosen = settings.model_copy(update={"data": DataSettings.model_validate(fractions | data)})
        return Watcher(chosen, world.store, world.runs, world.directory, lambda: world.now)

    report = watcher().check()
    assert report.source == watcher().source() == f"folder:{world.images}"
    assert report.figures["new_files"] == len(MANY)
    assert world.runs.runs[0].parameters["source"] == f"folder:{world.images}"
    report = watcher(source="digits").check(act=False)
    assert (report.source, report.figures["listed_files"]) == ("digits", 1797)


def test_settings_decide_what_to_watch_before_the_first_release(world: World, tmp_path: Path) -> None:
    store = open_store((tmp_path / "empty").as_uri())
    watcher = Watcher(Settings(store=store.uri), store, None, tmp_path)
    report = watcher.check(act=False)
    assert report.source == watcher.source() == "digits"
    assert report.reasons == (
        "No release has been promoted yet, and digits has 1,797 images.",
        "digits is the default; set data.source to watch another source.",
    )


def test_policy_start_needs_a_pipeline_server(world: World) -> None:
    with pytest.raises(SettingsError, match="needs a pipeline server"):
        Watcher(world.settings(policy="start"), world.store, None, world.directory)


def test_drift_without_new_images_needs_a_person(world: World) -> None:
    world.ask(digits(9))
    report = world.watcher(policy="start").check()
    assert report.action == "retrain"
    assert [reason.startswith("But the source has nothing new") for reason in report.reasons].count(True) == 1
    assert report.reasons[-1].startswith("But the source has nothing new")
    assert [proposal.state for proposal in world.proposals] == ["pending"]
    assert world.runs.runs == []


@pytest.mark.parametrize("fault", ["down", "answer lost"])
def test_failed_start_is_repeated_by_the_next_check(world: World, fault: str) -> None:
    world.add("3", MANY)
    if fault == "answer lost":
        world.runs.lost_answers = 1
        report = world.watcher(policy="start").check()
        assert report.faults == ("KFP broke off.",)
        (proposal,) = world.proposals
        assert (proposal.state, proposal.run) == ("accepted", "")
    else:
        world.runs.down = True
        report = world.watcher(policy="start").check()
        assert report.faults == ("KFP cannot be reached.",)
        assert world.proposals == [], "active runs are unknown"
        world.runs.down = False
    world.wait(hours=1)
    world.watcher(policy="start").check()
    (proposal,), (run,) = world.proposals, world.runs.runs
    assert (proposal.run, run.key) == (run.id, proposal.id)


def test_active_run_of_others_holds_a_proposal_back(world: World) -> None:
    world.add("3", MANY)
    run = world.runs.start("continuous-training", {}, "by hand")
    report = world.watcher().check()
    assert report.reasons[-1] == f"Run {run.name} of continuous-training is running."
    assert world.proposals == []
    for number in range(60):  # others use this server too
        world.runs.end(world.runs.start("translation", {}, f"theirs {number}").id)
    assert world.watcher().check().proposal is None
    world.runs.end(run.id, State.FAILED)
    assert world.watcher().check().proposal is not None


def test_held_training_is_not_repeated_without_more_images(world: World) -> None:
    world.add("3", MANY[:250])
    world.watcher(policy="start").check()
    (run,) = world.runs.runs
    world.runs.end(run.id)
    world.save_outcome(run.id, "held")
    world.wait(days=3)
    report = world.watcher(policy="start").check()
    assert report.reasons[-1].startswith(f"The gate held the run of proposal {world.proposals[0].id}")
    world.add("3", MANY[250:])
    world.watcher(policy="start", new_train_images=90).check()
    assert len(world.runs.runs) == 2


def test_failed_run_is_repeated_after_the_cooldown(world: World) -> None:
    world.add("3", MANY)
    world.watcher(policy="start").check()
    world.runs.end("run-1", State.FAILED)
    world.save_outcome("run-1", "failed")
    assert "was started; it may be proposed again after" in world.watcher(policy="start").check().reasons[-1]
    world.wait(hours=6)
    world.watcher(policy="start").check()
    assert [run.id for run in world.runs.runs] == ["run-1", "run-2"]


def test_concurrent_watchers_start_one_run(world: World) -> None:
    world.add("3", MANY)
    watchers = [world.watcher(policy="start") for _ in range(4)]
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
        assert len(world.proposals) == len(world.runs.runs) == round_number
        world.runs.end(world.runs.runs[-1].id, State.FAILED)
        world.wait(hours=7)


@pytest.mark.parametrize("reason", ["late", "gone", "overtaken"])
def test_pending_proposal_expires(world: World, reason: str) -> None:
    world.add("3", MANY)
    world.watcher().check()
    (first,) = world.proposals
    if reason == "late":
        world.wait(hours=6)
    elif reason == "gone":
        world.remove_added()
    else:
        registry = Registry(world.store)
        champion = registry.champion()
        assert champion is not None
        # The registry uses the machine's clock, and the proposal the test's.
        RequestStore(world.store).change(first, created=champion.promotion.since - timedelta(hours=1))
    report = world.watcher().check()
    assert world.proposals[0].state == "expired"
    if reason == "gone":
        assert len(world.proposals) == 1
    else:
        assert report.proposal == world.proposals[-1].id != first.id


def test_first_release_is_proposed(world: World) -> None:
    world.store.delete("releases/champion.json")
    report = world.watcher().check()
    assert report.action == "retrain"
    assert report.reasons == (f"No release has been promoted yet, and folder:{world.images} has 1,617 images.",)


def test_drift_is_tested_while_the_source_is_unavailable(world: World) -> None:
    world.ask(digits(9))
    moved = world.images.rename(world.images.with_name("elsewhere"))
    try:
        report = world.watcher(policy="start").check()
    finally:
        moved.rename(world.images)
    assert report.faults == (f"There is no directory {world.images} to read images from.",)
    assert report.action == "retrain"
    assert [proposal.state for proposal in world.proposals] == ["pending"], "the images to train on are unknown"


def test_missing_snapshot_is_reported(world: World) -> None:
    for entry in list(world.store.list("datasets/")):
        if "/manifests/" in entry.key:
            world.store.delete(entry.key)
    report = world.watcher().check()
    assert len(report.faults) == 1
    assert "New images cannot be counted: datasets/images/manifests/" in report.faults[0]
    assert report.action == "nothing"


def test_unavailable_store_fails_the_check(world: World) -> None:
    (world.directory / "store").rename(world.directory / "gone")
    (world.directory / "store").write_text("in the way")
    with pytest.raises(StoreError):
        world.watcher().check()


def test_check_without_acting_changes_nothing(world: World) -> None:
    world.add("3", MANY)
    before = sorted(path for path in (world.directory / "store").rglob("*"))
    report = world.watcher().check(act=False)
    assert report.action == "retrain"
    assert sorted(path for path in (world.directory / "store").rglob("*")) == before


def test_proposals_are_stored_without_a_pipeline_server(world: World) -> None:
    world.add("3", MANY)
    watcher = Watcher(world.settings(), world.store, None, world.directory, lambda: NOON)
    assert watcher.check().proposal == world.proposals[0].id


def test_query_logs_are_shipped_and_old_ones_removed(world: World) -> None:
    waiting = logged_queries(home_of(world.settings().workdir))
    waiting.mkdir(parents=True)
    old = f"{world.now - timedelta(days=15):%Y%m%dT%H%M%SZ}-20260101.000000.12345678-host-1-aaaaaaaa.jsonl"
    new = f"{world.now - timedelta(days=13):%Y%m%dT%H%M%SZ}-20260101.000000.12345678-host-1-bbbbbbbb.jsonl"
    for name in (old, new):
        (waiting / name).write_text("{}\n")
    world.watcher().check()
    assert list(waiting.iterdir()) == []
    assert [info.key.rpartition("/")[2] for info in world.store.list("queries/")] == [new]


def test_watcher_works_with_a_bucket(world: World, bucket: str) -> None:
    """The store is in S3, and two watchers use it."""
    there = open_store(f"s3://{bucket}/prod")
    for path in sorted((world.directory / "store").rglob("*.*")):
        key = path.relative_to(world.directory / "store").as_posix()
        if path.is_file() and "/shards/" not in key and not key.startswith("."):
            there.put(key, path)
    world.add("3", MANY)
    watcher = Watcher(world.settings(policy="start"), there, world.runs, world.directory, lambda: NOON)
    assert watcher.check().action == "retrain"
    (proposal,) = RequestStore(there).list()
    assert proposal.run == world.runs.runs[0].id
    again = Watcher(world.settings(policy="start"), there, world.runs, world.directory, lambda: NOON).check()
    assert again.proposal is None
    assert watcher.schedule.read().last == again


def test_runs_in_memory_start_once_per_key() -> None:
    runs = MemoryRuns()
    assert runs.start("reindex", {}, "k") == runs.start("reindex", {}, "k")
