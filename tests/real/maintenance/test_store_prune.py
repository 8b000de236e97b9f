"""Pruning deletes what nothing needs, and nothing else, beside runs and if interrupted."""

import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from evernear.common.lease import KEY, Lease, StoreRecord
from evernear.common.outputs import MARKER
from evernear.common.progress import step
from evernear.common.run_record import RunRecord, StepRecord, this_host
from evernear.common.store import FileStore, Store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest, manifest_key
from evernear.data.shards import Dataset
from evernear.data.tables import table_key
from evernear.errors import BusyError, ConflictError
from evernear.maintenance import prune as store_prune
from evernear.maintenance.check import check_store
from evernear.maintenance.prune import prune_store, surplus
from evernear.maintenance.references import references
from evernear.release.registry import Registry
from evernear.settings import DataSettings
from tests.command_line import evernear
from tests.real.maintenance.conftest import publish, write_images
from tests.releases import MakeRelease, System


@pytest.fixture
def file_store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.fixture
def growing_source(tmp_path: Path) -> DataSettings:
    return DataSettings(source=f"folder:{tmp_path / 'images'}")


def folder_of(settings: DataSettings) -> Path:
    return Path(settings.source.removeprefix("folder:"))


def ingest_three(settings: DataSettings, store: Store) -> list[Manifest]:
    """Three snapshots: images were added, then most of them removed."""
    snapshots: list[Manifest] = []
    for count, seed in ((12, 0), (12, 1)):
        write_images(folder_of(settings), count, seed)
        snapshots.append(ingest_source(settings, store.uri))
    for path in folder_of(settings).glob("*/1-*.png"):
        path.unlink()
    write_images(folder_of(settings), 4, 2)
    return [*snapshots, ingest_source(settings, store.uri)]


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list("") if info.key not in (KEY, MARKER)}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def needed(store: Store) -> set[str]:
    return {reference.key for reference in references(store)}


def test_snapshots_that_nothing_names_are_deleted(store: Store, growing_source: DataSettings) -> None:
    first, second, third = ingest_three(growing_source, store)
    before = {info.key: info.size_bytes for info in store.list("") if info.key != MARKER}
    planned = surplus(store, 1)
    assert keys(store) == set(before)
    assert prune_store(store, 1) == planned
    going = {key for group in planned.surplus for key in group.keys}
    assert {manifest_key("images", first.digest), manifest_key("images", second.digest)} <= going
    assert keys(store) == set(before) - going == needed(store)
    assert planned.size_bytes == sum(before[key] for key in going) > 0
    assert check_store(store) == []
    assert sum(len(block) for block in Dataset(third, store).blocks("train")) == third.count("train")
    assert ingest_source(growing_source, store.uri).digest == third.digest
    assert prune_store(store, 1).surplus == ()


def test_remaining_releases_keep_what_they_need(store: Store, system: System, make_release: MakeRelease) -> None:
    made = publish(store, system, [make_release() for _ in range(3)])
    name, digest = system.dataset.manifest.name, system.dataset.manifest.digest
    identity = made[0].manifest.network_identity
    for key in (f"embeddings/{identity}/{'0' * 64}.npy", f"embeddings/{'1' * 64}/x.npy", "checkpoints/old/state.pt"):
        store.put(key, b"x")
    for release in made:
        RunRecord(store, f"run-{release.version}").save(archived={"version": release.version})
    store.put(f"runs/starting/{'2' * 32}", b"x")
    store.put("triggers/audit/2026-01-01/x.json", b"x")
    store.put("review/answers.jsonl", b"x")
    pruning = prune_store(store, 1)
    assert pruning.releases == (made[1].version,)
    assert [*Registry(store).list()] == [made[0].version, made[2].version]
    assert {key for key in keys(store) if key.startswith("embeddings/")} == set()
    assert {key for key in keys(store) if key.startswith("runs/")} == {
        f"runs/run-{made[0].version}/archived.json",
        f"runs/run-{made[2].version}/archived.json",
        f"runs/starting/{'2' * 32}",
    }
    assert store.find(manifest_key(name, digest))
    assert store.find("triggers/audit/2026-01-01/x.json")
    assert store.find("review/answers.jsonl")
    assert check_store(store) == []


def test_embeddings_of_images_of_the_newest_snapshot_stay(file_store, system, make_release) -> None:
    """So do their views."""
    (release,) = publish(file_store, system, [make_release()])
    digest = next(iter(system.dataset.blocks("gallery"))).digests[0].tobytes().hex()
    names = f"{digest}.npy", f"mirror/{digest}.npy", f"mirror/{'0' * 64}.npy"
    embeddings = f"embeddings/{release.manifest.network_identity}/"
    for name in names:
        file_store.put(f"{embeddings}{name}", b"x")
    prune_store(file_store, 1)
    assert {key.removeprefix(embeddings) for key in keys(file_store) if key.startswith(embeddings)} == {*names[:2]}


