"""Compare-and-swap on servers that support it, ignore it, reject it or implement it non-atomically."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import BytesIO
from typing import Any

import pytest
from faulty import (
    DelayedRequest,
    Fault,
    FaultyProxy,
    empty_listing,
    forward,
    lose_response,
    page,
    refuse,
    reset_upload,
    start_faulty_proxy,
)

from evernear.errors import ConflictError, StoreError, TransientStoreError
from evernear.store import S3Store, conditional_put, s3_connection

pytestmark = pytest.mark.usefixtures("quick")

SERVERS = ["atomic", "ignoring", "swift"]


@pytest.fixture
def atomic(faulty_proxy: FaultyProxy) -> FaultyProxy:
    """A server that checks and writes atomically, like AWS."""
    return faulty_proxy


@pytest.fixture
def ignoring(altering_proxy: FaultyProxy) -> FaultyProxy:
    """A server that ignores conditions, like SeaweedFS before 3.97."""
    altering_proxy.ignored_headers = frozenset({"If-Match", "If-None-Match"})
    return altering_proxy


@pytest.fixture
def early(altering_proxy: FaultyProxy) -> FaultyProxy:
    """A server that rejects a failed conditional write before reading its body, then resets, like MinIO."""
    altering_proxy.refuses_early = True
    return altering_proxy


@pytest.fixture(params=SERVERS)
def connect(request: pytest.FixtureRequest) -> Callable[[], S3Store]:
    """``connect()`` opens the same store for another writer."""
    if request.param == "swift":
        bucket = request.getfixturevalue("swift_bucket")
    else:
        request.getfixturevalue(request.param)
        bucket = request.getfixturevalue("bucket")
    return lambda: S3Store(bucket, "prefix")


def test_probe_classifies_servers(connect, request: pytest.FixtureRequest) -> None:
    created, replaced = connect()._conditional_writer.race_winners
    server = request.node.callspec.params["connect"]
    if server == "atomic":
        assert (created, replaced) == (1, 1)
    elif server == "ignoring":
        assert (created, replaced) == (8, 8)
    else:
        # Swift supports If-None-Match, not always atomically, and returns 501 for If-Match.
        assert created >= 1
        assert replaced == 0


def test_conditional_put_rejects_a_stale_etag(connect) -> None:
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


def test_exactly_one_concurrent_writer_succeeds(connect) -> None:
    writers = [connect() for _ in range(3)]
    for writer in writers:
        assert writer._conditional_writer.race_winners  # each has probed the server
    etag: str | None = None
    for round_number in range(2):
        start = threading.Barrier(len(writers), timeout=60)

        def write(store: S3Store, data: bytes, etag: str | None, start: threading.Barrier) -> str | None:
            start.wait()
            try:
                return store.put_if("champion", data, etag)
            except ConflictError:
                return None

        offers = [b"%d-%d" % (round_number, number) for number in range(len(writers))]
        with ThreadPoolExecutor(len(writers)) as pool:
            new_etags = list(pool.map(write, writers, offers, [etag] * 3, [start] * 3))
        ((written, etag),) = [(data, new) for data, new in zip(offers, new_etags, strict=True) if new]
        assert connect().find("champion") == (written, etag)


def test_probe_leaves_no_objects(connect) -> None:
    store = connect()
    store.put_if("a/head", b"1", None)
    assert [info.key for info in store.list("")] == ["a/head"]
    assert list(store.folders()) == ["a"]
    objects = store._client.list_objects(store.bucket, recursive=True)
    assert [item.object_name for item in objects] == ["prefix/a/head"]


def _create_lease(store: S3Store) -> str:
    name = "prefix/.swap/leases/a--head/0123"
    store._client.put_object(store.bucket, name, BytesIO(b""), 0)
    return name


def test_active_lease_is_awaited_and_named(ignoring: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(bucket, "prefix")
    name = _create_lease(store)
    monkeypatch.setattr(conditional_put, "_LEASE_TIMEOUT_S", 0.5)
    with pytest.raises(StoreError, match=f"Another writer holds s3://{bucket}/{name}; .* after 20 minutes") as raised:
        store.put_if("a/head", b"1", None)
    # The outcome is known: nothing was written, so the object need not be read back.
    assert not isinstance(raised.value, ConflictError)
    assert store.find("a/head") is None
    # Other pointers are not blocked.
    store.put_if("b/head", b"1", None)

    release = threading.Timer(0.5, store._client.remove_object, (bucket, name))
    monkeypatch.setattr(conditional_put, "_LEASE_TIMEOUT_S", 30)
    release.start()
    store.put_if("a/head", b"1", None)
    release.join()
    assert store.get("a/head") == b"1"


def test_lease_of_a_killed_writer_expires(ignoring: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(bucket, "prefix")
    _create_lease(store)
    monkeypatch.setattr(conditional_put, "_STALE_AFTER", timedelta(seconds=1))
    store.put_if("a/head", b"1", None)
    assert list(store._client.list_objects(bucket, "prefix/.swap/", recursive=True)) == []


def test_frozen_holder_does_not_write(ignoring: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional_put, "_LEASE_WRITE_WINDOW_S", 0.0)
    store = S3Store(bucket, "prefix")
    with pytest.raises(StoreError, match="too slow to hold a lease; nothing was written"):
        store.put_if("head", b"1", None)
    assert store.find("head") is None


def test_stale_listing_is_rejected(ignoring: FaultyProxy, bucket: str) -> None:
    store = S3Store(bucket, "prefix")
    assert store._conditional_writer.race_winners == (8, 8)
    ignoring.inject("GET", empty_listing)
    with pytest.raises(StoreError, match="does not list an object right after its write; no pointer can move"):
        store.put_if("head", b"1", None)
    assert store.find("head") is None


def time_out(handler: Any) -> None:
    """Execute the request and return a gateway timeout."""
    handler.forward()
    page(504)(handler)


@pytest.mark.parametrize("fault", [lose_response, time_out])
def test_write_with_a_lost_response_is_read_back(atomic: FaultyProxy, bucket: str, fault: Fault) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    atomic.forget()
    atomic.inject("PUT", fault)
    second = store.put_if("head", b"2", first)
    assert (atomic.count("PUT"), atomic.count("HEAD")) == (1, 1)
    assert store.find("head") == (b"2", second)


@pytest.mark.parametrize("fault", [reset_upload, page(502)])
def test_interrupted_write_is_retried(atomic: FaultyProxy, bucket: str, fault: Fault) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    atomic.forget()
    atomic.inject("PUT", fault)
    second = store.put_if("head", b"2" * 10**6, first)
    assert atomic.count("PUT") == 2
    assert store.find("head") == (b"2" * 10**6, second)

    atomic.inject("PUT", *[fault] * 4)
    with pytest.raises(TransientStoreError, match=r"broke off whenever .*/head was written, and the object is un"):
        store.put_if("head", b"3" * 10**6, second)
    assert store.find("head") == (b"2" * 10**6, second)


def test_delayed_write_is_recognized_as_own(atomic: FaultyProxy, bucket: str) -> None:
    store, late = S3Store(bucket, "prefix"), DelayedRequest()
    first = store.put_if("head", b"1", None)
    atomic.inject("PUT", late.disconnect, late.execute)
    second = store.put_if("head", b"2", first)
    assert store.find("head") == (b"2", second)


def test_one_of_two_identical_writes_succeeds_despite_a_lost_response(atomic: FaultyProxy, bucket: str) -> None:
    first, second = S3Store(bucket, "prefix"), S3Store(bucket, "prefix")
    first.put_if("claim", b"mine", None)
    assert second._conditional_writer.race_winners
    atomic.inject("PUT", lose_response)
    with pytest.raises(ConflictError):
        second.put_if("claim", b"mine", None)


def test_overtaken_writer_gets_a_conflict(atomic: FaultyProxy, bucket: str) -> None:
    store, other = S3Store(bucket, "prefix"), S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)

    def write_first(handler: Any) -> None:
        other.put("head", b"3")
        forward(handler)

    atomic.inject("PUT", lose_response)
    atomic.inject("HEAD", write_first)
    with pytest.raises(ConflictError):
        store.put_if("head", b"2", first)
    assert store.get("head") == b"3"


def test_outcome_is_unknown_only_if_the_object_cannot_be_read_back(atomic: FaultyProxy, bucket: str) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    atomic.inject("PUT", lose_response)
    atomic.inject("HEAD", *[lose_response] * s3_connection.MAX_ATTEMPTS)
    with pytest.raises(TransientStoreError, match=r"not known whether it was, since it cannot be read either: http://"):
        store.put_if("head", b"2", first)


def test_probe_survives_broken_connections(atomic: FaultyProxy, bucket: str) -> None:
    atomic.inject("PUT", *[lose_response] * 12)
    assert S3Store(bucket, "prefix")._conditional_writer.race_winners == (1, 1)
    atomic.inject("DELETE", *[lose_response] * s3_connection.MAX_ATTEMPTS)
    assert S3Store(bucket, "prefix")._conditional_writer.race_winners == (1, 1)


def test_early_rejection_is_a_conflict(early: FaultyProxy, bucket: str) -> None:
    for _ in range(5):
        assert S3Store(bucket, "prefix")._conditional_writer.race_winners == (1, 1)
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    for etag in (None, "0" * 32):
        # Larger than the socket buffers, so that the reset arrives during the upload.
        with pytest.raises(ConflictError):
            store.put_if("head", b"2" * 2**24, etag)
    assert store.find("head") == (b"1", first)


def test_throttled_write_is_retried(atomic: FaultyProxy, bucket: str) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    atomic.forget()
    atomic.inject("PUT", refuse(503, "SlowDown"), refuse(503, "SlowDown"))
    store.put_if("head", b"2", first)
    assert atomic.count("PUT") == 3
    assert store.get("head") == b"2"

    atomic.inject("PUT", *[refuse(503, "SlowDown")] * 4)
    with pytest.raises(StoreError, match=r"overloaded or broken \(503 SlowDown\) after 4 attempts; run again later"):
        store.put_if("head", b"3", None)
    assert store.get("head") == b"2"


def test_leased_write_with_a_lost_response_is_read_back(ignoring: FaultyProxy, bucket: str) -> None:
    store = S3Store(bucket, "prefix")
    first = store.put_if("head", b"1", None)
    ignoring.inject("PUT", forward, *[lose_response] * s3_connection.MAX_ATTEMPTS)  # after the lease
    second = store.put_if("head", b"2", first)
    assert store.find("head") == (b"2", second)
    ignoring.inject("PUT", forward, *[reset_upload] * s3_connection.MAX_ATTEMPTS)
    with pytest.raises(TransientStoreError):
        store.put_if("head", b"3" * 10**6, second)
    assert store.find("head") == (b"2", second)


def test_concurrent_increments_are_not_lost_without_conditional_writes(ignoring: FaultyProxy, bucket: str) -> None:
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


def test_unsupported_server_is_not_reported_as_a_conflict(s3_endpoint: str, bucket: str, monkeypatch) -> None:
    with start_faulty_proxy(s3_endpoint) as faulty_proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty_proxy.url)
        faulty_proxy.inject("PUT", *[refuse(403, "AccessDenied")] * 8)
        with pytest.raises(StoreError, match=r"s3:PutObject on s3://bucket-\d+/prefix/.swap/probe-"):
            S3Store(bucket, "prefix").put_if("head", b"1", None)
