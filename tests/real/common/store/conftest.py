"""moto behind a fault-injecting proxy."""

import os
from collections.abc import Iterator

import pytest

from evernear.common.store import s3, s3_connection
from tests.real.common.store.faulty import FaultyProxy, start_faulty_proxy


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
    for module in (s3_connection, s3):
        monkeypatch.setattr(module, "BACKOFF_S", 0.01)
