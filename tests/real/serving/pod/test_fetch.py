"""The init container fetches a verified release, or fails with one sentence and no files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.disk import sha256_file
from evernear.common.store import Store, open_store
from evernear.errors import IntegrityError, ServingError, SettingsError, StoreError
from evernear.release.registry import Registry
from evernear.serving import pod
from evernear.serving.endpoints import home_of
from evernear.settings import Settings
from evernear.settings.sources import TOKEN_FILE_VARIABLE
from tests.no_files import NO_FILES
from tests.real.serving.pod.kubelet import Pod, can_contain
from tests.releases import PackedRelease, forge


@pytest.fixture
def fetch_settings(release: PackedRelease, tmp_path: Path) -> Settings:
    store = (tmp_path / "store").as_uri()
    Registry(open_store(store)).publish(release.archive)
    return Settings(workdir=tmp_path / "work", store=store)


def archive_in(settings: Settings) -> Path:
    return home_of(settings.workdir) / "model-store" / "embedding.mar"


def test_fetch_downloads_and_verifies_a_release(release: PackedRelease, fetch_settings: Settings) -> None:
    assert pod.fetch_release(release.version, sha256_file(release.archive), fetch_settings) == release.manifest
    assert archive_in(fetch_settings).read_bytes() == release.archive.read_bytes()
    fetched = pod.release(fetch_settings)
    assert fetched.manifest == release.manifest
    assert len(fetched.smoke_queries()) == 8
    remaining = {path.name for path in fetched.directory.iterdir()}
    images = {f"smoke-{number:02d}.png" for number in range(8)}
    assert remaining == {"manifest.json", "preprocessing.json", "smoke.json", *images}
    assert {path.name for path in home_of(fetch_settings.workdir).iterdir()} == {"model-store"}


def test_restarted_container_needs_no_store(release: PackedRelease, fetch_settings: Settings) -> None:
    sha256 = sha256_file(release.archive)
    pod.fetch_release(release.version, sha256, fetch_settings)
    without_store = fetch_settings.model_copy(update={"store": "s3://bucket/at-no-endpoint"})
    assert pod.fetch_release(release.version, sha256, without_store) == release.manifest


def expect_another(release: PackedRelease, store: Store, directory: Path) -> str:
    return "0" * 64


def change_record(release: PackedRelease, store: Store, directory: Path) -> str:
    key = f"releases/manifests/{release.version}.json"
    record = json.loads(store.get(key))
    record["manifest"]["from_a_later_version"] = 1
    store.put(key, json.dumps(record).encode())
    return sha256_file(release.archive)


def change_archive(release: PackedRelease, store: Store, directory: Path) -> str:
    data, sha256 = bytearray(release.archive.read_bytes()), sha256_file(release.archive)
    data[len(data) // 2] ^= 1
    store.put(f"releases/archives/{sha256}.mar", bytes(data))
    return sha256


def replace_release(release: PackedRelease, store: Store, directory: Path) -> str:
    """Both hashes agree, but the archive is not the release in the record."""
    other = forge(release, directory / "other.mar", preprocessing_json=b"{}")
    record = Registry(store).get(release.version).model_copy(update={"archive_sha256": sha256_file(other.archive)})
    store.put(record.archive_key, other.archive)
    store.put(f"releases/manifests/{release.version}.json", record.model_dump_json().encode())
    return record.archive_sha256


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (expect_another, r"has the sha256 [0-9a-f]{64}, but the pod expects 0000.*deploy"),
        (
            change_record,
            r"^(?!.*repair).*does not know the field manifest\.from_a_later_version.*"
            r"upgrade evernear here, servers before pipelines\.$",
        ),
        (change_archive, "is damaged"),
        (replace_release, "is another release"),
    ],
)
def test_fetch_rejects_anything_but_the_release(
    release: PackedRelease,
    fetch_settings: Settings,
    tmp_path: Path,
    change: Callable[[PackedRelease, Store, Path], str],
    sentence: str,
) -> None:
    sha256 = change(release, open_store(fetch_settings.store_uri), tmp_path)
    with pytest.raises(IntegrityError, match=sentence):
        pod.fetch_release(release.version, sha256, fetch_settings)
    assert not archive_in(fetch_settings).exists()
    assert list(home_of(fetch_settings.workdir).glob(".*")) == []


@pytest.mark.slow
@pytest.mark.skipif(not can_contain(), reason="the kernel does not allow unprivileged namespaces")
def test_fetch_reads_from_a_read_only_directory_store(release: PackedRelease, tmp_path: Path) -> None:
    """Like a mounted PersistentVolumeClaim; here in place of the Secret, which is read-only."""
    container = Pod(tmp_path / "pod")
    Registry(open_store((tmp_path / "pod" / "secret" / "store").as_uri())).publish(release.archive)
    sha256 = sha256_file(release.archive)
    completed = container.fetch("file:///mnt/store", release.version, sha256)
    assert (completed.returncode, completed.stdout) == (0, f"Fetched release {release.version}, sha256 {sha256}.\n"), (
        completed.stderr
    )
    assert archive_in(container.settings).read_bytes() == release.archive.read_bytes()
    failed = container.fetch("file:///mnt/absent", release.version, "0" * 64)
    assert (failed.returncode, failed.stderr.count("\n")) == (4, 1)
    assert f"Release {release.version} does not exist" in failed.stderr


def test_fetch_reports_a_missing_release(fetch_settings: Settings) -> None:
    with pytest.raises(StoreError, match=r"Release 20200101\.000000\.00000000 does not exist"):
        pod.fetch_release("20200101.000000.00000000", "0" * 64, fetch_settings)


def test_fetch_removes_leftovers_and_other_archives(release: PackedRelease, fetch_settings: Settings) -> None:
    home = home_of(fetch_settings.workdir)
    leftovers = [
        home / ".fetch-killed" / "release.mar",
        home / "model-store" / "another.mar",
        archive_in(fetch_settings),
    ]
    for file in leftovers:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"half")
    pod.fetch_release(release.version, sha256_file(release.archive), fetch_settings)
    assert [path.name for path in (home / "model-store").iterdir()] == ["embedding.mar"]
    assert not leftovers[0].parent.exists()
    assert archive_in(fetch_settings).read_bytes() == release.archive.read_bytes()


@pytest.mark.parametrize("make", [*NO_FILES, Path.touch])
def test_serve_rejects_files_next_to_the_release_until_the_next_fetch(
    release: PackedRelease, fetch_settings: Settings, make: Callable[[Path], None]
) -> None:
    """The server would load a file, and block on a pipe."""
    sha256 = sha256_file(release.archive)
    with pytest.raises(ServingError, match="run `evernear pod fetch` first"):
        pod.serve_pod(fetch_settings, without_token=True)
    pod.fetch_release(release.version, sha256, fetch_settings)
    make(archive_in(fetch_settings).with_name("x.mar"))
    with pytest.raises(ServingError, match="or other files next to it; run `evernear pod fetch` first"):
        pod.serve_pod(fetch_settings, without_token=True)
    pod.fetch_release(release.version, sha256, fetch_settings)
    assert list(archive_in(fetch_settings).parent.iterdir()) == [archive_in(fetch_settings)]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No token: set EVERNEAR_TOKEN_FILE to a file .* use --without-token"),
        (b"", "has no valid token"),
        (b"short", "has no valid token: 16 or more"),
        (b"two words that are long enough", "has no valid token"),
        (b"\xff" * 32, "cannot be read"),
    ],
)
def test_serve_rejects_an_invalid_token(
    release: PackedRelease,
    fetch_settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    sentence: str,
) -> None:
    pod.fetch_release(release.version, sha256_file(release.archive), fetch_settings)
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    if content is not None:
        (tmp_path / "token").write_bytes(content)
        monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    with pytest.raises(SettingsError, match=sentence):
        pod.serve_pod(fetch_settings)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, "/somewhere/token")
    with pytest.raises(SettingsError, match="drop one of them"):
        pod.serve_pod(fetch_settings, without_token=True)
