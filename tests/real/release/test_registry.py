import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier

import pytest

from evernear.common.store import Store, open_store, patience, s3, s3_connection
from evernear.errors import ConflictError, FormatError, IntegrityError, StoreError, TransientStoreError
from evernear.release.promotions import CHAMPION, Cause, Champion
from evernear.release.pruning import prune_releases, remove_releases
from evernear.release.records import MANIFESTS, PRUNED
from evernear.release.registry import Registry
from tests.real.common.store.faulty import Fault, lose_response, refuse, start_faulty_proxy
from tests.releases import MakeRelease, PackedRelease, forge

ON_BOTH = pytest.mark.parametrize("store", ["file", "s3"], indirect=True)
Releases = Sequence[PackedRelease]


def publish(registry: Registry, release: PackedRelease) -> None:
    registry.publish(release.archive)


def champion_of(registry: Registry) -> Champion:
    champion = registry.champion()
    assert champion is not None
    return champion


@ON_BOTH
def test_version_is_never_overwritten(registry: Registry, releases: Releases, tmp_path: Path) -> None:
    publish(registry, releases[0])
    publish(registry, releases[0])  # again, as after a lost response
    other = forge(releases[0], tmp_path / "other.mar", smoke_json=b"[]")
    with pytest.raises(ConflictError, match="is already published"):
        publish(registry, other)
    registry.fetch(releases[0].version, tmp_path / "fetched.mar")
    assert (tmp_path / "fetched.mar").read_bytes() == releases[0].archive.read_bytes()


def test_unknown_version_is_named(store: Store) -> None:
    for version in ("20260101.000000.00000000", "../champion"):
        with pytest.raises(StoreError, match=f"Release {version} does not exist"):
            Registry(store).get(version)


def test_missing_champion_is_reported_and_can_be_replaced(registry: Registry, releases: Releases) -> None:
    missing = champions(registry, releases[:1])
    publish(registry, releases[1])
    registry.store.delete(f"releases/manifests/{missing.version}.json")
    with pytest.raises(StoreError, match=f"{missing.version} does not exist .* it is the champion; .*registry promote"):
        registry.get(missing.version)
    assert registry.set_champion(releases[1].version, registry.champion()).version == releases[1].version


@ON_BOTH
@pytest.mark.parametrize("first", [True, False])
def test_exactly_one_concurrent_promotion_succeeds(registry: Registry, releases: Releases, first: bool) -> None:
    for release in releases:
        publish(registry, release)
    champion = None if first else registry.set_champion(releases[0].version, None)
    barrier = Barrier(8)

    def promote(number: int) -> str | None:
        barrier.wait()
        try:
            another = Registry(open_store(registry.store.uri))
            return another.set_champion(releases[1 + number % 2].version, champion).version
        except ConflictError:
            return None

    with ThreadPoolExecutor(8) as pool:
        promoted = [version for version in pool.map(promote, range(8)) if version]
    assert len(promoted) == 1
    assert champion_of(registry).version == promoted[0]
    assert [promotion.version for promotion in registry.history()] == (
        [] if first else [releases[0].version]
    ) + promoted


