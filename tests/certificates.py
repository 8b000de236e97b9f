"""A certificate that people made themselves, as `openssl req -x509` makes it."""

import ssl
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)


@cache
def _made() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The certificate for 127.0.0.1, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "evernear test")])
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    )
    return builder.sign(key, hashes.SHA256()), key


def write_certificate(directory: Path, password: bytes = b"") -> tuple[Path, Path]:
    """Write the certificate and its key to two files."""
    certificate, key = _made()
    (directory / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    protection = BestAvailableEncryption(password) if password else NoEncryption()
    path = directory / ("protected.pem" if password else "key.pem")
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection))
    return directory / "cert.pem", path


@cache
def server_tls() -> ssl.SSLContext:
    """TLS of a server with the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with TemporaryDirectory() as directory:
        context.load_cert_chain(*write_certificate(Path(directory)))
    return context