def age(folder: FileStore, key: str, by: timedelta) -> None:
    at = (datetime.now(UTC) - by).timestamp()
    os.utime(folder.path(key), (at, at))


def test_checkpoints_weights_and_parts_go_after_their_run(file_store, system, make_release) -> None:
    """What is newer than the last release may be of a run in progress, for a week."""
    earlier = ["checkpoints/finished/state.pt", f"weights/{'0' * 64}.pth"]
    earlier += ["parts/ended/embed-0/parts.json", "parts/ended/embed-0/x.npy", "parts/late/embed-0/parts.json"]
    later = ["checkpoints/interrupted/state.pt", f"weights/{'1' * 64}.pth"]
    later += ["parts/late/embed-0/results/000000", "parts/new/embed-0/parts.json"]
    old = ["checkpoints/given-up/state.pt", "parts/given-up/embed-0/parts.json"]
    for key in earlier:
        file_store.put(key, b"x")
    publish(file_store, system, [make_release()])
    for key in (*later, *old):
        file_store.put(key, b"x")
    for key in old:
        age(file_store, key, timedelta(days=8))
    prune_store(file_store, 1)
    left = {key for key in keys(file_store) if key.startswith(("checkpoints/", "weights/", "parts/"))}
    assert left == {*later, "parts/late/embed-0/parts.json"}
    assert not (file_store.root / "checkpoints" / "finished").exists()


def test_archive_of_a_killed_publish_goes_after_a_while(file_store: FileStore) -> None:
    file_store.put("releases/archives/new.mar", b"x")
    file_store.put("releases/archives/old.mar", b"x")
    age(file_store, "releases/archives/old.mar", timedelta(hours=2))
    prune_store(file_store, 1)
    assert keys(file_store) == {"releases/archives/new.mar"}


@pytest.mark.parametrize("damage", ["head.json", "manifest"])
def test_all_of_a_dataset_stays_while_a_document_is_damaged(file_store, growing_source, damage) -> None:
    *_, newest = ingest_three(growing_source, file_store)
    file_store.put("datasets/images/head.json" if damage == "head.json" else manifest_key("images", newest.digest), b"")
    before = keys(file_store)
    (sentence,) = prune_store(file_store, 1).kept
    assert "datasets/images/" in sentence
    assert keys(file_store) == before


def test_damaged_record_keeps_everything_that_it_may_need(file_store, growing_source, system, make_release) -> None:
    made = publish(file_store, system, [make_release() for _ in range(3)])
    ingest_three(growing_source, file_store)
    file_store.put(f"releases/manifests/{made[2].version}.json", b"{")
    before = {key for key in keys(file_store) if key.startswith("datasets/")}
    pruning = prune_store(file_store, 1)
    assert {key for key in keys(file_store) if key.startswith("datasets/")} == before
    assert pruning.releases == ()
    assert pruning.kept


@pytest.mark.slow
@pytest.mark.parametrize("deletions", [0, 1, 3, 5, 7])
def test_interrupted_prune_loses_nothing(file_store, growing_source, system, make_release, deletions) -> None:
    made = publish(file_store, system, [make_release() for _ in range(3)])
    ingest_three(growing_source, file_store)
    file_store.put("checkpoints/old/state.pt", b"x")
    left, delete = iter(range(deletions)), FileStore.delete

    def delete_some(store: FileStore, key: str) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        delete(store, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStore, "delete", delete_some)
        with pytest.raises(KeyboardInterrupt):
            prune_store(file_store, 1)
    assert check_store(file_store) == []
    prune_store(file_store, 1)
    assert check_store(file_store) == []
    assert {key for key in keys(file_store) if key.startswith("datasets/")} <= needed(file_store)
    assert [*Registry(file_store).list()] == [made[0].version, made[2].version]


