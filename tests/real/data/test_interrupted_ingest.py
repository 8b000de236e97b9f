import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.data.manifest import Manifest
from evernear.data.sources.folder import Folder
from evernear.errors import ConflictError, StoreError
from tests.dataset_images import write_files
from tests.limits import largest_file
from tests.small_ingest import ingest_with

CHILD = """
import sys
from evernear.data import ingest
from evernear.errors import EvernearError
from evernear.settings import DataSettings
source, store, shard_size_bytes = sys.argv[1:]
try:
    ingest.SHARD_SIZE_BYTES = int(shard_size_bytes)
    print(ingest.ingest_source(DataSettings(source=source), store).digest)
except EvernearError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def child(source: str, store: Path, shard_size_bytes: int = 2**16) -> list[str]:
    return [sys.executable, "-c", CHILD, source, store.as_uri(), str(shard_size_bytes)]


@pytest.fixture
def large_folder(tmp_path: Path, make_image) -> Path:
    """A folder of 150 images with 1.5 MB of pixels."""
    images = {f"{number % 3}/{number}.png": make_image(number, (100, 100)) for number in range(150)}
    return write_files(tmp_path / "tree", images)


def visible_files(store: Path) -> set[str]:
    return {path.name for path in store.rglob("*") if path.is_file() and ".staging" not in path.parts}


@pytest.mark.parametrize(
    "file_size_bytes", [2**14, *(pytest.param(size, marks=pytest.mark.slow) for size in (2**15, 2**16))]
)
def test_full_disk_leaves_the_last_snapshot(tree, run_ingest, make_image, tmp_path: Path, file_size_bytes: int) -> None:
    first = run_ingest(tree)
    write_files(tree, {f"1/{number}.png": make_image(number) for number in range(1000, 2000)})
    with largest_file(file_size_bytes), pytest.raises(StoreError):
        run_ingest(tree, shard_size_bytes=2**18)
    head = json.loads((tmp_path / "store" / "datasets" / "tree" / "head.json").read_text())
    assert head["digest"] == first.digest
    assert not [path for path in (tmp_path / "store").rglob(".*.*") if path.is_file()]
    assert run_ingest(tree, shard_size_bytes=2**18).count("train") > first.count("train")


def test_killed_ingest_can_be_repeated(tmp_path: Path, large_folder: Path, contents) -> None:
    whole = ingest_with(f"folder:{large_folder}", (tmp_path / "whole").as_uri())
    store = tmp_path / "store"
    shards = store / "datasets" / "tree" / "shards"
    with subprocess.Popen(child(f"folder:{large_folder}", store), stdout=subprocess.PIPE) as killed:
        deadline_s = time.monotonic() + 60
        while not shards.is_dir() or len(list(shards.iterdir())) < 4:
            assert time.monotonic() < deadline_s
            assert killed.poll() is None
            time.sleep(0.002)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert not (store / "datasets" / "tree" / "head.json").exists()

    again = ingest_with(f"folder:{large_folder}", store.as_uri())
    assert again.digest == whole.digest
    assert visible_files(store) == visible_files(tmp_path / "whole")
    assert len(contents(again)) == 150


def test_slower_of_two_concurrent_ingests_fails(tree, run_ingest, make_image, monkeypatch) -> None:
    first = run_ingest(tree)
    (tree / "1" / "new.png").write_bytes(make_image(1000))
    real_put = open_store(first.store_uri).__class__.put_if
    raced: list[Manifest] = []

    def slow(store: object, key: str, data: bytes, etag: str | None) -> str:
        if key.endswith("head.json") and not raced:
            (tree / "1" / "newer.png").write_bytes(make_image(1001))
            raced.append(first)
            raced.append(run_ingest(tree))
        return real_put(store, key, data, etag)

    monkeypatch.setattr("evernear.common.store.FileStore.put_if", slow)
    with pytest.raises(ConflictError, match="Another ingest of the dataset 'tree' finished in the meantime; run again"):
        run_ingest(tree)
    assert run_ingest(tree) == raced[1]


@pytest.mark.slow
def test_ingests_at_once_leave_the_snapshot_of_one(tmp_path: Path, large_folder: Path, make_image, contents) -> None:
    """Each of two processes makes the snapshot, or says that the other one did."""
    source, store, whole = f"folder:{large_folder}", tmp_path / "store", tmp_path / "whole"
    for more in (range(0), range(1000, 1030)):
        write_files(large_folder, {f"1/{number}.png": make_image(number, (100, 100)) for number in more})
        digest = ingest_with(source, whole.as_uri()).digest
        both = [subprocess.Popen(child(source, store), stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = [process.communicate()[0].strip() for process in both]
        codes = [process.returncode for process in both]
        assert 0 in codes, outputs
        for code, output in zip(codes, outputs, strict=True):
            conflict = "Another ingest of the dataset 'tree' finished in the meantime; run again."
            assert (code, output) in [(0, digest), (ConflictError.exit_code, conflict)]
        again = ingest_with(source, store.as_uri())
        assert again.digest == digest
        assert len(contents(again)) == 150 + len(more)
        assert visible_files(store) == visible_files(whole)


def with_small_disk(script: str, mount: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a separate mount namespace, with a disk of 1 MiB at ``mount``."""
    mount.mkdir()
    prepare = f"mount -t tmpfs -o size=1m none '{mount}' || exit 77\n"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", prepare + script, "sh", *arguments]
    try:
        completed = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if completed.returncode == 77 or "unshare" in completed.stderr:
        pytest.skip("no disk can be mounted here")
    return completed


