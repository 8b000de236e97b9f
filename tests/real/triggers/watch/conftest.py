import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.release.registry import Registry
from tests.real.triggers.watch.watched import TRAINED_LABELS, WatchedSystem, digits
from tests.releases import System, build_system, release_maker


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, System]:
    """A folder of the digits except the nines, and a directory whose ``store`` has a champion
    trained on them."""
    directory = tmp_path_factory.mktemp("watched")
    images = directory / "images"
    for label in range(TRAINED_LABELS):
        (images / str(label)).mkdir(parents=True)
        for number, data in enumerate(digits(label)):
            (images / str(label) / f"{number:03}.png").write_bytes(data)
    system = build_system(directory, f"folder:{images}")
    release = release_maker(system, lambda: tmp_path_factory.mktemp("release"))()
    registry = Registry(open_store((directory / "store").as_uri()))
    registry.publish(release.archive)
    registry.set_champion(release.version, None)
    return directory, system


@pytest.fixture
def watched(trained: tuple[Path, System], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedSystem]:
    """A copy of that store, and the folder, which is restored afterwards."""
    directory, _ = trained
    shutil.copytree(directory / "store", tmp_path / "store")
    watched = WatchedSystem(directory / "images", tmp_path, monkeypatch)
    yield watched
    watched.remove_added()
