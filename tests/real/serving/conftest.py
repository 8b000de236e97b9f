"""The TorchServes of this directory: one with a release, and two with a stub."""

import shutil
from collections.abc import Iterator

import pytest

from evernear.release.archive_reader import open_release
from evernear.release.manifest import MODEL_CONFIG_FILE
from evernear.serving import configuration, torchserve
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import home_of
from evernear.settings import Settings
from tests.releases import MakeRelease, PackedRelease, forge, settings_on_free_ports
from tests.served import SECRETS, SMALL_HEAP, Served, modules_without_torch, serving


@pytest.fixture(scope="session")
def served(make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A release on TorchServe, in a non-ASCII path that is too long for a Unix socket."""
    directory = tmp_path_factory.mktemp("wörk dir, 1") / ("d" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configuration, "QUERY_LOG_PERIOD_S", 1.0)
        with serving(make_release(), directory) as served:
            patch.undo()  # of interest only when the server starts
            yield served


@pytest.fixture(scope="session")
def stub(make_stub: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A stub on a TorchServe with a small heap, whose environment has secrets. Each of its Python
    processes writes its environment to its descriptor, as a native library could."""
    modules = modules_without_torch(tmp_path_factory.mktemp("modules"))
    (modules / "sitecustomize.py").write_text("import os; os.write(1, repr(dict(os.environ)).encode())")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configuration, "HEAP_SIZE_BYTES", SMALL_HEAP)
        for name, value in SECRETS.items() | {("PYTHONPATH", str(modules))}:
            patch.setenv(name, value)
        with serving(make_stub(), tmp_path_factory.mktemp("stub")) as served:
            patch.undo()
            yield served
            assert not [log for log in (served.home / "logs").iterdir() if b"OutOfMemory" in log.read_bytes()]


@pytest.fixture(scope="session")
def delayed(make_stub: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> PackedRelease:
    """A stub whose batches of up to three requests may wait for a minute."""
    config = b"batchSize: 3\nmaxBatchDelay: 60000\nresponseTimeout: 120\n"
    return forge(make_stub(), tmp_path_factory.mktemp("delayed") / "release.mar", **{MODEL_CONFIG_FILE: config})


@pytest.fixture(scope="session")
def hasty(delayed: PackedRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A TorchServe without the model API, with short timeouts and few connections."""
    workdir = tmp_path_factory.mktemp("hasty")
    settings, home = Settings(workdir=workdir, serving=settings_on_free_ports()), home_of(workdir)
    model_store(home).mkdir(parents=True)
    shutil.copy(delayed.archive, model_store(home) / "embedding.mar")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(modules_without_torch(tmp_path_factory.mktemp("modules"))))
        patch.setattr(configuration, "UPLOAD_TIMEOUT_S", 1)
        patch.setattr(configuration, "IDLE_TIMEOUT_S", 3)
        patch.setattr(configuration, "CONNECTION_BYTES", SMALL_HEAP // 20)
        patch.setattr(configuration, "HEAP_SIZE_BYTES", SMALL_HEAP)
        torchserve.start_server(settings.serving, home, model_api=False)
    try:
        torchserve.await_ready(settings.serving, home, delayed.version)
        yield Served(settings, open_release(delayed.archive, workdir / "opened"))
    finally:
        torchserve.stop_server(home)
