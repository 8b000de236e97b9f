"""Shared fixtures: an S3 server on loopback, and a system to release.

They import what takes seconds to import, because `tests/fast` does without it.
"""

import tests.environment  # noqa: F401 - first, because libraries and `evernear` read the environment on import

# isort: split

import gc
import itertools
import os
import random
import re
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import hypothesis
import pytest
from filelock import FileLock
from pydantic import BaseModel
from xdist.scheduler import LoadFileScheduling

from evernear.common import masking
from evernear.common.run_record import RunRecord
from evernear.common.store import Store, open_store
from evernear.settings import Settings, layers
from evernear.settings.sources import Tree

if TYPE_CHECKING:
    from evernear.release.archive_reader import ReleaseParts
    from evernear.release.registry import Registry
    from tests.loopback.kfp import KfpServer
    from tests.releases import MakeRelease, PackedRelease, System

hypothesis.settings.register_profile("no deadline", deadline=None)  # an example waits while another test computes
hypothesis.settings.load_profile("no deadline")
_bucket_numbers = itertools.count(time.time_ns())


LONGEST_FIRST = (
    "scenarios",
    "deployment",
    "notebooks",
    "kserve",
    "serving",
    "embedding",
    "data",
    "console",
    "triggers",
)
"""Directories whose tests take longest: if started last, they would run alone at the end, on one of
two cores."""
USES_SERVER = re.compile(r"def test_\w+\([^)]*\b(served|stub): Served\b")
SEED = "EVERNEAR_TEST_SEED"
"""The environment variable with the seed of the order of the tests."""
SLOW_TIMEOUT_S = 1800
"""Default time limit of a slow test. A test that takes minutes on an idle processor can take many
times as long on a busy one."""


def pytest_configure() -> None:
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**6)))  # the workers have the same one


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep the garbage collector away from all that the test files import, which takes it as long
    as importing it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files, and the tests of each file, in random order, except that a scenario is one
    story. pytest then puts the tests of a parametrized module fixture next to each other again."""
    rng = random.Random(os.environ[SEED])
    rank = {path: rng.random() for path in dict.fromkeys(item.path for item in items)}
    items.sort(key=lambda item: (rank[item.path], 0 if "scenarios" in item.path.parts else rng.random()))
    items.sort(key=lambda item: min(map(LONGEST_FIRST.index, _directories(item)), default=len(LONGEST_FIRST)))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


class ByFileAndServer(LoadFileScheduling):
    """The tests of a file run in one worker, and so do all tests with `served`, and all with
    `stub`: one TorchServe each suffices for them."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        server = USES_SERVER.search((self.config.rootpath / file).read_text())
        return server[1] if server else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFileAndServer:
    return ByFileAndServer(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} repeats the order of these tests.")


def _directories(item: pytest.Item) -> list[str]:
    return [part for part in item.path.parts if part in LONGEST_FIRST]


@pytest.fixture(scope="session", autouse=True)
def settings_without_those_of_the_checkout() -> Iterator[None]:
    """Ignore the settings that `make demo` keeps in the directory in which the tests run."""
    checkout, read_file = Path.cwd() / Settings().workdir, layers.read_file

    def read_other_file(model: type[BaseModel], workdir: Path) -> Tree | None:
        return None if workdir.absolute() == checkout else read_file(model, workdir)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "read_file", read_other_file)
        yield