def test_kill_between_archive_and_record_leaves_no_release(
    registry: Registry, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> str:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(registry.store, "put_if", die)
        with pytest.raises(Killed):
            publish(registry, releases[0])
    assert list(registry.list()) == []
    publish(registry, releases[0])
    assert list(registry.list()) == [releases[0].version]


def champions(registry: Registry, releases: Releases) -> Champion:
    """Publish all ``releases``, promote them in order, and return the last champion."""
    champion = None
    for release in releases:
        publish(registry, release)
        champion = registry.set_champion(release.version, champion)
    assert champion is not None
    return champion


def test_rollbacks_undo_promotions_one_by_one(registry: Registry, releases: Releases) -> None:
    first, second, third = (release.version for release in releases)
    champion = champions(registry, releases)
    champion = registry.roll_back(champion, Cause(by="eve", why="three errs", run="4711"))
    assert (champion.version, champion.previous) == (second, first)
    champion = registry.roll_back(champion)
    assert (champion.version, champion.previous) == (first, None)
    with pytest.raises(StoreError, match="nothing to roll back to"):
        registry.roll_back(champion)
    champion = registry.set_champion(third, champion, "promote")
    assert registry.roll_back(champion).version == first

    promotions = [(promotion.version, promotion.how) for promotion in registry.history()]
    assert promotions[2:] == [
        (third, "deploy"),
        (second, "rollback"),
        (first, "rollback"),
        (third, "promote"),
        (first, "rollback"),
    ]
    assert [(promotion.by, promotion.why) for promotion in registry.history() if promotion.why] == [
        ("eve", "three errs")
    ]


def test_repeated_rollback_does_not_alternate(registry: Registry, releases: Releases) -> None:
    """After the promotions A, B, A, B, rollbacks lead to A, B, A instead of alternating."""
    first, second, _ = releases
    champion = champions(registry, [first, second])
    for release in (first, second):
        champion = registry.set_champion(release.version, champion, "promote")
    back = []
    while champion.previous:
        champion = registry.roll_back(champion)
        back.append(champion.version)
    assert back == [first.version, second.version, first.version]


def test_kill_before_the_pointer_update_leaves_the_history_unchanged(
    registry: Registry, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion = champions(registry, releases[:2])
    publish(registry, releases[2])
    real = registry.store.put_if

    def die_at_pointer_update(key: str, data: bytes, etag: str | None) -> str:
        if key == "releases/champion.json":
            raise KeyboardInterrupt
        return real(key, data, etag)

    with monkeypatch.context() as patched:
        patched.setattr(registry.store, "put_if", die_at_pointer_update)
        with pytest.raises(KeyboardInterrupt):
            registry.set_champion(releases[2].version, champion)
    assert [promotion.number for promotion in registry.history()] == [1, 2]
    moved = registry.set_champion(releases[2].version, registry.champion())
    assert [promotion.version for promotion in registry.history()] == [release.version for release in releases]
    assert moved.previous == releases[1].version


@pytest.mark.parametrize("fault", [refuse(503, "SlowDown"), lose_response], ids=["refused", "carried out"])
def test_promotion_waits_for_the_store_and_counts_once(
    s3_endpoint: str, bucket: str, releases: Releases, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(patience, "PAUSES_S", (0.01, 0.01))
    for module in (s3_connection, s3):
        monkeypatch.setattr(module, "BACKOFF_S", 0.01)
    with start_faulty_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        registry = Registry(open_store(f"s3://{bucket}/store"))
        champion = champions(registry, releases[:2])
        publish(registry, releases[2])
        proxy.inject("PUT", *[fault] * 9)
        champion = registry.set_champion(releases[2].version, champion)
        proxy.inject("PUT", *[fault] * 9)
        champion = registry.roll_back(champion)
        assert registry.champion() == champion
        assert [promotion.version for promotion in registry.history()] == [releases[n].version for n in (0, 1, 2, 1)]
        monkeypatch.setattr(patience, "ON_A_LAPTOP_S", 0.0)
        proxy.forget()
        proxy.inject("PUT", *[refuse(503, "SlowDown")] * 9)
        with pytest.raises(TransientStoreError):
            registry.set_champion(releases[2].version, champion)


def test_promotion_with_a_lost_response_is_reported_as_done(
    store: Store, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, other = Registry(store), Registry(store)
    champion = champions(registry, releases[:2])
    publish(registry, releases[2])
    put_if = store.put_if

    def promote_first(key: str, data: bytes, etag: str | None) -> str:
        if key != CHAMPION:
            return put_if(key, data, etag)
        monkeypatch.setattr(store, "put_if", put_if)
        put_if(key, data, etag)
        other.set_champion(releases[0].version, other.champion())
        raise ConflictError("Another writer has changed the object.")

    monkeypatch.setattr(store, "put_if", promote_first)
    champion = registry.set_champion(releases[2].version, champion)
    assert (champion.version, champion.previous) == (releases[2].version, releases[1].version)
    assert [promotion.version for promotion in registry.history()] == [releases[n].version for n in (0, 1, 2, 0)]
    with pytest.raises(ConflictError, match="champion changed"):
        registry.set_champion(releases[1].version, champion)


@pytest.fixture(scope="module")
def six_releases(make_release: MakeRelease) -> list[PackedRelease]:
    """Six releases; the second is the parent of the fifth."""
    releases = [make_release() for _ in range(4)]
    return [*releases, make_release(parent=releases[1].version), make_release()]


def promote_fifth(registry: Registry, six_releases: Releases) -> None:
    """Publish all, and promote the fifth release after the third."""
    for release in six_releases:
        publish(registry, release)
    third = registry.set_champion(six_releases[2].version, None)
    registry.set_champion(six_releases[4].version, third)


def archives(registry: Registry) -> set[str]:
    return {entry.key for entry in registry.store.list("releases/archives/")}


@ON_BOTH
def test_prune_keeps_champion_parent_rollback_targets_and_newest(
    registry: Registry, six_releases: Releases, tmp_path: Path
) -> None:
    promote_fifth(registry, six_releases)
    pruned = [six_releases[0].version, six_releases[3].version]
    assert list(prune_releases(registry, 1)) == pruned
    remaining = [six_releases[n].version for n in (1, 2, 4, 5)]
    assert list(registry.list()) == remaining
    assert archives(registry) == {registry.get(version).archive_key for version in remaining}
    for version in remaining:
        registry.fetch(version, tmp_path / "fetched.mar")
    champion = champion_of(registry)
    assert champion.version == six_releases[4].version
    assert prune_releases(registry, 1) == ()

    for version in pruned:
        assert registry.get(version, include_pruned=True).manifest.version == version, "its record remains"
        with pytest.raises(StoreError, match=f"Release {version} was pruned"):
            registry.set_champion(version, champion)
    with pytest.raises(ConflictError, match="was pruned, and a version is never reused"):
        publish(registry, six_releases[0])
    registry.roll_back(champion)


def test_first_promoted_release_stays_the_anchor(registry: Registry, releases: Releases) -> None:
    first, second, third = (release.version for release in releases)
    champion = champions(registry, releases[:1])
    assert champion.anchor == first
    for release in releases[1:]:
        publish(registry, release)
        champion = registry.set_champion(release.version, champion)
    assert (champion.version, champion.anchor) == (third, first)
    champion = registry.record_settings(champion)
    assert champion.anchor == first
    champion = registry.roll_back(champion)
    assert (champion.version, champion.anchor) == (second, first)


def test_moved_anchor_is_in_the_history_and_survives_rollbacks(registry: Registry, releases: Releases) -> None:
    first, second, third = (release.version for release in releases)
    champion = champions(registry, releases)
    champion = registry.set_anchor(second, champion, Cause(by="ann", why="harder classes"))
    assert (champion.version, champion.previous, champion.anchor) == (third, second, second)
    last = [*registry.history()][-1]
    assert (last.how, last.anchor, last.by, last.why) == ("anchor", second, "ann", "harder classes")
    champion = registry.roll_back(champion)
    assert (champion.version, champion.anchor) == (second, second)
    champion = registry.roll_back(champion)
    assert (champion.version, champion.anchor) == (first, first), "the anchor that was left was the anchor no longer"


def test_anchor_is_not_pruned_and_cannot_be_moved_to_a_release_that_is(
    registry: Registry, six_releases: Releases
) -> None:
    champion = champions(registry, six_releases)
    first = six_releases[0].version
    assert champion.anchor == first
    stale = champion
    pruned = prune_releases(registry, 1)
    assert first not in pruned
    assert registry.is_published(first)
    with pytest.raises(StoreError, match="was pruned"):
        registry.set_anchor(pruned[0], stale)
    with pytest.raises(ConflictError):
        registry.set_anchor(champion.version, stale)


def test_champion_becomes_the_anchor_if_that_is_removed(registry: Registry, six_releases: Releases) -> None:
    champions(registry, six_releases)
    first = six_releases[0].version
    assert remove_releases(registry, [first]) == (first,)
    champion = champion_of(registry)
    assert champion.anchor == champion.version == six_releases[-1].version
    last = [*registry.history()][-1]
    assert (last.how, last.why) == ("anchor", f"The anchor {first} was removed.")


def test_records_of_pruned_releases_are_small(registry: Registry, six_releases: Releases) -> None:
    """Each release leaves one for ever."""
    promote_fifth(registry, six_releases)
    before = {version: registry.get(version) for version in registry.list()}
    first, second = prune_releases(registry, 1)
    for version in (first, second):
        key = f"{PRUNED}{version}.json"
        assert len(registry.store.get(key)) < len(before[version].to_json()) / 2
        assert registry.get(version, include_pruned=True) == before[version]
    registry.store.put(f"{PRUNED}{second}.json", registry.store.get(f"{PRUNED}{second}.json")[:-20])
    with pytest.raises(IntegrityError, match=f"The record {PRUNED}{second}.json"):
        registry.get(second, include_pruned=True)


def test_release_of_another_format_is_refused_in_a_sentence(registry: Registry, releases: Releases) -> None:
    publish(registry, releases[0])
    key = f"{MANIFESTS}{releases[0].version}.json"
    tree = json.loads(registry.store.get(key))
    tree["manifest"]["format"] = 1
    del tree["manifest"]["joined_gallery"]
    registry.store.put(key, json.dumps(tree).encode())
    with pytest.raises(FormatError, match=r"is of another version of evernear and was not changed: .* in format 1"):
        registry.get(releases[0].version)


def test_prune_keeps_shared_archives(registry: Registry, six_releases: Releases, tmp_path: Path) -> None:
    promote_fifth(registry, six_releases)
    oldest, newest = six_releases[0].version, six_releases[5].version
    shared = registry.get(newest)
    key = f"releases/manifests/{oldest}.json"
    record = json.loads(registry.store.get(key))
    registry.store.put(key, json.dumps(record | {"archive_sha256": shared.archive_sha256}).encode())
    assert oldest in prune_releases(registry, 1)
    assert oldest not in registry.list()
    registry.fetch(newest, tmp_path / "fetched.mar")


@pytest.mark.parametrize("step", range(1, 9))
def test_killed_prune_is_safe_and_completed_by_the_next(
    registry: Registry, six_releases: Releases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Eight writes: the pointer; for each of two releases the tombstone, the record and the
    archive; the pointer."""
    promote_fifth(registry, six_releases)
    remaining = iter(range(1, step))

    def killed_at_step(write: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            if next(remaining, None) is None:
                raise KeyboardInterrupt
            return write(*arguments)

        return wrapped

    with monkeypatch.context() as patched:
        for name in ("put", "put_if", "delete"):
            patched.setattr(registry.store, name, killed_at_step(getattr(registry.store, name)))
        with pytest.raises(KeyboardInterrupt):
            prune_releases(registry, 1)

    pruned = {six_releases[0].version, six_releases[3].version}
    champion = champion_of(registry)
    for version in registry.list():
        if version in pruned and step > 1:  # partially removed releases cannot be promoted
            with pytest.raises(StoreError, match="is being pruned"):
                registry.set_champion(version, champion)
        else:
            registry.fetch(version, tmp_path / "fetched.mar")
    prune_releases(registry, 1)
    remaining = [release.version for release in six_releases if release.version not in pruned]
    assert list(registry.list()) == remaining
    assert archives(registry) == {registry.get(version).archive_key for version in remaining}
    assert all(registry.get(version, include_pruned=True) for version in pruned)


def test_stale_promotion_after_a_prune_fails(registry: Registry, six_releases: Releases) -> None:
    """This also applies if the pointer is unchanged: the record is read, then pruned, then
    promoted."""
    promote_fifth(registry, six_releases)
    champion = registry.champion()
    real_get = registry.get

    def get_then_prune(version: str) -> object:
        record = real_get(version)
        prune_releases(Registry(registry.store), 1)
        return record

    registry.get = get_then_prune  # type: ignore[method-assign,assignment]
    with pytest.raises(ConflictError):
        registry.set_champion(six_releases[0].version, champion)
    assert champion_of(registry).version == six_releases[4].version


def test_concurrent_promotion_aborts_a_prune(
    registry: Registry, six_releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote_fifth(registry, six_releases)
    before = list(registry.list())
    real, other = registry.store.put_if, Registry(registry.store)

    def promote_first(key: str, data: bytes, etag: str | None) -> str:
        patched.undo()
        other.set_champion(six_releases[0].version, other.champion())
        return real(key, data, etag)

    with monkeypatch.context() as patched:
        patched.setattr(registry.store, "put_if", promote_first)
        with pytest.raises(ConflictError, match="champion changed in the meantime"):
            prune_releases(registry, 1)
    assert list(registry.list()) == before
    assert champion_of(registry).version == six_releases[0].version


def test_release_dated_in_the_future_is_older_than_the_others(store: Store) -> None:
    """The clock of the machine that packed it was wrong."""
    future, recent, tomorrow = (
        f"{datetime.now(UTC) + timedelta(hours=hours):%Y%m%d.%H%M%S}.0123abcd" for hours in (10_000, -1, 12)
    )
    for version in (future, recent, tomorrow):
        store.put(f"{MANIFESTS}{version}.json", b"{}")
    assert list(Registry(store).list()) == [future, recent, tomorrow]


def test_lost_pointer_is_not_taken_for_a_new_registry(registry: Registry, releases: Releases) -> None:
    champions(registry, releases[:1])
    registry.store.delete(CHAMPION)
    for use in (registry.champion, lambda: list(registry.history()), lambda: prune_releases(registry, 1)):
        with pytest.raises(IntegrityError, match=r"champion\.json does not exist .*run `evernear registry restore`"):
            use()


@pytest.mark.parametrize("damage", [None, b"", b"{}"])
def test_pointer_is_restored_from_the_history(registry: Registry, releases: Releases, damage: bytes | None) -> None:
    champions(registry, releases[:3])
    registry.store.delete(CHAMPION) if damage is None else registry.store.put(CHAMPION, damage)
    restored = registry.restore()
    assert registry.champion() == restored
    assert (restored.version, restored.promotion.how) == (releases[2].version, "restore")
    assert restored.anchor == releases[0].version
    assert [promotion.number for promotion in registry.history()] == [1, 2, 3, 4]
    back = registry.roll_back(restored)
    assert back.version == releases[1].version
    assert registry.roll_back(back).version == releases[0].version


def test_pointer_is_restored_to_a_named_release(registry: Registry, releases: Releases) -> None:
    champions(registry, releases[:2])
    publish(registry, releases[2])
    registry.store.delete(CHAMPION)
    restored = registry.restore(releases[2].version)
    expected = (releases[2].version, releases[1].version, 3)
    assert (restored.version, restored.previous, restored.promotion.number) == expected


def test_restore_never_reuses_a_number(registry: Registry, releases: Releases) -> None:
    champions(registry, releases[:3])
    registry.store.delete(CHAMPION)
    registry.store.put("releases/history/00000003.json", b"")
    restored = registry.restore()
    assert (restored.version, restored.promotion.number) == (releases[1].version, 4)


def test_intact_pointer_is_not_replaced(registry: Registry, releases: Releases) -> None:
    champions(registry, releases[:2])
    with pytest.raises(StoreError, match=f"{releases[1].version}.*nothing to restore"):
        registry.restore(releases[0].version)


def test_restore_without_history_needs_a_version(registry: Registry, releases: Releases) -> None:
    publish(registry, releases[0])
    assert prune_releases(registry, 0) == (), "without a champion, nothing is removed"
    registry.store.put(CHAMPION, b"")
    with pytest.raises(StoreError, match="`evernear registry restore VERSION`"):
        registry.restore()
    with pytest.raises(StoreError, match="does not exist"):
        registry.restore(releases[1].version)
    assert registry.restore(releases[0].version).version == releases[0].version


@pytest.mark.parametrize("folder", ["manifests", "history"])
def test_one_damaged_record_does_not_break_list_history_and_prune(
    registry: Registry, releases: Releases, folder: str
) -> None:
    champions(registry, releases[:3])
    damaged = releases[0].version
    name = damaged if folder == "manifests" else "00000001"
    registry.store.put(f"releases/{folder}/{name}.json", b"")
    records, faults = registry.records()
    if folder == "manifests":
        assert [*records] == [release.version for release in releases[1:3]]
        assert list(faults) == [damaged]
        assert "it is empty; run `evernear store check --repair`" in faults[damaged]
        assert prune_releases(registry, 1) == ()
        assert damaged in list(registry.list())
    else:
        assert not faults
        assert [promotion.number for promotion in registry.history()] == [2, 3]
        registry.set_anchor(releases[1].version, champion_of(registry))
        assert prune_releases(registry, 1) == (damaged,)
