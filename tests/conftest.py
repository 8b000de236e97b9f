"""What tests of several rooms share: an S3 that answers on loopback, and a system to be released."""

import itertools
from collections.abc import Iterator

import environment  # noqa: F401 - first, since libraries and `evernear` read the environment when they are loaded
import pytest
from minio import Minio
from moto.server import ThreadedMotoServer
from releases import MakeRelease, System, build_system, release_maker

_bucket_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scenarios first: the longest files would otherwise keep one of two cores busy alone at the end."""
    items.sort(key=lambda item: "scenarios" not in item.path.parts)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The URL of an S3 server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new, empty bucket; the environment leads clients to it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    name = f"bucket-{next(_bucket_numbers)}"
    client = Minio(s3_endpoint.removeprefix("http://"), "tester", "not-a-secret", secure=False, region="us-east-1")
    client.make_bucket(name)
    return name


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> System:
    """The real digits, and a small network trained on them."""
    return build_system(tmp_path_factory.mktemp("system"))


@pytest.fixture(scope="session")
def make_release(system: System, tmp_path_factory: pytest.TempPathFactory) -> MakeRelease:
    """Pack the system as a release, each time one that is a second younger."""
    return release_maker(system, lambda: tmp_path_factory.mktemp("release"))
