"""Compare-and-swap on servers that know it, ignore it, refuse it or do it in two steps."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import BytesIO
from typing import Any

import pytest
from faulty import (
    Fault,
    Front,
    Postponed,
    empty_listing,
    front_of,
    lose_answer,
    page,
    pass_on,
    refuse,
    reset_upload,
)

from evernear.errors import ConflictError, StoreError, TransientStoreError
from evernear.store import S3Store, conditional_put, s3_connection

pytestmark = pytest.mark.usefixtures("quick")

SERVERS = ["atomic", "ignoring", "swift"]


@pytest.fixture
def atomic(front: Front) -> Front:
    """A server that checks and writes in one step, as AWS does."""
    return front


@pytest.fixture
def ignoring(altering_front: Front) -> Front:
    """A server that overwrites whatever the condition, as SeaweedFS did before 3.97."""
    altering_front.ignored_headers = frozenset({"If-Match", "If-None-Match"})
    return altering_front


@pytest.fixture
def early(altering_front: Front) -> Front:
    """A server that refuses the loser of a race before it has read its body, and resets, as MinIO does."""
    altering_front.refuses_early = True
    return altering_front


@pytest.fixture(params=SERVERS)
def connect(request: pytest.FixtureRequest) -> Callable[[], S3Store]:
    """``connect()`` opens one writer's store, the same one each time."""
    if request.param == "swift":
        bucket = request.getfixturevalue("swift_bucket")
    else:
        request.getfixturevalue(request.param)
        bucket = request.getfixturevalue("bucket")
    return lambda: S3Store(bucket, "prefix")


def test_the_probe_tells_servers_apart(connect, request: pytest.FixtureRequest) -> None:
    created, replaced = connect()._conditional_writer.race_winners
    server = request.node.callspec.params["connect"]
    if server == "atomic":
        assert (created, replaced) == (1, 1)
    elif server == "ignoring":
        assert (created, replaced) == (8, 8)
    else:
        # Swift knows If-None-Match, not always in one step, and answers 501 to If-Match.
        assert created >= 1
        assert replaced == 0


def test_a_swap_takes_only_what_it_saw(connect) -> None:
    store = connect()
    first = store.put_if("head", b"1", None)
    for etag in (None, "0" * 32):
        with pytest.raises(ConflictError, match=r"Another writer changed s3://.*/prefix/head"):
            store.put_if("head", b"2", etag)
    assert store.find("head") == (b"1", first)
    second = store.put_if("head", b"2", first)
    with pytest.raises(ConflictError):
        store.put_if("head", b"3", first)
    with pytest.raises(ConflictError):
        store.put_if("never-written", b"1", first)
    assert store.find("head") == (b"2", second)
    assert store.find("never-written") is None


def test_of_writers_at_once_exactly_one_wins(connect) -> None:
    writers = [connect() for _ in range(3)]
    for writer in writers:
        assert writer._conditional_writer.race_winners  # each has run its own race before
    etag: str | None = None
    for turn in range(2):
        start = threading.Barrier(len(writers), timeout=60)

        def write(store: S3Store, data: bytes, seen: str | None, start: threading.Barrier) -> str | None:
            start.wait()
            try:
                return store.put_if("champion", data, seen)
            except ConflictError:
                return None

        offers = [b"%d-%d" % (turn, number) for number in range(len(writers))]
        with ThreadPoolExecutor(len(writers)) as pool:
            told = list(pool.map(write, writers, offers, [etag] * 3, [start] * 3))
        ((won, etag),) = [(data, new) for data, new in zip(offers, told, strict=True) if new]
        assert connect().find("champion") == (won, etag)


def test_nothing_of_ours_is_left_or_listed(connect) -> None:
    store = connect()
    store.put_if("a/head", b"1", None)
    assert [info.key for info in store.list("")] == ["a/head"]
    assert list(store.folders()) == ["a"]
    held = store._client.list_objects(store.bucket, recursive=True)
    assert [each.object_name for each in held] == ["prefix/a/head"]


def _leave_a_lease(store: S3Store) -> str:
    name = "prefix/.swap/leases/a--head/0123"
    store._client.put_object(store.bucket, name, BytesIO(b""), 0)
    return name


