"""Servers that are not S3: a console, a login page, a dead proxy, a port without TLS."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from evernear.common.store.s3 import S3Store
from evernear.errors import StoreError
from tests.ports import free_ports
from tests.real.serving.fake_servers import http_server

pytestmark = pytest.mark.usefixtures("quick")
LOGIN = b"<!doctype html><html><head><style>p{margin:0}</style></head><body>Sign in</body></html>"
Respond = Callable[[BaseHTTPRequestHandler], None]


def answer(status: int, kind: str, body: bytes) -> Respond:
    def respond(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        if kind:
            request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(b"" if request.command == "HEAD" else body)

    return respond


def login(request: BaseHTTPRequestHandler) -> None:
    """A redirect to a login page."""
    if request.path.startswith("/login"):
        answer(200, "text/html; charset=utf-8", LOGIN)(request)
        return
    request.send_response(302)
    request.send_header("Location", "/login?next=secret")
    request.send_header("Content-Length", "0")
    request.end_headers()


ANSWERS = {
    "console": answer(200, "text/html", LOGIN),
    "login": login,
    "json": answer(200, "application/json", b"{}"),
    "page without a type": answer(200, "", LOGIN),
    "other XML": answer(200, "application/xml", b"<html><body/></html>"),
    "nothing": answer(200, "", b""),
    "forbidden": answer(403, "text/html", LOGIN),
    "method not allowed": answer(405, "text/html", LOGIN),
}
OPERATIONS: dict[str, Callable[[S3Store], object]] = {
    "get": lambda store: store.get("x"),
    "reader": lambda store: store.reader()("x"),
    "fetch": lambda store: store.fetch("x", Path("not-written")),
    "list": lambda store: list(store.list("")),
    "folders": lambda store: list(store.folders()),
    "put": lambda store: store.put("x", b"1"),
    "put_if": lambda store: store.put_if("x", b"1", None),
}


@contextmanager
def serving(respond: Respond) -> Generator[str]:
    def read_and_respond(request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length") or 0))
        respond(request)

    methods = dict.fromkeys(("do_GET", "do_PUT", "do_POST", "do_DELETE", "do_HEAD"), read_and_respond)
    with http_server(protocol_version="HTTP/1.1", **methods) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_server_that_is_not_s3_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, operation: str
) -> None:
    with serving(ANSWERS[kind]) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(StoreError, match=rf"{url} .*AWS_ENDPOINT_URL") as raised:
            OPERATIONS[operation](S3Store("bucket", "prefix"))
    assert "<html" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_redirect_is_no_problem_of_permissions(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """An ingress redirects to HTTPS, where a request without its signature is denied."""
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    with serving(answer(403, "application/xml", denied)) as target:

        def redirect(request: BaseHTTPRequestHandler) -> None:
            request.send_response(308)
            request.send_header("Location", f"{target}{request.path}")
            request.send_header("Content-Length", "0")
            request.end_headers()

        with serving(redirect) as url:
            monkeypatch.setenv("AWS_ENDPOINT_URL", url)
            with pytest.raises(StoreError, match=f"{url} redirects to {target}, .*; set AWS_ENDPOINT_URL"):
                OPERATIONS[operation](S3Store("bucket", "prefix"))


def test_plain_http_port_is_no_problem_of_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ANSWERS["console"]) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url.replace("http:", "https:"))
        with pytest.raises(StoreError, match=r"does not speak TLS .*use http:// in AWS_ENDPOINT_URL") as raised:
            S3Store("bucket", "").get("x")
    assert "AWS_CA_BUNDLE" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_dead_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv(f"{scheme}_proxy", f"http://me:pass@127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{scheme}://storage.example:9000")
    with pytest.raises(
        StoreError, match=rf"The proxy http://127\.0\.0\.1:{port} .*Connection refused; .*NO_PROXY"
    ) as raised:
        S3Store("bucket", "").get("x")
    assert "pass" not in str(raised.value)