@pytest.mark.slow
def test_unfinished_ingest_stays_until_another_one_finishes(file_store, growing_source, monkeypatch) -> None:
    ingest_three(growing_source, file_store)
    write_images(folder_of(growing_source), 6, seed=3)
    with pytest.MonkeyPatch.context() as killing:
        killing.setattr("evernear.data.snapshots.Snapshots.publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ingest_source(growing_source, file_store.uri)
    unfinished = {key for key in keys(file_store) if key.startswith("datasets/images/parts/")}
    assert unfinished
    prune_store(file_store, 1)
    assert unfinished <= keys(file_store)
    assert check_store(file_store) == []
    ingest_source(growing_source, file_store.uri)
    prune_store(file_store, 1)
    assert keys(file_store) == needed(file_store)


def test_prune_refuses_while_a_step_runs(file_store: FileStore, growing_source: DataSettings) -> None:
    ingest_three(growing_source, file_store)
    before = keys(file_store)
    refused = pytest.raises(BusyError, match=r"Run run-1 is in progress.*`evernear store prune --ended run-1`")
    with step("train", "run-1", file_store.uri), refused:
        prune_store(file_store, 1)
    assert before <= keys(file_store)
    assert prune_store(file_store, 1).surplus


@pytest.mark.parametrize(
    ("step_name", "state", "host", "alive", "is_active"),
    [
        ("train", "running", "here", True, True),
        ("train", "running", "here", False, False),
        ("train", "finished", "here", True, True),  # between two steps of a local run
        ("train", "finished", "here", False, False),
        ("train", "running", "elsewhere", False, True),
        ("train", "finished", "elsewhere", False, True),
        ("notify", "running", "elsewhere", False, True),
        ("notify", "finished", "elsewhere", False, False),
        ("notify", "failed", "elsewhere", False, False),
    ],
)
def test_active_runs(
    file_store: FileStore, step_name: str, state: str, host: str, alive: bool, is_active: bool
) -> None:
    process = os.getpid()
    if not alive:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        process = ended.pid
    place = {"host": this_host() if host == "here" else host, "process": process, "runner": process}
    record = StepRecord.model_validate({"step": step_name, "state": state, "started": datetime.now(UTC), **place})
    killed = record.model_copy(update={"step": "probe", "state": "running", "host": "elsewhere"})
    if step_name == "notify":
        killed = killed.model_copy(update={"started": record.started - timedelta(minutes=1)})
        RunRecord(file_store, "run-1").save_step(killed)
    RunRecord(file_store, "run-1").save_step(record)
    assert list(store_prune.active_runs(file_store)) == ["run-1"] * is_active
    assert not store_prune.active_runs(file_store, ["run-1"])


def test_run_on_another_machine_blocks_for_a_week(file_store: FileStore) -> None:
    record = StepRecord(step="train", state="running", started=datetime.now(UTC), host="elsewhere")
    RunRecord(file_store, "run-1").save_step(record)
    with pytest.raises(BusyError):
        prune_store(file_store, 1)
    age(file_store, "runs/run-1/steps/train.json", store_prune.ABANDONED_AFTER)
    prune_store(file_store, 1)


def test_run_on_this_machine_blocks_until_its_process_ends(file_store: FileStore) -> None:
    """A step may train for more than a week."""
    record = RunRecord(file_store, "run-1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        running = {"state": "running", "started": datetime.now(UTC), "host": this_host(), "process": process.pid}
        record.save_step(StepRecord.model_validate({"step": "train", **running}))
        age(file_store, "runs/run-1/steps/train.json", 4 * store_prune.ABANDONED_AFTER)
        with pytest.raises(BusyError):
            prune_store(file_store, 1)
        process.communicate(b"\n")
    prune_store(file_store, 1)


def test_step_waits_for_a_prune(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    entered = threading.Event()

    def run_step() -> None:
        with step("train", "run-1", store.uri):
            entered.set()

    thread = threading.Thread(target=run_step)
    with Lease(StoreRecord(store, "the prune")) as held:
        thread.start()
        assert not entered.wait(2)
        assert RunRecord(store, "run-1").steps()[0].state == "running"
        held.require()
    thread.join(30)
    assert entered.is_set()
    assert "waiting for the prune" in capsys.readouterr().out


def test_killed_prune_delays_a_step_for_a_while(file_store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Lease(StoreRecord(file_store, "the prune"))
    killed.__enter__()
    killed._released.set()  # pyright: ignore[reportPrivateUsage] - no longer renewed
    monkeypatch.setattr(StoreRecord.__init__, "__defaults__", ("", 0.2))
    with step("train", "run-1", file_store.uri):
        pass
    killed._renewed_s -= 100  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ConflictError, match="run again"):
        killed.require()
    prune_store(file_store, 1)


def test_one_prune_at_a_time(file_store: FileStore) -> None:
    with Lease(StoreRecord(file_store, "the first", duration_s=0.6)), pytest.raises(BusyError, match="the first"):
        prune_store(file_store, 1)
    prune_store(file_store, 1)


def test_command(file_store: FileStore, growing_source: DataSettings, tmp_path: Path) -> None:
    first, *_ = ingest_three(growing_source, file_store)
    before = keys(file_store)
    arguments = ["store", "prune", "--store", file_store.uri, "--workdir", str(tmp_path)]
    shown = evernear(*arguments, "--dry-run")
    assert "neither the newest nor of a remaining release" in shown.stdout
    assert "would delete" in shown.stdout
    assert keys(file_store) == before
    pruned = json.loads(evernear(*arguments, "--json").stdout)
    assert manifest_key("images", first.digest) in {key for group in pruned["surplus"] for key in group["keys"]}
    assert table_key("images", "images", first.tables["images"][0].sha256) not in keys(file_store)
    assert "deleted 0 of " in evernear(*arguments).stdout
