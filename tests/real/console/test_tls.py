"""The console with a certificate that people made themselves."""

import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from evernear.common.store import Store
from evernear.console.runs import LocalRuns
from evernear.settings import load
from tests.certificates import write_certificate
from tests.command_line import evernear
from tests.consoles import console_client


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate and its key."""
    write_certificate(tmp_path, b"a password")
    return write_certificate(tmp_path)


def command(store: Store, source: Path, certificate: Path, key: Path) -> list[str]:
    settings = {
        "store": store.uri,
        "data.source": f"folder:{source}",
        "console.certificate": certificate,
        "console.private_key": key,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return ["console", "--port", "0", *words]


@contextmanager
def served(words: list[str], directory: Path) -> Iterator[httpx.URL]:
    """The URL that the console prints."""
    program = [sys.executable, "-m", "evernear", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=directory) as process:
        try:
            assert process.stdout is not None
            yield httpx.URL(process.stdout.readline().removeprefix("Open ").strip())
        finally:
            process.terminate()


def test_cookies_cross_the_network_encrypted_only(
    store: Store, source: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    with served(command(store, source, *files), tmp_path) as url:
        assert url.scheme == "https"
        trust = ssl.create_default_context(cafile=str(files[0]))
        with httpx.Client(trust_env=False, timeout=30, verify=trust) as client:
            response = client.get(url)
            cookies = response.headers.get_list("set-cookie")
            assert len(cookies) == 2
            assert all("; Secure" in cookie and "HttpOnly" in cookie for cookie in cookies)
            page = client.get(url.join(response.headers["location"]), follow_redirects=True)
            assert page.status_code == 200
            assert "strict-transport-security" not in page.headers, "it would hold for every port of the machine"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url, trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.copy_with(scheme="http"), trust_env=False)


@pytest.mark.parametrize(
    ("certificate", "key", "named"),
    [
        ("cert.pem", "protected.pem", "protected.pem needs a password; `openssl pkey -in"),
        ("cert.pem", "none.pem", "none.pem cannot be read: No such file or directory."),
        ("key.pem", "cert.pem", "console.certificate and console.private_key cannot be used ("),
    ],
)
def test_unusable_certificate_is_one_sentence(
    store: Store, source: Path, files: tuple[Path, Path], tmp_path: Path, certificate: str, key: str, named: str
) -> None:
    ended = evernear(*command(store, source, tmp_path / certificate, tmp_path / key), cwd=tmp_path)
    assert ended.returncode != 0
    assert (named in ended.stderr, ended.stderr.count("\n"), ended.stdout) == (True, 1, "")


@pytest.mark.parametrize(
    ("forwarded", "secure"), [("https", True), ("https, http", True), ("http", False), ("", False)]
)
def test_cookies_are_secure_behind_a_proxy_with_tls(store: Store, source: Path, forwarded: str, secure: bool) -> None:
    settings = load(overrides=[f"store={store.uri}", f"data.source=folder:{source}"], environment={})
    client = console_client(settings, store, LocalRuns(settings, ()), **{"X-Forwarded-Proto": forwarded})
    cookies = client.get("/?token=secret", follow_redirects=False).headers.get_list("set-cookie")
    assert [("; Secure" in cookie) for cookie in cookies] == [secure, secure]
