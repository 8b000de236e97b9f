"""A step waits for a store that is unreachable or overloaded, in one place, for a limited time."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from evernear.common.progress import EVENTS_VARIABLE, read_events, step
from evernear.common.store import patience
from evernear.common.store.patience import patient
from evernear.common.store.s3 import S3Store
from evernear.errors import ConflictError, StoreError, TransientStoreError
from tests.real.common.store.faulty import FaultyProxy, lose_response, page, refuse, reset_upload

pytestmark = pytest.mark.usefixtures("quick")
BUSY = refuse(503, "SlowDown")
MANY = 14
"""More faults than the attempts of one request."""
OPERATIONS: dict[str, tuple[str, Callable[[S3Store, Path], object]]] = {
    "get": ("GET", lambda store, _: store.get("a/x")),
    "reader": ("GET", lambda store, _: store.reader()("a/x")),
    "fetch": ("GET", lambda store, path: store.fetch("a/x", path / "x").read_bytes()),
    "list": ("GET", lambda store, _: [info.key for info in store.list("")]),
    "folders": ("GET", lambda store, _: list(store.folders())),
    "put bytes": ("PUT", lambda store, _: store.put("a/x", b"content")),
    "put a file": ("PUT", lambda store, path: store.put("a/x", path / "given")),
    "put_if": ("PUT", lambda store, _: store.put_if("a/y", b"content", None)),
    "delete": ("DELETE", lambda store, _: store.delete("a/y")),
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSES_S", (0.01, 0.01))


@pytest.fixture
def patient_store(faulty_proxy: FaultyProxy, bucket: str) -> S3Store:
    store = S3Store(bucket, "prefix")
    store.put("a/x", b"content")
    store.put_if("a/z", b"", None)  # the probe is not repeated
    faulty_proxy.forget()
    return store


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_waits_in_a_step_alone(
    faulty_proxy: FaultyProxy, patient_store: S3Store, operation: str, tmp_path: Path
) -> None:
    method, act = OPERATIONS[operation]
    (tmp_path / "given").write_bytes(b"content")
    expected = act(patient_store, tmp_path)
    if operation == "put_if":
        patient_store.delete("a/y")
    reports = list[str]()
    faulty_proxy.inject(method, *[BUSY] * MANY)
    with patient(reports.append):
        assert act(patient_store, tmp_path) == expected
    (report,) = reports  # at most one in ten seconds
    assert report.startswith("waiting for the store, 60 s left: http://")
    assert "503 SlowDown" in report
    if operation == "put_if":
        patient_store.delete("a/y")
    faulty_proxy.inject(method, *[BUSY] * MANY)
    with pytest.raises(TransientStoreError):
        act(patient_store, tmp_path)


@pytest.mark.parametrize("fault", [lose_response, reset_upload, page(504)])
def test_conditional_write_is_executed_once_however_long_it_takes(
    faulty_proxy: FaultyProxy, patient_store: S3Store, fault: Callable[..., None]
) -> None:
    etag = patient_store.put_if("pointer", b"1", None)
    faulty_proxy.inject("PUT", *[fault] * MANY)
    faulty_proxy.inject("HEAD", *[BUSY] * MANY)
    with patient(lambda _: None):
        second = patient_store.put_if("pointer", b"2", etag)
    assert patient_store.find("pointer") == (b"2", second)
    with patient(lambda _: None), pytest.raises(ConflictError):
        patient_store.put_if("pointer", b"3", etag)


def test_refusals_are_not_waited_for(faulty_proxy: FaultyProxy, patient_store: S3Store) -> None:
    faulty_proxy.inject("GET", refuse(403, "AccessDenied"))
    with patient(pytest.fail), pytest.raises(StoreError, match="is not permitted"):
        patient_store.get("a/x")


def test_pod_waits_longer_and_an_exhausted_outage_is_not_waited_for_again(
    faulty_proxy: FaultyProxy, patient_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    reports = list[str]()
    faulty_proxy.inject("GET", *[BUSY] * 4)
    with patient(reports.append):
        patient_store.get("a/x")
    assert reports[0].startswith("waiting for the store, 600 s left: ")
    monkeypatch.setattr(patience, "IN_A_POD_S", 0.0)
    with patient(pytest.fail):
        for _ in range(2):
            faulty_proxy.forget()
            faulty_proxy.inject("GET", *[BUSY] * 4)
            with pytest.raises(TransientStoreError):
                patient_store.get("a/x")
            assert faulty_proxy.count("GET") == 4
        assert patient_store.get("a/x") == b"content"


def test_threads_of_a_step_wait_too(faulty_proxy: FaultyProxy, patient_store: S3Store) -> None:
    read = list[bytes]()
    faulty_proxy.inject("GET", *[BUSY] * MANY)
    with patient(lambda _: None):
        thread = threading.Thread(target=lambda: read.append(patient_store.get("a/x")))
        thread.start()
        thread.join()
    assert read == [b"content"]


def test_step_says_that_it_waits(
    faulty_proxy: FaultyProxy, patient_store: S3Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(EVENTS_VARIABLE, str(tmp_path / "events.jsonl"))
    with step("index", "run", patient_store.uri) as running:
        faulty_proxy.inject("GET", *[BUSY] * MANY)
        patient_store.get("a/x")
        running.summary = "done"
    events, _ = read_events(tmp_path / "events.jsonl")
    assert [event.kind for event in events] == ["started", "progress", "finished"]
    assert events[1].message.startswith("waiting for the store, 60 s left: ")