@pytest.mark.slow
def test_full_store_disk_is_reported(tmp_path: Path, large_folder: Path) -> None:
    store = tmp_path / "disk"
    script = f"""
    "$@"; echo "status $?"
    find '{store}' -name head.json -o -name '.*.raw.*'
    mount -o remount,size=16m none '{store}'
    "$@"; echo "status $?"
    """
    completed = with_small_disk(script, store, *child(f"folder:{large_folder}", store, 2**18))
    sentence, refused, digest, well = completed.stdout.splitlines()
    assert completed.stderr == ""
    assert sentence.startswith(f"The disk that holds {store}/datasets/tree/parts/")
    assert sentence.endswith("is full; free some space and run again.")
    assert (refused, well) == ("status 4", "status 0")
    assert len(digest) == 64


def test_full_temporary_directory_is_reported(tmp_path: Path, large_folder: Path) -> None:
    scratch = tmp_path / "disk"
    script = f"""
    TMPDIR='{scratch}' "$@"; echo "status $?"
    ls -A '{scratch}'
    """
    arguments = child(f"folder:{large_folder}", tmp_path / "store", 2**24)
    completed = with_small_disk(script, scratch, *arguments)
    sentence, status = completed.stdout.splitlines()
    assert completed.stderr == ""
    assert sentence.startswith(f"The disk that holds {scratch}/evernear-ingest-")
    assert status == "status 4"
    assert not list((tmp_path / "store").rglob("head.json"))


class InterruptedIngestError(Exception):
    """The end of a process, in the middle of an ingest."""


def read_files(monkeypatch: pytest.MonkeyPatch, interrupt_after: int = 10**9) -> list[str]:
    """Record the files that are read from here on; interrupt the reading of one after that many."""
    files: list[str] = []
    real_read = Folder.read

    def read(folder: Folder, name: str) -> bytes:
        files.append(name)
        if len(files) > interrupt_after:
            raise InterruptedIngestError
        return real_read(folder, name)

    monkeypatch.setattr(Folder, "read", read)
    return files


@pytest.mark.parametrize("has_parent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_interrupted_ingest_skips_finished_parts(tmp_path, make_image, run_ingest, monkeypatch, has_parent) -> None:
    root = tmp_path / "tree"
    monkeypatch.setattr("evernear.data.form._SAMPLED_FILES", 1)

    def add(numbers: range) -> None:
        write_files(root, {f"{number % 3}/{number}.png": make_image(number) for number in numbers})

    def ingest(**settings: object) -> Manifest:
        return run_ingest(root, size_px=6, bit_depth=16, part_names=8, **settings)

    add(range(30))
    if has_parent:
        ingest()
        ingest(dataset="whole")
    add(range(30, 120))
    whole = ingest(dataset="whole")

    with monkeypatch.context() as patch:
        read_files(patch, interrupt_after=80)
        with pytest.raises(InterruptedIngestError):
            ingest(requests_in_flight=4)
    dataset = tmp_path / "store" / "datasets" / "tree"
    assert (dataset / "head.json").exists() == has_parent

    with monkeypatch.context() as patch:
        files = read_files(patch)
        assert ingest(decode_threads=1).digest == whole.digest
    assert 5 < len(files) < 60
    assert not [path for path in (dataset / "parts").rglob("*") if path.is_file()]
    head = (dataset / "head.json").read_bytes()
    assert run_ingest(root).digest == whole.digest
    assert (dataset / "head.json").read_bytes() == head


def test_parts_of_other_settings_are_ignored(tree, run_ingest, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        read_files(patch, interrupt_after=27)
        with pytest.raises(InterruptedIngestError):
            run_ingest(tree, size_px=6, requests_in_flight=4, part_names=8)
    manifest = run_ingest(tree, size_px=9)
    assert manifest.shape == (9, 9, 1)
    assert sum(shard.count for shard in manifest.shards) == 36
