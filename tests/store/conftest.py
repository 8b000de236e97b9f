"""Servers that speak S3: moto behind a fault-injecting proxy, and a real OpenStack Swift."""

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import FaultyProxy, start_faulty_proxy
from minio import Minio
from ports import free_ports, wait_for_port

from evernear.store import conditional_put, s3, s3_connection

REPOSITORY = Path(__file__).resolve().parents[2]
# Swift has its own Python environment, which `make test` creates.
SWIFT_PYTHON = REPOSITORY / ".venv/swift/bin/python"

_bucket_numbers = itertools.count()


@pytest.fixture
def faulty_proxy(s3_endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A fault-injecting proxy for moto, configured in the environment; ``bucket`` exists."""
    with start_faulty_proxy(s3_endpoint) as faulty_proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty_proxy.url)
        yield faulty_proxy


@pytest.fixture
def altering_proxy(faulty_proxy: FaultyProxy) -> FaultyProxy:
    """The proxy, if it may change requests; real servers verify signatures."""
    if "TEST_S3_URL" in os.environ:
        pytest.skip("the server at TEST_S3_URL verifies signatures")
    return faulty_proxy


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients without back-off between retries."""
    for module in (s3_connection, s3, conditional_put):
        monkeypatch.setattr(module, "BACKOFF_S", 0.01)


@pytest.fixture(scope="session")
def swift_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a minimal OpenStack Swift with the S3 API."""
    if not SWIFT_PYTHON.exists():
        pytest.skip("Swift's environment is missing; run `make .venv/swift/.installed`")
    directory = tmp_path_factory.mktemp("swift")
    try:
        os.setxattr(directory, "user.evernear", b"1")
    except OSError as error:
        pytest.skip(f"Swift needs extended attributes, which {directory} does not support ({error.strerror})")
    ports = free_ports(4)
    command = [SWIFT_PYTHON, Path(__file__).with_name("swift_node.py"), directory / "node", *map(str, ports)]
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as node,
    ):
        for port in ports:
            wait_for_port(port, node)
        yield f"http://127.0.0.1:{ports[0]}"
        assert node.stdin is not None
        node.stdin.close()


@pytest.fixture
def swift_bucket(swift_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new, empty bucket in Swift; the environment configures clients for it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", swift_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test:tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    name = f"bucket-{next(_bucket_numbers)}"
    host = swift_endpoint.removeprefix("http://")
    Minio(host, "test:tester", "testing", secure=False, region="us-east-1").make_bucket(name)
    return name
