"""One real TorchServe for all tests of this room."""

import shutil
from collections.abc import Iterator

import pytest
from releases import MakeRelease, settings_on_free_ports
from served import Served

from evernear.release.parts import ReleaseParts, open_release
from evernear.serving import torchserve
from evernear.serving.connection import home_of
from evernear.serving.management import Management
from evernear.settings import Settings


@pytest.fixture(scope="session")
def parts(make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> ReleaseParts:
    """A release, unpacked."""
    return open_release(make_release().archive, tmp_path_factory.mktemp("opened") / "release")


@pytest.fixture(scope="session")
def served(make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A release on a TorchServe, in a path of odd letters that is too long for a socket's name."""
    directory = tmp_path_factory.mktemp("wörk dir, 1") / ("d" * 100)
    settings = Settings(workdir=directory, serving=settings_on_free_ports())
    packed = make_release()
    home = home_of(directory)
    torchserve.start(settings.serving, home)
    try:
        shutil.copy(packed.archive, torchserve.model_store(home) / "release.mar")
        Management(home).register("release.mar", settings.serving)
        torchserve.await_ready(settings.serving, home, packed.version)
        yield Served(settings, open_release(packed.archive, directory / "opened"))
    finally:
        torchserve.stop(home)
    assert not torchserve.processes(home)
