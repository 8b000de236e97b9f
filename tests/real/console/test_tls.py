"""The console with a certificate that people made themselves."""

import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from evernear.common.store import Store
from evernear.console.runs import LocalRuns
from evernear.settings import load
from tests.consoles import console_client

KEY_FORMAT = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Certificate and key for 127.0.0.1, as `openssl req -x509` makes them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "evernear test")]), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*KEY_FORMAT, serialization.NoEncryption()))
    protection = serialization.BestAvailableEncryption(b"a password")
    (tmp_path / "protected.pem").write_bytes(key.private_bytes(*KEY_FORMAT, protection))
    return tmp_path / "cert.pem", tmp_path / "key.pem"


def command(store: Store, source: Path, certificate: Path, key: Path) -> list[str]:
    settings = {
        "store": store.uri,
        "data.source": f"folder:{source}",
        "console.certificate": certificate,
        "console.private_key": key,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "evernear", "console", "--port", "0", *words]


@contextmanager
def served(words: list[str], directory: Path) -> Iterator[httpx.URL]:
    """The URL that the console prints."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=directory) as process:
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
    words = command(store, source, tmp_path / certificate, tmp_path / key)
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60, stdin=subprocess.DEVNULL)
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
