"""Network faults and overloaded servers: writes are atomic, requests are retried, and failures are
reported."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path

import pytest

from evernear.common.disk import sha256_bytes
from evernear.common.store import open_store, s3_connection
from evernear.common.store.s3 import S3Store
from evernear.errors import EvernearError, IntegrityError, SettingsError, StoreError
from tests.certificates import server_tls, write_certificate
from tests.real.common.store.faulty import (
    Fault,
    FaultyProxy,
    flip,
    hang,
    lose_response,
    page,
    refuse,
    reset_download,
    reset_upload,
    start_faulty_proxy,
    truncate,
)

pytestmark = pytest.mark.usefixtures("quick")

DATA = os.urandom(300_000)
DOWNLOAD_FAULTS = [truncate, reset_download, flip, refuse(503, "SlowDown"), refuse(500, "InternalError"), page(502)]
UPLOAD_FAULTS = [reset_upload, lose_response, refuse(503, "SlowDown"), page(504)]


@pytest.fixture
def faulty_store(faulty_proxy: FaultyProxy, bucket: str) -> S3Store:
    store = S3Store(bucket, "prefix")
    store.put("x", DATA)
    faulty_proxy.forget()
    return store


def _sentence(error: EvernearError) -> str:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def by_reader(faulty_proxy: FaultyProxy) -> list[bool]:
    """For each received request, whether it came from the client that `Store.reader` prefers."""
    return [any("object_store" in value for value in request.headers.values()) for request in faulty_proxy.requests]


@pytest.mark.parametrize("fault", DOWNLOAD_FAULTS)
def test_interrupted_read_is_retried(
    faulty_proxy: FaultyProxy, faulty_store: S3Store, tmp_path: Path, fault: Fault
) -> None:
    faulty_proxy.inject("GET", fault)
    assert faulty_store.get("x") == DATA
    faulty_proxy.inject("GET", fault)
    assert faulty_store.fetch("x", tmp_path / "x", sha256_bytes(DATA)).read_bytes() == DATA
    assert [info.key for info in faulty_store.list("")] == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    faulty_proxy.forget()
    faulty_proxy.inject("GET", fault)
    assert faulty_store.reader()("x") == DATA
    assert by_reader(faulty_proxy) == [True, False]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (truncate, r"The transfer of s3://bucket-\d+/prefix/x was interrupted \(.*\); run again\."),
        (reset_download, r"The transfer of s3://bucket-\d+/prefix/x was interrupted \(.*\); run again\."),
        (
            refuse(503, "SlowDown"),
            r"http://.* is overloaded or broken \(503 SlowDown\) after 4 attempts; run again later\.",
        ),
        (page(502), r"http://.* does not behave like S3 \(.*502.*\); check AWS_ENDPOINT_URL\."),
        (flip, r"s3://bucket-\d+/prefix/x is damaged: its content does not have the sha256 [0-9a-f]{64}\."),
    ],
)
def test_failed_read_leaves_the_existing_file(
    faulty_proxy: FaultyProxy, faulty_store: S3Store, tmp_path: Path, fault: Fault, sentence: str
) -> None:
    (tmp_path / "x").write_bytes(b"old")
    faulty_proxy.inject("GET", *[fault] * 8)
    with pytest.raises((StoreError, IntegrityError), match=sentence) as raised:
        faulty_store.fetch("x", tmp_path / "x")
    assert raised.value.exit_code == (3 if fault is flip else 4)
    assert faulty_proxy.count("GET") <= s3_connection.MAX_ATTEMPTS
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("fault", UPLOAD_FAULTS)
def test_failed_write_is_retried(faulty_proxy: FaultyProxy, faulty_store: S3Store, fault: Fault) -> None:
    faulty_proxy.inject("PUT", fault)
    faulty_store.put("x", DATA[::-1])
    assert faulty_proxy.count("PUT") == 2
    assert faulty_store.get("x") == DATA[::-1]


@pytest.mark.parametrize("fault", [reset_upload, refuse(503, "SlowDown"), page(504)])
def test_failed_write_leaves_the_old_object(faulty_proxy: FaultyProxy, faulty_store: S3Store, fault: Fault) -> None:
    faulty_proxy.inject("PUT", *[fault] * 8)
    with pytest.raises(StoreError) as raised:
        faulty_store.put("x", b"new")
    _sentence(raised.value)
    assert faulty_proxy.count("PUT") == s3_connection.MAX_ATTEMPTS
    faulty_proxy.forget()
    assert faulty_store.get("x") == DATA


def test_large_file_upload_is_atomic(faulty_proxy: FaultyProxy, faulty_store: S3Store, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(11 * 2**20))
    faulty_proxy.inject("PUT", reset_upload, refuse(503, "SlowDown"))
    faulty_store.put("large", large)
    assert faulty_store.get("large") == large.read_bytes()

    faulty_proxy.inject("PUT", *[reset_upload] * 40)
    with pytest.raises(StoreError):
        faulty_store.put("other", large)
    assert faulty_store.find("other") is None
    # The uploaded parts were removed.
    assert faulty_proxy.count("DELETE") == 1


def test_object_damaged_at_rest_is_rejected(faulty_proxy: FaultyProxy, faulty_store: S3Store, tmp_path: Path) -> None:
    # The content changes, but the recorded hash does not.
    metadata = {"sha256": sha256_bytes(DATA)}
    faulty_store._client.put_object(faulty_store.bucket, "prefix/y", BytesIO(b"other"), 5, metadata=metadata)
    for read in (
        lambda: faulty_store.get("y"),
        lambda: faulty_store.find("y"),
        lambda: faulty_store.fetch("y", tmp_path / "y"),
    ):
        with pytest.raises(IntegrityError, match="prefix/y is damaged"):
            read()
    assert list(tmp_path.iterdir()) == []


def test_unresponsive_server_times_out(faulty_proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_connection, "READ_TIMEOUT_S", 0.2)
    store = S3Store(bucket, "prefix")
    faulty_proxy.inject("GET", *[hang] * 4)
    with pytest.raises(StoreError, match=r"cannot be reached: .*[Rr]ead timed out"):
        store.get("x")
    assert faulty_proxy.count("GET") == s3_connection.MAX_ATTEMPTS


def test_clock_skew_is_named(faulty_proxy: FaultyProxy, faulty_store: S3Store) -> None:
    late = (datetime.now(UTC) + timedelta(hours=2)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    faulty_proxy.inject("GET", refuse(403, "RequestTimeTooSkewed", Date=late))
    with pytest.raises(
        StoreError, match=r"clocks of this machine and http://.* differ by (7199|7200) s.*set this machine's clock"
    ):
        faulty_store.get("x")


@pytest.mark.parametrize(
    ("method", "fault", "sentence"),
    [
        ("PUT", refuse(403, "ExpiredToken"), r"does not accept the keys \(ExpiredToken\); check AWS_ACCESS_KEY_ID"),
        ("PUT", refuse(400, "BadDigest"), r"upload of s3://.*/x was damaged in transit .*nothing was stored"),
        ("PUT", refuse(400, "XAmzContentSHA256Mismatch"), r"upload of s3://.*/x was damaged in transit"),
        ("GET", refuse(400, "AuthorizationHeaderMalformed"), r"is not in the region us-east-1 .*set AWS_REGION"),
        (
            "GET",
            refuse(403, "InvalidObjectState"),
            r"refused s3:GetObject on s3://.*/x: InvalidObjectState, sorry\. The object is archived \(S3 Glacier\)",
        ),
        ("GET", flip, "sent an invalid response about s3://"),
    ],
)
def test_refusal_is_named(
    faulty_proxy: FaultyProxy, faulty_store: S3Store, method: str, fault: Fault, sentence: str
) -> None:
    acts = {"GET": lambda: faulty_store.get("x"), "PUT": lambda: faulty_store.put("x", DATA)}
    faulty_proxy.inject(method, *[fault] * 4)
    with pytest.raises(StoreError, match=sentence):
        list(faulty_store.list("")) if fault is flip else acts[method]()


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with start_faulty_proxy(s3_endpoint) as faulty_proxy:
        yield faulty_proxy


def test_proxy_from_the_environment_is_used(proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//me:p%40ss@"))
    store = open_store(f"s3://{bucket}/prefix")
    store.put_if("x", b"1", None)
    assert store.get("x") == b"1"
    assert {request.path.split("?")[0].split("/")[1] for request in proxy.requests} == {bucket}
    # base64 of me:p@ss
    assert store.reader()("x") == b"1"
    assert by_reader(proxy)[-2:] == [False, True]
    assert all(request.headers["proxy-authorization"] == "Basic bWU6cEBzcw==" for request in proxy.requests)

    proxy.forget()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    store = open_store(f"s3://{bucket}/prefix")
    assert store.get("x") == store.reader()("x") == b"1"
    assert proxy.requests == []


def test_urls_are_path_style_and_signed_for_the_region(
    faulty_proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variables, region in (({"AWS_REGION": "eu-west-3"}, "eu-west-3"), ({"AWS_REGION": ""}, "us-east-1")):
        faulty_proxy.forget()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        store = open_store(f"s3://{bucket}/prefix")
        store.find("x")
        store.put_if(f"y-{region}", b"1", None)
        assert all(request.path.startswith(f"/{bucket}") for request in faulty_proxy.requests)
        assert all(
            f"/{region}/s3/aws4_request" in request.headers["Authorization"] for request in faulty_proxy.requests
        )


def test_https_requires_a_trusted_certificate(
    s3_endpoint: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, _ = write_certificate(tmp_path)
    with start_faulty_proxy(s3_endpoint, server_tls()) as faulty_proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty_proxy.url)
        with pytest.raises(StoreError, match=r"https://.* cannot be trusted: .*certificate.*; AWS_CA_BUNDLE may name"):
            S3Store(bucket, "prefix").put("x", DATA)
        with pytest.raises(StoreError, match="cannot be trusted"):
            S3Store(bucket, "prefix").reader()("x")
        assert faulty_proxy.requests == []
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
        store = S3Store(bucket, "prefix")
        store.put("x", DATA)
        store.put_if("y", DATA, None)
        assert store.get("x") == store.get("y") == store.reader()("x") == DATA
        assert by_reader(faulty_proxy)[-3:] == [False, False, True]
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.with_name("absent.pem")))
    with pytest.raises(SettingsError, match=r"^AWS_CA_BUNDLE=.*absent\.pem cannot be used: No such file"):
        S3Store(bucket, "prefix")


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("AWS_SECRET_ACCESS_KEY", "", "secret key must not be empty"),
        ("AWS_ACCESS_KEY_ID", "", "AWS_SECRET_ACCESS_KEY is set without AWS_ACCESS_KEY_ID"),
        ("AWS_REGION", "nowhere land", "invalid region"),
        ("AWS_ENDPOINT_URL", "http://[minio:9000", "AWS_ENDPOINT_URL='http://.minio:9000' is not of the form"),
        ("AWS_ENDPOINT_URL", "http://minio:port", "is not of the form"),
        ("AWS_ENDPOINT_URL", "http://minio:9000?region=x", "is not of the form"),
        ("AWS_ENDPOINT_URL", "http://:9000", "is not of the form"),
        ("AWS_CA_BUNDLE", "/", "AWS_CA_BUNDLE=/ cannot be used: Is a directory"),
        ("AWS_CA_BUNDLE", __file__, "cannot be used: .*no certificate"),
        ("HTTP_PROXY", "socks5://127.0.0.1:1", "HTTP_PROXY or HTTPS_PROXY is not of the form"),
        ("HTTP_PROXY", "http://proxy:port", "HTTP_PROXY or HTTPS_PROXY is not of the form"),
    ],
)
def test_invalid_environment_is_named(
    bucket: str, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=sentence):
        S3Store(bucket, "prefix")


def test_missing_keys_are_reported(faulty_proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    store = S3Store(bucket, "prefix")
    faulty_proxy.inject("GET", refuse(403, "AccessDenied"))
    with pytest.raises(
        StoreError, match=r"not permitted without keys; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ):
        store.get("x")
    with pytest.raises(StoreError, match="absent does not exist"):
        store.reader()("absent")
    assert all("authorization" not in map(str.lower, request.headers) for request in faulty_proxy.requests)
