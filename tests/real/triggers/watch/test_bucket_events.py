"""Bucket notifications from a loopback MinIO that streams, ends, refuses, or is another server."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from evernear.errors import SettingsError, StoreError
from evernear.triggers.watch.bucket_events import listen
from tests.real.triggers.watch.notifying_minio import KEYS, Minio, notifying_minio

SOURCE = "s3://images/incoming"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def listen_in_thread(minio: Minio, monkeypatch: pytest.MonkeyPatch, on_change: Callable[[], None]) -> threading.Thread:
    monkeypatch.setenv("AWS_ENDPOINT_URL", minio.url)
    thread = threading.Thread(target=listen, args=(SOURCE, on_change))
    thread.start()
    await_(lambda: minio.streams)
    return thread


def await_(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_changes_of_the_source_are_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_s: list[float] = []
    with notifying_minio() as minio:
        thread = listen_in_thread(minio, monkeypatch, lambda: calls_s.append(time.monotonic()))
        await_(lambda: len(calls_s) == 1)  # the stream stands
        assert minio.filters == [
            {"prefix": ["incoming/"], "suffix": [""], "events": ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]}
        ]
        time.sleep(1.2)  # blanks are not events
        assert len(calls_s) == 1
        minio.notify("elsewhere/7/a.png")
        for number in range(3):
            minio.notify(f"incoming/7/{number}.png")
        await_(lambda: len(calls_s) == 4)
        minio.end_streams()
        thread.join(timeout=10)
        assert not thread.is_alive()
        assert len(calls_s) == 4
        assert len(minio.filters) == 1, "the end of the stream ends the listener"


@pytest.mark.parametrize("kind", ["list", "not implemented"])
def test_server_without_notifications_is_recognized(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with notifying_minio(kind) as minio:
        monkeypatch.setenv("AWS_ENDPOINT_URL", minio.url)
        with pytest.raises(match="has no bucket notifications"):
            listen(SOURCE, lambda: pytest.fail("nothing changed"))


@pytest.mark.skipif("TEST_S3_URL" in os.environ, reason="it may be MinIO")
def test_moto_is_a_server_without_notifications(bucket: str) -> None:
    with pytest.raises(SettingsError):
        listen(f"s3://{bucket}/images", lambda: pytest.fail("nothing changed"))


def test_aws_gets_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with pytest.raises(match=r"s3\.amazonaws\.com has no bucket notifications"):
        listen(SOURCE, lambda: pytest.fail("nothing changed"))


@pytest.mark.parametrize("source", ["folder:/images", "digits"])
def test_sources_other_than_buckets_have_no_notifications(source: str) -> None:
    with pytest.raises(match="on the schedule"):
        listen(source, lambda: pytest.fail("nothing changed"))


def test_refusals_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with notifying_minio("denied") as minio:
        monkeypatch.setenv("AWS_ENDPOINT_URL", minio.url)
        with pytest.raises(StoreError, match="s3:ListenBucketNotification on s3://images/incoming is not permitted"):
            listen(SOURCE, lambda: None)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
        with pytest.raises(StoreError, match="does not accept the keys"):
            listen(SOURCE, lambda: None)


def test_unreachable_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with notifying_minio() as minio:
        url = minio.url
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setattr("evernear.common.store.s3_connection.MAX_ATTEMPTS", 1)
    with pytest.raises(StoreError, match="cannot be reached"):
        listen(SOURCE, lambda: None)
