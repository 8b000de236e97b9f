from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from releases import MakeRelease, PackedRelease, forge

from evernear.errors import Conflict, IntegrityError, StoreError
from evernear.release.registry import Registry
from evernear.store import Store, open_store


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return open_store((tmp_path / "store").as_uri())
    return open_store(f"s3://{request.getfixturevalue('bucket')}/team")


@pytest.fixture(scope="module")
def releases(make_release: MakeRelease) -> list[PackedRelease]:
    return [make_release() for _ in range(3)]


def publish(registry: Registry, release: PackedRelease) -> None:
    registry.publish(release.archive)


def test_a_published_release_comes_back(store: Store, releases: list[PackedRelease], tmp_path: Path) -> None:
    registry = Registry(store)
    for release in reversed(releases):
        publish(registry, release)
    assert list(registry.list()) == [release.version for release in releases]
    record = registry.fetch(releases[1].version, tmp_path / "fetched.mar")
    assert record.manifest == releases[1].manifest
    assert (tmp_path / "fetched.mar").read_bytes() == releases[1].archive.read_bytes()


def test_a_version_is_never_overwritten(store: Store, releases: list[PackedRelease], tmp_path: Path) -> None:
    registry = Registry(store)
    publish(registry, releases[0])
    publish(registry, releases[0])  # again, as after a lost answer
    other = forge(releases[0], tmp_path / "other.mar", smoke_json=b"[]")
    with pytest.raises(Conflict, match="is published already"):
        publish(registry, other)
    registry.fetch(releases[0].version, tmp_path / "fetched.mar")
    assert (tmp_path / "fetched.mar").read_bytes() == releases[0].archive.read_bytes()


def test_an_unknown_version_is_named(store: Store) -> None:
    for version in ("20260101.000000.00000000", "../champion"):
        with pytest.raises(StoreError, match=f"no release {version}"):
            Registry(store).show(version)


def test_a_damaged_archive_is_not_handed_out(store: Store, releases: list[PackedRelease], tmp_path: Path) -> None:
    registry = Registry(store)
    record = registry.publish(releases[0].archive)
    store.put(record.archive_key, b"damaged")
    with pytest.raises(IntegrityError):
        registry.fetch(releases[0].version, tmp_path / "fetched.mar")
    assert not (tmp_path / "fetched.mar").exists()


@pytest.mark.parametrize("garbage", [b"", b"{}", b'{"version": "x", "previous": null, "since": "now"}'])
def test_damaged_records_are_errors_and_not_absence(
    store: Store, releases: list[PackedRelease], garbage: bytes
) -> None:
    registry = Registry(store)
    publish(registry, releases[0])
    store.put("releases/champion.json", garbage)
    store.put(f"releases/manifests/{releases[0].version}.json", garbage)
    with pytest.raises(IntegrityError):
        registry.champion()
    with pytest.raises(IntegrityError):
        registry.show(releases[0].version)


def test_the_champion_moves_from_one_to_the_next(store: Store, releases: list[PackedRelease]) -> None:
    registry = Registry(store)
    assert registry.champion() is None
    for release in releases:
        publish(registry, release)
    first = registry.set_champion(releases[0].version, None)
    second = registry.set_champion(releases[1].version, first)
    assert registry.champion() == second
    assert (second.version, second.previous) == (releases[1].version, releases[0].version)


def test_what_is_not_published_cannot_become_champion(store: Store) -> None:
    with pytest.raises(StoreError, match="no release"):
        Registry(store).set_champion("20260101.000000.00000000", None)


@pytest.mark.parametrize("first", [True, False])
def test_of_promotions_at_once_exactly_one_wins(tmp_path: Path, releases: list[PackedRelease], first: bool) -> None:
    """On files: moto's server checks a condition and writes in two steps, as S3 does not."""
    registry = Registry(open_store((tmp_path / "store").as_uri()))
    for release in releases:
        publish(registry, release)
    held = None if first else registry.set_champion(releases[0].version, None)
    barrier = Barrier(8)

    def promote(number: int) -> str | None:
        barrier.wait()
        try:
            return registry.set_champion(releases[1 + number % 2].version, held).version
        except Conflict:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [version for version in pool.map(promote, range(8)) if version]
    assert len(won) == 1
    champion = registry.champion()
    assert champion is not None
    assert champion.version == won[0]


def test_a_stale_view_of_the_champion_loses(store: Store, releases: list[PackedRelease]) -> None:
    registry = Registry(store)
    for release in releases:
        publish(registry, release)
    old = registry.set_champion(releases[0].version, None)
    now = registry.set_champion(releases[1].version, old)
    for stale in (None, old):
        with pytest.raises(Conflict, match="champion changed"):
            registry.set_champion(releases[2].version, stale)
    assert registry.champion() == now


def test_a_kill_between_archive_and_record_leaves_no_release(
    store: Store, releases: list[PackedRelease], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> str:
        raise Killed

    registry = Registry(store)
    with monkeypatch.context() as patched:
        patched.setattr(store, "put_if", die)
        with pytest.raises(Killed):
            publish(registry, releases[0])
    assert list(registry.list()) == []
    publish(registry, releases[0])
    assert list(registry.list()) == [releases[0].version]
