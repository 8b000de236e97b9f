"""The real client at a loopback MinIO that streams, ends, refuses, or is another server altogether."""

import os
import threading
import time
from collections.abc import Callable

import pytest
from telling_minio import KEYS, Minio, telling_minio

from evernear.errors import StoreError
from evernear.triggers.watch.events import Untold, listen

SOURCE = "s3://images/incoming"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def listening(minio: Minio, monkeypatch: pytest.MonkeyPatch, on_change: Callable[[], None]) -> threading.Thread:
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


def test_a_change_is_told_when_it_happens_and_only_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    with telling_minio() as minio:
        thread = listening(minio, monkeypatch, lambda: told.append(time.monotonic()))
        await_(lambda: len(told) == 1)  # the stream stands
        assert minio.asked == [
            {"prefix": ["incoming/"], "suffix": [""], "events": ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]}
        ]
        time.sleep(1.2)  # blanks are no events
        assert len(told) == 1
        minio.tell("elsewhere/7/a.png")
        for number in range(3):
            minio.tell(f"incoming/7/{number}.png")
        await_(lambda: len(told) == 4)
        minio.end_streams()
        thread.join(timeout=10)
        assert not thread.is_alive()
        assert len(told) == 4
        assert len(minio.asked) == 1, "the client alone would ask again at once, for ever"


@pytest.mark.parametrize("kind", ["list", "not implemented"])
def test_a_server_that_knows_no_such_stream_is_not_asked_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with telling_minio(kind) as minio:
        monkeypatch.setenv("AWS_ENDPOINT_URL", minio.url)
        with pytest.raises(Untold, match="does not tell of changes in its buckets"):
            listen(SOURCE, lambda: pytest.fail("nothing changed"))


@pytest.mark.skipif("TEST_S3_URL" in os.environ, reason="it may be MinIO, which tells")
def test_moto_is_such_a_server(bucket: str) -> None:
    with pytest.raises(Untold):
        listen(f"s3://{bucket}/images", lambda: pytest.fail("nothing changed"))


def test_aws_is_not_even_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with pytest.raises(Untold, match=r"s3\.amazonaws\.com does not tell of changes"):
        listen(SOURCE, lambda: pytest.fail("nothing changed"))


@pytest.mark.parametrize("source", ["folder:/images", "digits"])
def test_what_is_no_bucket_tells_nothing(source: str) -> None:
    with pytest.raises(Untold, match="on the schedule"):
        listen(source, lambda: pytest.fail("nothing changed"))


def test_what_is_not_permitted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with telling_minio("denied") as minio:
        monkeypatch.setenv("AWS_ENDPOINT_URL", minio.url)
        with pytest.raises(StoreError, match="s3:ListenBucketNotification on s3://images/incoming is not permitted"):
            listen(SOURCE, lambda: None)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
        with pytest.raises(StoreError, match="does not accept the keys"):
            listen(SOURCE, lambda: None)


def test_a_server_that_is_gone_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with telling_minio() as minio:
        url = minio.url
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setattr("evernear.store.s3_connection.TRIES", 1)
    with pytest.raises(StoreError, match="cannot be reached"):
        listen(SOURCE, lambda: None)