@pytest.fixture(scope="session", autouse=True)
def writes_without_sync() -> Iterator[None]:
    """Do not wait until the disk has each file: a test cannot cut the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def remembers_no_secret_of_another_test() -> Iterator[None]:
    """Masking lasts as long as a process, which here runs many tests."""
    remembered, forms = masking._remembered, masking._forms  # pyright: ignore[reportPrivateUsage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "_remembered", set(remembered))
        patch.setattr(masking, "_forms", forms)
        yield


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The URL of an S3 server: moto, or the one at ``TEST_S3_URL``.

    ``TEST_S3_ACCESS_KEY`` and ``TEST_S3_SECRET_KEY`` must be allowed to create buckets there.
    """
    if url := os.environ.get("TEST_S3_URL"):
        yield url
        return
    from tests.atomic_moto import start_moto

    server = start_moto()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a new, empty bucket; the environment configures clients for it."""
    from minio import Minio

    access_key = os.environ.get("TEST_S3_ACCESS_KEY", "tester")
    secret_key = os.environ.get("TEST_S3_SECRET_KEY", "not-a-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret_key)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    name, parts = f"bucket-{next(_bucket_numbers)}", urlsplit(s3_endpoint)
    client = Minio(parts.netloc, access_key, secret_key, secure=parts.scheme == "https", region="us-east-1")
    client.make_bucket(name)
    yield name
    if "TEST_S3_URL" in os.environ:  # a real server keeps running
        for entry in client.list_objects(name, recursive=True):
            client.remove_object(name, str(entry.object_name))
        client.remove_bucket(name)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store in a directory, or in a bucket if a test is parametrized with ``s3``; both
    keep one contract."""
    if getattr(request, "param", "file") == "s3":
        return open_store(f"s3://{request.getfixturevalue('bucket')}/team")
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def record(store: Store) -> RunRecord:
    """The record of a run that has not started."""
    return RunRecord(store, "run")


@pytest.fixture
def registry(store: Store) -> "Registry":
    from evernear.release.registry import Registry

    return Registry(store)


@pytest.fixture
def kfp() -> "Iterator[KfpServer]":
    """A Kubeflow Pipelines API server without pipelines."""
    from tests.loopback.kfp import KfpServer

    with KfpServer() as server:
        yield server


@pytest.fixture(scope="session")
def milvus_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Milvus: a new file of Milvus Lite, or the server at ``TEST_MILVUS_URI``."""
    pytest.importorskip("pymilvus")
    return os.environ.get("TEST_MILVUS_URI") or str(tmp_path_factory.mktemp("milvus") / "lite.db")


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> "System":
    """The digits dataset and a small network trained on it by the first worker that needs it;
    nobody changes it."""
    from tests.releases import build_system, open_system

    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # shared by the workers
    with FileLock(directory / "system.lock"):
        return open_system(directory / "system") or build_system(directory / "system")


@pytest.fixture(scope="session")
def make_release(system: "System", tmp_path_factory: pytest.TempPathFactory) -> "MakeRelease":
    """Pack the system as a release; each is one second newer than the previous one."""
    from tests.releases import Restamp, release_maker

    return release_maker(system, lambda: tmp_path_factory.mktemp("release"), Restamp())


@pytest.fixture(scope="session")
def make_stub(system: "System", tmp_path_factory: pytest.TempPathFactory) -> "MakeRelease":
    """Pack the system with the handler of `tests.stub_handler`."""
    from tests.releases import STUB_HANDLER, Restamp, release_maker

    return release_maker(system, lambda: tmp_path_factory.mktemp("stub"), Restamp(STUB_HANDLER))


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """TorchServe's workers import no torch."""
    from tests.served import modules_without_torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(modules_without_torch(tmp_path_factory.mktemp("modules"))))
        yield


@pytest.fixture(scope="session")
def release(make_release: "MakeRelease") -> "PackedRelease":
    """A release for tests that do not change it."""
    return make_release()


@pytest.fixture(scope="session")
def releases(make_release: "MakeRelease") -> "tuple[PackedRelease, PackedRelease, PackedRelease]":
    """Three releases for tests that do not change them, each the parent of the next."""
    first = make_release()
    second = make_release(parent=first.version)
    return first, second, make_release(parent=second.version)


@pytest.fixture(scope="session")
def parts(release: "PackedRelease", tmp_path_factory: pytest.TempPathFactory) -> "ReleaseParts":
    """The release, unpacked."""
    from evernear.release.archive_reader import open_release

    return open_release(release.archive, tmp_path_factory.mktemp("opened") / "release")
