"""A look from end to end: a real folder, a real champion, real logged answers; the pipeline server is in memory."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from releases import System, release_maker
from watched import NOON, MemoryRuns, World, digits, noise, png

from evernear.data.ingest import ingest
from evernear.data.manifest import Split, save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import Embeddings, embed
from evernear.errors import SettingsError, StoreError
from evernear.index.build import build
from evernear.kubeflow.runs import State
from evernear.release.registry import Registry
from evernear.serving.configuration import logged_queries
from evernear.serving.endpoints import home_of
from evernear.settings import IndexSettings
from evernear.store import open_store
from evernear.triggers.proposals import Proposals
from evernear.triggers.watch.watcher import Watcher

MANY = [noise(number) for number in range(400)]


def test_where_nothing_is_new_nothing_is_done(world: World) -> None:
    look = world.watcher().look()
    assert look.action == "nothing"
    assert look.faults == ()
    assert look.reasons[0] == "The source holds nothing new."
    assert look.figures["listed_files"] == 1617
    assert look.figures["trained_on"] == world.dataset().count("train")
    assert world.proposals == []


def test_many_new_images_are_proposed_once_and_a_restart_changes_nothing(world: World) -> None:
    world.add("3", MANY)
    look = world.watcher().look()
    assert look.action == "retrain"
    assert look.figures["new_train_images"] == pytest.approx(400 * 0.6)
    assert "About 240 new images for training" in look.reasons[0]
    (proposal,) = world.proposals
    assert (proposal.id, proposal.pipeline, proposal.state) == (look.proposal, "continuous-training", "open")
    assert proposal.figures == look.figures
    assert world.runs.runs == []
    for _ in range(3):
        again = world.watcher().look()
        assert (again.action, again.proposal) == ("retrain", None)
        assert again.reasons[-1] == f"Proposal {proposal.id} waits for an answer."
    assert world.proposals == [proposal]


def test_few_new_images_are_no_reason(world: World) -> None:
    world.add("3", MANY[:100])
    look = world.watcher().look()
    assert look.action == "nothing"
    assert look.reasons[0] == "The source holds 100 new files, too few to act on."


def test_a_declined_proposal_comes_back_after_the_cooldown_or_when_it_has_grown(world: World) -> None:
    world.add("3", MANY[:200])
    watch = {"cooldown_s": 6 * 3600, "new_train_images": 100, "new_gallery_images": 1000}
    world.watcher(**watch).look()
    (first,) = world.proposals
    Proposals(world.store).change(first, state="declined", answered_by="U1", answered=world.now)
    world.wait(hours=3)
    look = world.watcher(**watch).look()
    assert look.proposal is None
    assert look.reasons[-1].startswith(
        f"Proposal {first.id} was declined; the same is proposed again from 2027-03-01 18"
    )

    world.add("3", MANY[200:])  # twice as many
    look = world.watcher(**watch).look()
    assert look.proposal == world.proposals[-1].id != first.id
    Proposals(world.store).change(world.proposals[-1], state="declined", answered_by="U1", answered=world.now)

    world.wait(hours=5, minutes=59)
    assert world.watcher(**watch).look().proposal is None
    world.wait(minutes=1)
    assert world.watcher(**watch).look().proposal is not None
    assert len(world.proposals) == 3
    assert [proposal.id for proposal in world.proposals] == sorted(proposal.id for proposal in world.proposals)


def test_a_new_class_asks_for_a_new_index_once_it_has_images_enough(world: World) -> None:
    nines = digits(9)
    world.add("9", nines[:9])
    assert world.watcher().look().action == "nothing"
    world.add("9", nines[9:30])
    look = world.watcher().look()
    assert look.action == "reindex"
    assert look.reasons[0] == "A new class in the source: 9 (30 images)."
    assert world.proposals[0].pipeline == "reindex"


def test_a_training_indexes_too_so_it_is_proposed_where_both_are_called_for(world: World) -> None:
    world.add("9", digits(9))
    look = world.watcher(new_train_images=50).look()
    assert look.action == "retrain"
    assert look.figures["new_classes"] == 1


def test_what_a_network_was_trained_on_is_known_after_a_new_index(
    world: World, trained: tuple[Path, System], tmp_path: Path
) -> None:
    """A reindex moves the champion to a newer snapshot, and its network has still seen none of it."""
    _, system = trained
    world.add("3", MANY[:200])
    reindexed(world, system, tmp_path)
    look = world.watcher().look()
    assert look.figures["new_files"] == 0
    assert look.figures["new_gallery_images"] == 0
    assert look.figures["new_train_images"] == pytest.approx(200 * 0.6)
    assert look.figures["trained_on"] == system.dataset.count("train")
    assert look.action == "retrain"
    assert [reason for reason in look.reasons if "nothing new" in reason] == []
    world.add("3", MANY[200:])
    look = world.watcher().look()
    assert look.figures["new_gallery_images"] == pytest.approx(200 * 0.2)
    assert look.figures["new_train_images"] == pytest.approx(400 * 0.6)


def test_what_only_the_index_has_taken_in_is_trained_on_by_the_policy(
    world: World, trained: tuple[Path, System], tmp_path: Path
) -> None:
    _, system = trained
    world.add("3", MANY[:200])
    reindexed(world, system, tmp_path)
    world.watcher(policy="start").look()
    assert [run.pipeline for run in world.runs.runs] == ["continuous-training"]


def reindexed(world: World, system: System, directory: Path) -> None:
    """Make the champion one with the same network and an index over the source as it is now."""
    save_manifest(ingest(world.settings().data, world.store.uri), directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    embed(system.network_dir, dataset, directory / "embeddings")
    build(Embeddings.open(directory / "embeddings"), dataset.labels, IndexSettings(), directory / "index")
    registry = Registry(world.store)
    champion = registry.champion()
    assert champion is not None
    made = release_maker(System(dataset, system.network_dir, directory / "index"), lambda: directory / "release")
    (directory / "release").mkdir()
    release = made(parent=champion.version)
    registry.publish(release.archive)
    registry.set_champion(release.version, champion)


def test_live_queries_like_the_reference_are_no_drift(world: World) -> None:
    test = stored(world, "test")
    world.ask(test)
    look = world.watcher().look()
    assert look.action == "nothing"
    assert look.figures["queries"] == len(test)
    assert look.figures["drift_found"] == 0
    assert look.reasons[-1] == f"No drift in {len(test)} live queries."


def stored(world: World, split: Split) -> list[bytes]:
    return [png(image[:, :, 0]) for block in world.dataset().blocks(split) for image in block.images]


def test_drift_asks_for_a_training_and_says_what_drifted(world: World) -> None:
    world.add("9", digits(9)[:5])  # something to train on
    world.ask([*stored(world, "test")[:60], *digits(9)])
    look = world.watcher().look()
    assert look.action == "retrain"
    assert look.figures["drift_found"] >= 2
    assert look.figures["unknown_rise"] > 0.05
    assert "of the live queries are unknown" in look.reasons[0]
    assert not look.reasons[-1].startswith("But the source")


def test_too_few_old_or_anothers_queries_are_not_judged(world: World) -> None:
    world.ask(digits(9)[:39])
    assert world.watcher().look().reasons[-1] == "Only 39 live queries were sampled, too few to judge drift by."
    world.ask(digits(9)[:39])
    assert world.watcher().look().action == "retrain"
    world.wait(days=2)
    assert world.watcher().look().figures["queries"] == 0


def test_of_a_busy_and_a_quiet_period_every_query_counts_alike(world: World) -> None:
    """The sample of a period of 900 keeps 100 and that of one of 100 all: unthinned, the quiet one would weigh nine."""
    known, strange = stored(world, "train")[:100], digits(9)[:100]
    world.ask(known)
    world.wait(minutes=10)
    world.ask(strange * 9, per_file=900)
    look = world.watcher(min_queries=20).look()
    assert look.figures["queries"] == 1000
    assert look.figures["sampled_queries"] == pytest.approx(100 + 11, abs=2)


def test_damage_in_the_log_is_told_and_hides_nothing(world: World) -> None:
    world.ask(stored(world, "test"))
    at = world.now - timedelta(minutes=2)
    key = f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-{world.champion()}-host-1-12345678.jsonl"
    world.store.put(key, b"damage")
    look = world.watcher().look()
    assert len(look.faults) == 1
    assert key in look.faults[0]
    assert look.figures["drift_found"] == 0


def test_the_policy_starts_a_run_with_the_watched_source(world: World) -> None:
    world.add("3", MANY)
    look = world.watcher(policy="start").look()
    (proposal,), (run,) = world.proposals, world.runs.runs
    assert (proposal.state, proposal.run, run.key) == ("accepted", run.id, proposal.id)
    assert look.proposal == proposal.id
    assert run.pipeline == "continuous-training"
    assert run.parameters["source"] == f"folder:{world.images}"
    assert run.parameters["started_by"] == f"the watcher, proposal {proposal.id}"
    assert run.parameters["store"] == world.store.uri
    world.wait(hours=12)
    assert world.watcher(policy="start").look().reasons[-1] == f"Run {run.name} of continuous-training is running."
    assert len(world.runs.runs) == 1


def test_a_policy_that_starts_needs_a_server_to_start_on(world: World) -> None:
    with pytest.raises(SettingsError, match="needs a pipeline server"):
        Watcher(world.settings(policy="start"), world.store, None, world.directory)


def test_drift_without_anything_new_is_for_a_person_to_decide(world: World) -> None:
    world.ask(digits(9))
    look = world.watcher(policy="start").look()
    assert look.action == "retrain"
    assert [reason.startswith("But the source holds nothing new") for reason in look.reasons].count(True) == 1
    assert look.reasons[-1].startswith("But the source holds nothing new")
    assert [proposal.state for proposal in world.proposals] == ["open"]
    assert world.runs.runs == []


@pytest.mark.parametrize("fault", ["down", "answer lost"])
def test_a_run_that_could_not_be_started_is_started_by_the_next_look(world: World, fault: str) -> None:
    world.add("3", MANY)
    if fault == "answer lost":
        world.runs.lost_answers = 1
        look = world.watcher(policy="start").look()
        assert look.faults == ("KFP broke off.",)
        (proposal,) = world.proposals
        assert (proposal.state, proposal.run) == ("accepted", None)
    else:
        world.runs.down = True
        look = world.watcher(policy="start").look()
        assert look.faults == ("KFP cannot be reached.",)
        assert world.proposals == [], "it is not known whether a run is under way"
        world.runs.down = False
    world.wait(hours=1)
    world.watcher(policy="start").look()
    (proposal,), (run,) = world.proposals, world.runs.runs
    assert (proposal.run, run.key) == (run.id, proposal.id)


def test_a_run_that_somebody_else_started_holds_the_watcher_back(world: World) -> None:
    world.add("3", MANY)
    run = world.runs.start("continuous-training", {}, "by hand")
    look = world.watcher().look()
    assert look.reasons[-1] == f"Run {run.name} of continuous-training is running."
    assert world.proposals == []
    for number in range(60):  # others use this server too
        world.runs.end(world.runs.start("translation", {}, f"theirs {number}").id)
    assert world.watcher().look().proposal is None
    world.runs.end(run.id, State.FAILED)
    assert world.watcher().look().proposal is not None


def test_what_the_gate_held_is_not_trained_again_until_there_is_more(world: World) -> None:
    world.add("3", MANY[:250])
    world.watcher(policy="start").look()
    (run,) = world.runs.runs
    world.runs.end(run.id)
    world.told_outcome(run.id, "held")
    world.wait(days=3)
    look = world.watcher(policy="start").look()
    assert look.reasons[-1].startswith(f"The run of proposal {world.proposals[0].id} was held by the gate")
    world.add("3", MANY[250:])
    world.watcher(policy="start", new_train_images=90).look()
    assert len(world.runs.runs) == 2


def test_a_run_that_failed_is_proposed_again_after_the_cooldown(world: World) -> None:
    world.add("3", MANY)
    world.watcher(policy="start").look()
    world.runs.end("run-1", State.FAILED)
    world.told_outcome("run-1", "failed")
    assert "was accepted; the same is proposed again from" in world.watcher(policy="start").look().reasons[-1]
    world.wait(hours=6)
    world.watcher(policy="start").look()
    assert [run.id for run in world.runs.runs] == ["run-1", "run-2"]


def test_watchers_at_once_propose_and_start_once(world: World) -> None:
    world.add("3", MANY)
    watchers = [world.watcher(policy="start") for _ in range(4)]
    barrier = threading.Barrier(len(watchers))
    raised: list[BaseException] = []

    def look(watcher: Watcher) -> None:
        try:
            barrier.wait()
            watcher.look()
        except BaseException as error:
            raised.append(error)

    for round_number in range(1, 4):
        threads = [threading.Thread(target=look, args=(watcher,)) for watcher in watchers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert raised == []
        assert len(world.proposals) == len(world.runs.runs) == round_number
        world.runs.end(world.runs.runs[-1].id, State.FAILED)
        world.wait(hours=7)


@pytest.mark.parametrize("why", ["late", "gone", "overtaken"])
def test_an_open_proposal_expires(world: World, why: str) -> None:
    world.add("3", MANY)
    world.watcher().look()
    (first,) = world.proposals
    if why == "late":
        world.wait(hours=6)
    elif why == "gone":
        world.remove_added()
    else:
        registry = Registry(world.store)
        champion = registry.champion()
        assert champion is not None
        # The registry has the machine's clock, and the proposal was made at the test's.
        Proposals(world.store).change(first, created=champion.promotion.since - timedelta(hours=1))
    look = world.watcher().look()
    assert world.proposals[0].state == "expired"
    if why == "gone":
        assert len(world.proposals) == 1
    else:
        assert look.proposal == world.proposals[-1].id != first.id


def test_without_a_release_a_first_one_is_proposed(world: World) -> None:
    world.store.delete("releases/champion.json")
    look = world.watcher().look()
    assert look.action == "retrain"
    assert look.reasons == ("There is no release yet, and the source holds 1,617 images.",)


def test_a_source_that_fails_is_told_and_drift_is_judged_nevertheless(world: World) -> None:
    world.ask(digits(9))
    moved = world.images.rename(world.images.with_name("elsewhere"))
    try:
        look = world.watcher(policy="start").look()
    finally:
        moved.rename(world.images)
    assert look.faults == (f"There is no directory {world.images} to read images from.",)
    assert look.action == "retrain"
    assert [proposal.state for proposal in world.proposals] == ["open"], "nobody knows what it would train on"


def test_a_snapshot_that_is_gone_is_told(world: World) -> None:
    for found in list(world.store.list("datasets/")):
        if "/manifests/" in found.key:
            world.store.delete(found.key)
    look = world.watcher().look()
    assert len(look.faults) == 1
    assert "What is new cannot be told: the store no longer has datasets/images/manifests/" in look.faults[0]
    assert look.action == "nothing"


def test_a_store_that_fails_fails_the_look(world: World) -> None:
    (world.directory / "store").rename(world.directory / "gone")
    (world.directory / "store").write_text("in the way")
    with pytest.raises(StoreError):
        world.watcher().look()


def test_looking_without_acting_changes_nothing(world: World) -> None:
    world.add("3", MANY)
    before = sorted(path for path in (world.directory / "store").rglob("*"))
    look = world.watcher().look(act=False)
    assert look.action == "retrain"
    assert sorted(path for path in (world.directory / "store").rglob("*")) == before


def test_without_a_pipeline_server_proposals_are_written_down(world: World) -> None:
    world.add("3", MANY)
    watcher = Watcher(world.settings(), world.store, None, world.directory, lambda: NOON)
    assert watcher.look().proposal == world.proposals[0].id


def test_it_ships_what_a_server_of_this_machine_logged_and_removes_what_is_old(world: World) -> None:
    waiting = logged_queries(home_of(world.settings().workdir))
    waiting.mkdir(parents=True)
    old = f"{world.now - timedelta(days=15):%Y%m%dT%H%M%SZ}-20260101.000000.12345678-host-1-aaaaaaaa.jsonl"
    new = f"{world.now - timedelta(days=13):%Y%m%dT%H%M%SZ}-20260101.000000.12345678-host-1-bbbbbbbb.jsonl"
    for name in (old, new):
        (waiting / name).write_text("{}\n")
    world.watcher().look()
    assert list(waiting.iterdir()) == []
    assert [info.key.rpartition("/")[2] for info in world.store.list("queries/")] == [new]


def test_everything_works_in_a_bucket(world: World, bucket: str) -> None:
    """The store and the watcher's own objects in S3, and two watchers of it."""
    there = open_store(f"s3://{bucket}/prod")
    for path in sorted((world.directory / "store").rglob("*.*")):
        key = path.relative_to(world.directory / "store").as_posix()
        if path.is_file() and "/shards/" not in key and not key.startswith("."):
            there.put(key, path)
    world.add("3", MANY)
    watcher = Watcher(world.settings(policy="start"), there, world.runs, world.directory, lambda: NOON)
    assert watcher.look().action == "retrain"
    (proposal,) = Proposals(there).list()
    assert proposal.run == world.runs.runs[0].id
    again = Watcher(world.settings(policy="start"), there, world.runs, world.directory, lambda: NOON).look()
    assert again.proposal is None
    assert watcher.switch.read().last == again


def test_runs_in_memory_keep_their_promise() -> None:
    runs = MemoryRuns()
    assert runs.start("reindex", {}, "k") == runs.start("reindex", {}, "k")