def test_a_lease_that_is_held_is_waited_for_and_named(
    ignoring: Front, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(bucket, "prefix")
    name = _leave_a_lease(store)
    monkeypatch.setattr(conditional_put, "_LEASE_TIMEOUT_S", 0.5)
    with pytest.raises(StoreError, match=f"Another writer holds s3://{bucket}/{name}; .* after 20 minutes") as raised:
        store.put_if("a/head", b"1", None)
    # Nobody is known to have written, so nobody is to look for what was.
    assert not isinstance(raised.value, ConflictError)
    assert store.find("a/head") is None
    # Other pointers are not held up.
    store.put_if("b/head", b"1", None)

    release = threading.Timer(0.5, store._client.remove_object, (bucket, name))
    monkeypatch.setattr(conditional_put, "_LEASE_TIMEOUT_S", 30)
    release.start()
    store.put_if("a/head", b"1", None)
    release.join()
    assert store.get("a/head") == b"1"


def test_a_killed_writers_lease_ends(ignoring: Front, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(bucket, "prefix")
    _leave_a_lease(store)
    monkeypatch.setattr(conditional_put, "_STALE_AFTER", timedelta(seconds=1))
    store.put_if("a/head", b"1", None)
    assert list(store._client.list_objects(bucket, "prefix/.swap/", recursive=True)) == []


def test_a_holder_that_was_frozen_does_not_write(ignoring: Front, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional_put, "_LEASE_WRITE_WINDOW_S", 0.0)
    store = S3Store(bucket, "prefix")
    with pytest.raises(StoreError, match="too slow to hold a lease there; nothing was written"):
        store.put_if("head", b"1", None)
    assert store.find("head") is None


def test_a_listing_that_lags_is_refused(ignoring: Front, bucket: str) -> None:
    store = S3Store(bucket, "prefix")
    assert store._conditional_writer.race_winners == (8, 8)
    ignoring.harm("GET", empty_listing)
    with pytest.raises(StoreError, match="does not list an object right after its write; no pointer can move"):
        store.put_if("head", b"1", None)
    assert store.find("head") is None


def time_out(handler: Any) -> None:
    """The request is carried out, and an ingress gives up on the answer."""
    handler.forward()
    page(504)(handler)


@pytest.mark.parametrize("fault", [lose_answer, time_out])
def test_a_write_whose_answer_is_lost_is_read_back_and_not_repeated(atomic: Front, bucket: str, fault: Fault) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    atomic.forget()
    atomic.harm("PUT", fault)
    second = store.put_if("head", b"2", first)
    assert (atomic.count("PUT"), atomic.count("HEAD")) == (1, 1)
    assert store.find("head") == (b"2", second)


@pytest.mark.parametrize("fault", [reset_upload, page(502)])
def test_a_write_that_breaks_off_is_sent_again(atomic: Front, bucket: str, fault: Fault) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    atomic.forget()
    atomic.harm("PUT", fault)
    second = store.put_if("head", b"2" * 10**6, first)
    assert atomic.count("PUT") == 2
    assert store.find("head") == (b"2" * 10**6, second)

    atomic.harm("PUT", *[fault] * 4)
    with pytest.raises(TransientStoreError, match=r"broke off whenever .*/head was written, and the object is un"):
        store.put_if("head", b"3" * 10**6, second)
    assert store.find("head") == (b"2" * 10**6, second)


def test_a_write_that_is_executed_late_is_not_taken_for_somebody_elses(atomic: Front, bucket: str) -> None:
    store, late = S3Store(bucket, "prefix"), Postponed()
    first = store.put_if("head", b"1", None)
    atomic.harm("PUT", late.hang_up, late.catch_up)
    second = store.put_if("head", b"2", first)
    assert store.find("head") == (b"2", second)


def test_of_two_who_write_the_same_one_wins_even_if_the_answer_is_lost(atomic: Front, bucket: str) -> None:
    one, other = S3Store(bucket, "prefix"), S3Store(bucket, "prefix")
    one.put_if("claim", b"mine", None)
    assert other._conditional_writer.race_winners
    atomic.harm("PUT", lose_answer)
    with pytest.raises(ConflictError):
        other.put_if("claim", b"mine", None)


def test_who_was_overtaken_before_it_could_look_is_told_of_a_conflict(atomic: Front, bucket: str) -> None:
    store, other = S3Store(bucket, "prefix"), S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)

    def overtake(handler: Any) -> None:
        other.put("head", b"3")
        pass_on(handler)

    atomic.harm("PUT", lose_answer)
    atomic.harm("HEAD", overtake)
    with pytest.raises(ConflictError):
        store.put_if("head", b"2", first)
    assert store.get("head") == b"3"


def test_the_outcome_is_unknown_only_if_the_object_cannot_be_read_back(atomic: Front, bucket: str) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    atomic.harm("PUT", lose_answer)
    atomic.harm("HEAD", *[lose_answer] * s3_connection.TRIES)
    with pytest.raises(TransientStoreError, match=r"not known whether it was, since it cannot be read either: http://"):
        store.put_if("head", b"2", first)


def test_a_probe_whose_connections_break_is_resolved(atomic: Front, bucket: str) -> None:
    atomic.harm("PUT", *[lose_answer] * 12)
    assert S3Store(bucket, "prefix")._conditional_writer.race_winners == (1, 1)
    atomic.harm("DELETE", *[lose_answer] * s3_connection.TRIES)
    assert S3Store(bucket, "prefix")._conditional_writer.race_winners == (1, 1)


def test_a_loser_that_is_refused_before_its_body_is_read_is_told_of_a_conflict(early: Front, bucket: str) -> None:
    for _ in range(5):
        assert S3Store(bucket, "prefix")._conditional_writer.race_winners == (1, 1)
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    for etag in (None, "0" * 32):
        # Larger than what the sockets buffer, so that the reset comes while it is sent.
        with pytest.raises(ConflictError):
            store.put_if("head", b"2" * 2**24, etag)
    assert store.find("head") == (b"1", first)


def test_a_write_that_was_put_off_is_repeated(atomic: Front, bucket: str) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    atomic.forget()
    atomic.harm("PUT", refuse(503, "SlowDown"), refuse(503, "SlowDown"))
    store.put_if("head", b"2", first)
    assert atomic.count("PUT") == 3
    assert store.get("head") == b"2"

    atomic.harm("PUT", *[refuse(503, "SlowDown")] * 4)
    with pytest.raises(StoreError, match=r"overloaded or broken \(503 SlowDown\) after 4 tries; run again later"):
        store.put_if("head", b"3", None)
    assert store.get("head") == b"2"


def test_a_leased_write_whose_answer_is_lost_is_read_back(ignoring: Front, bucket: str) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    ignoring.harm("PUT", pass_on, *[lose_answer] * s3_connection.TRIES)  # after the lease
    second = store.put_if("head", b"2", first)
    assert store.find("head") == (b"2", second)
    ignoring.harm("PUT", pass_on, *[reset_upload] * s3_connection.TRIES)
    with pytest.raises(TransientStoreError):
        store.put_if("head", b"3" * 10**6, second)
    assert store.find("head") == (b"2", second)


def test_the_sum_of_many_writers_is_right_where_conditions_are_ignored(ignoring: Front, bucket: str) -> None:
    def count(_: int) -> None:
        store = S3Store(bucket, "prefix")
        for _ in range(3):
            while True:
                data, etag = store.find("counter") or (b"0", None)
                try:
                    store.put_if("counter", b"%d" % (int(data) + 1), etag)
                    break
                except ConflictError:
                    continue

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert S3Store(bucket, "prefix").get("counter") == b"12"


def test_a_server_of_another_kind_is_not_taken_for_a_lost_race(s3_endpoint: str, bucket: str, monkeypatch) -> None:
    with front_of(s3_endpoint) as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        front.harm("PUT", *[refuse(403, "AccessDenied")] * 8)
        with pytest.raises(StoreError, match=r"s3:PutObject on s3://bucket-\d+/prefix/.swap/probe-"):
            S3Store(bucket, "prefix").put_if("head", b"1", None)
