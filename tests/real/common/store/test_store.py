import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.disk import sha256_bytes, sha256_file, write_atomically
from evernear.common.store import Store, open_store, s3_connection
from evernear.errors import ConflictError, IntegrityError, SettingsError, StoreError
from tests.limits import largest_file
from tests.no_files import NO_FILES


@pytest.fixture(params=["file", "s3"])
def either_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return open_store((tmp_path / "store").as_uri())
    return open_store(f"s3://{request.getfixturevalue('bucket')}/some/prefix")


def test_object_round_trip(either_store: Store, tmp_path: Path) -> None:
    assert either_store.find("a/b.txt") is None
    etag = either_store.put("a/b.txt", b"one")
    assert either_store.find("a/b.txt") == (b"one", etag)
    assert either_store.get("a/b.txt") == b"one"

    (tmp_path / "large").write_bytes(os.urandom(11 * 2**20))
    either_store.put("a/large", tmp_path / "large")
    assert either_store.get("a/large") == (tmp_path / "large").read_bytes()

    either_store.delete("a/b.txt")
    either_store.delete("a/b.txt")
    assert either_store.find("a/b.txt") is None


def test_missing_object_is_named(either_store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a/b does not exist in .*(store|prefix)"):
        either_store.get("a/b")
    with pytest.raises(StoreError, match="a/b does not exist in"):
        either_store.fetch("a/b", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_conditional_put_rejects_a_stale_object(either_store: Store) -> None:
    first = either_store.put_if("head", b"1", None)
    with pytest.raises(ConflictError, match="head"):
        either_store.put_if("head", b"2", None)
    second = either_store.put_if("head", b"2", first)
    with pytest.raises(ConflictError):
        either_store.put_if("head", b"3", first)
    assert either_store.find("head") == (b"2", second)
    with pytest.raises(ConflictError):
        either_store.put_if("never-written", b"1", first)
    assert either_store.find("never-written") is None


def test_listing_returns_full_keys_with_each_folder_sorted(either_store: Store) -> None:
    keys = ["a.b/x", "a/b/c", "a/b.c", "a/z", "ab/x", "b"]
    for key in keys:
        either_store.put(key, key.encode())
    listed = list(either_store.list(""))
    # S3 sorts full keys; SeaweedFS lists folder by folder, a/b/c before a/b.c.
    assert sorted(info.key for info in listed) == sorted(keys)
    assert [info.key for info in listed if info.key in ("a/b.c", "a/z")] == ["a/b.c", "a/z"]
    assert all(info.size_bytes == len(info.key) for info in listed)
    assert all(either_store.find(info.key) == (info.key.encode(), info.etag) for info in listed)
    assert sorted(info.key for info in either_store.list("a/b")) == ["a/b.c", "a/b/c"]
    assert list(either_store.list("nothing/")) == []
    assert sorted(either_store.folders()) == ["a", "a.b", "ab"]


@pytest.mark.parametrize("folders", [3, 30])
def test_large_buckets_are_listed_completely(bucket: str, monkeypatch: pytest.MonkeyPatch, folders: int) -> None:
    store = open_store(f"s3://{bucket}/prefix")
    keys = [f"{n % folders} +/{'sub/' * (n % 2)}{n:02}.png" for n in range(60)] + ["top.png", "0 +.png"]
    for key in keys:
        store.put(key, key.encode())
    whole = sorted(store.list(""), key=lambda info: info.key)
    assert [info.key for info in whole] == sorted(keys)
    monkeypatch.setattr(s3_connection, "_PAGE_OBJECTS", 9)
    monkeypatch.setattr(s3_connection, "_FOLDERS_AT_ONCE", 2)
    monkeypatch.setattr(s3_connection, "_PAGES_AT_ONCE", 2)
    assert sorted(store.list(""), key=lambda info: info.key) == whole
    assert [info.key for info in store.list("1 +/")] == [info.key for info in whole if info.key.startswith("1 +/")]
    assert next(iter(store.list("1"))).key.startswith("1")


def test_fetch_verifies_the_hash_and_is_atomic(either_store: Store, tmp_path: Path) -> None:
    either_store.put("x", b"content")
    assert either_store.fetch("x", tmp_path / "d" / "x", sha256_bytes(b"content")).read_bytes() == b"content"
    with pytest.raises(IntegrityError, match="x is damaged"):
        either_store.fetch("x", tmp_path / "d" / "y", sha256_bytes(b"other"))
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["x"]


def _increment(store: Store, turns: int) -> None:
    """Increment a counter ``turns`` times by compare-and-swap."""
    for _ in range(turns):
        while True:
            counter = store.find("counter")
            data, etag = counter if counter else (b"0", None)
            try:
                store.put_if("counter", str(int(data) + 1).encode(), etag)
                break
            except ConflictError:
                continue


def test_concurrent_increments_are_not_lost(either_store: Store) -> None:
    writers = [threading.Thread(target=_increment, args=(open_store(either_store.uri), 5)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert either_store.get("counter") == b"20"


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", ".hidden", "a/.b"])
def test_key_cannot_escape_the_store(tmp_path: Path, bucket: str, key: str) -> None:
    for store in (open_store((tmp_path / "store").as_uri()), open_store(f"s3://{bucket}")):
        with pytest.raises(StoreError, match="not a valid key"):
            store.put(key, b"x")
        with pytest.raises(StoreError, match="not a valid key"):
            store.put_if(key, b"x", None)


@pytest.mark.parametrize("uri", ["", "relative/path", "file://host/path", "gs://bucket", "s3://"])
def test_unsupported_uri_is_rejected(uri: str) -> None:
    with pytest.raises(SettingsError, match="neither"):
        open_store(uri)


def test_spaces_in_a_path_are_preserved(tmp_path: Path) -> None:
    store = open_store((tmp_path / "a b#c").as_uri())
    store.put("x", b"1")
    assert (tmp_path / "a b#c" / "x").read_bytes() == b"1"


def test_missing_bucket_is_reported(bucket: str) -> None:
    store = open_store(f"s3://{bucket}-missing/prefix")
    reads = (lambda: store.get("x"), lambda: list(store.list("")))
    writes = (lambda: store.put("x", b""), lambda: store.put_if("x", b"", None))
    # With an administrator's keys, SeaweedFS creates missing buckets.
    for act in reads if "TEST_S3_URL" in os.environ else (*reads, *writes):
        with pytest.raises(StoreError, match=f"The bucket '{bucket}-missing' does not exist"):
            act()


@pytest.mark.parametrize("name", ["UPPER CASE", "a", "a..b", "10.0.0.1"])
def test_invalid_bucket_name_is_reported(name: str) -> None:
    with pytest.raises(SettingsError, match="cannot be the name of a bucket"):
        open_store(f"s3://{name}/prefix")


@pytest.mark.usefixtures("quick")
def test_unreachable_endpoint_is_reported(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = open_store("s3://bucket/prefix")
    with pytest.raises(StoreError, match="cannot be reached"):
        store.get("x")


def test_invalid_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(SettingsError, match="AWS_ENDPOINT_URL='localhost:9000'"):
        open_store("s3://bucket")


def test_oversized_write_leaves_the_old_content(tmp_path: Path) -> None:
    path, store = tmp_path / "y", open_store((tmp_path / "store").as_uri())
    store.put("x", b"old")
    write_atomically(path, b"old")
    with largest_file(2**16):
        with pytest.raises(StoreError, match="ulimit -f"):
            store.put("x", b"1" * 10**6)
        with pytest.raises(StoreError, match="ulimit -f"):
            write_atomically(path, b"1" * 10**6)
        store.put("x", b"new")
    assert store.get("x") == b"new"
    assert path.read_bytes() == b"old"
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == ["lock", "x", "y"]


def test_old_temporary_files_are_removed(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from evernear.common.store import files, open_store\n"
        "store = open_store(sys.argv[1])\n"
        "files.sync = lambda file: (file.flush(), print('staged', flush=True), time.sleep(60))\n"
        "store.put('x', b'half')\n"
    )
    uri = (tmp_path / "store").as_uri()
    with subprocess.Popen([sys.executable, "-c", script, uri], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"staged\n"
        writer.send_signal(signal.SIGKILL)
    staging = tmp_path / "store" / ".staging"
    (left,) = staging.glob(".x.*")

    store = open_store(uri)
    assert store.find("x") is None
    assert list(store.list("")) == []
    store.put("y", b"1")
    assert left.exists()
    day_ago = time.time() - 25 * 3600
    os.utime(left, (day_ago, day_ago))
    store.put("y", b"2")
    assert not left.exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", NO_FILES)
def test_special_file_is_not_an_object(tmp_path: Path, make: Callable[[Path], None]) -> None:
    store = open_store((tmp_path / "store").as_uri())
    store.put("releases/a.mar", b"x")
    (tmp_path / "store" / "releases" / "a.mar").unlink()
    make(tmp_path / "store" / "releases" / "a.mar")
    with pytest.raises(StoreError, match=r"a\.mar cannot be read"):
        store.find("releases/a.mar")
    with pytest.raises(StoreError, match=r"a\.mar cannot be read"):
        store.fetch("releases/a.mar", tmp_path / "fetched")
    with pytest.raises(StoreError):
        store.put("releases/b.mar", tmp_path / "store" / "releases" / "a.mar")
    with pytest.raises(StoreError, match=r"a\.mar cannot be read"):
        sha256_file(tmp_path / "store" / "releases" / "a.mar")
    assert store.find("releases/b.mar") is None
    assert not (tmp_path / "fetched").exists()
