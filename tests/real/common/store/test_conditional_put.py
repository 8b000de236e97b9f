"""Compare-and-swap on a server that supports it, and the refusal of servers that ignore or reject
conditions."""

import re
from typing import Any

import pytest

from evernear.cli.doctor import check
from evernear.common.store import s3_connection
from evernear.common.store.s3 import S3Store
from evernear.errors import ConflictError, StoreError, TransientStoreError
from evernear.settings import Settings
from tests.real.common.store.faulty import (
    DelayedRequest,
    Fault,
    FaultyProxy,
    forward,
    lose_response,
    page,
    refuse,
    reset_upload,
    start_faulty_proxy,
)

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def atomic(faulty_proxy: FaultyProxy) -> FaultyProxy:
    """A server that checks and writes atomically, like AWS."""
    return faulty_proxy


@pytest.fixture
def early(altering_proxy: FaultyProxy) -> FaultyProxy:
    """A server that rejects a failed conditional write before reading its body, then resets, like
    MinIO."""
    altering_proxy.refuses_early = True
    return altering_proxy


@pytest.mark.parametrize(
    ("ignored_headers", "winners"),
    [
        ({"If-Match", "If-None-Match"}, "8 of 8 concurrent writers created an object and 8 replaced it"),
        ({"If-None-Match"}, "8 of 8 concurrent writers created an object and [01] replaced it"),
        ({"If-Match"}, "1 of 8 concurrent writers created an object and 8 replaced it"),
    ],
)
def test_server_that_ignores_conditions_is_refused_before_the_write(
    altering_proxy: FaultyProxy, bucket: str, ignored_headers: set[str], winners: str
) -> None:
    """Like SeaweedFS before 3.97."""
    altering_proxy.ignored_headers = frozenset(ignored_headers)
    (finding,) = check(Settings(store=f"s3://{bucket}/prefix"), ["store"])
    assert not finding.ok
    assert re.search(winners, finding.message)
    store = S3Store(bucket, "prefix")
    store.put("head", b"1")
    for etag in (None, "0" * 32):
        with pytest.raises(StoreError, match=rf"^http://\S+ does not support .*: {winners}, .*; use AWS, ") as raised:
            store.put_if("head", b"2", etag)
        assert not isinstance(raised.value, ConflictError | TransientStoreError)
    assert store.get("head") == b"1"
    assert [item.object_name for item in store._client.list_objects(bucket, recursive=True)] == ["prefix/head"]


def test_server_that_rejects_conditions_is_refused(altering_proxy: FaultyProxy, bucket: str) -> None:
    """Like OpenStack Swift."""
    altering_proxy.inject("PUT", *[refuse(501, "NotImplemented")] * 8)
    with pytest.raises(StoreError, match="0 of 8 concurrent writers created an object and 0 replaced it"):
        S3Store(bucket, "prefix").put_if("head", b"1", None)


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
    assert second.race_winners
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
    assert S3Store(bucket, "prefix").race_winners == (1, 1)
    atomic.inject("DELETE", *[lose_response] * s3_connection.MAX_ATTEMPTS)
    assert S3Store(bucket, "prefix").race_winners == (1, 1)


def test_early_rejection_is_a_conflict(early: FaultyProxy, bucket: str) -> None:
    for _ in range(5):
        assert S3Store(bucket, "prefix").race_winners == (1, 1)
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


def test_missing_permission_is_not_reported_as_a_conflict(s3_endpoint: str, bucket: str, monkeypatch) -> None:
    with start_faulty_proxy(s3_endpoint) as faulty_proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty_proxy.url)
        faulty_proxy.inject("PUT", *[refuse(403, "AccessDenied")] * 8)
        with pytest.raises(StoreError, match=r"s3:PutObject on s3://bucket-\d+/prefix/.swap/probe-"):
            S3Store(bucket, "prefix").put_if("head", b"1", None)
