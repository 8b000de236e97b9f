"""A release on a real TorchServe."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.manifest import ReleaseManifest
from evernear.serving import torchserve
from evernear.serving.client import Client
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import Management, home_of
from evernear.settings import Settings
from tests.releases import PackedRelease, settings_on_free_ports


@dataclass(frozen=True)
class Served:
    """A release on a real TorchServe."""

    settings: Settings
    parts: ReleaseParts

    @property
    def manifest(self) -> ReleaseManifest:
        return self.parts.manifest

    @property
    def home(self) -> Path:
        return home_of(self.settings.workdir)

    @property
    def management(self) -> Management:
        return Management(self.home)

    def client(self) -> Client:
        return Client.of(self.settings)


@contextmanager
def serving(release: PackedRelease, workdir: Path, **changes: object) -> Generator[Served]:
    """Run a TorchServe with ``release``; afterwards all its processes are gone."""
    settings = Settings(workdir=workdir, serving=settings_on_free_ports(**changes))
    home = home_of(workdir)
    torchserve.start_server(settings.serving, home)
    try:
        shutil.copy(release.archive, model_store(home) / "release.mar")
        Management(home).register("release.mar", settings.serving)
        torchserve.await_ready(settings.serving, home, release.version)
        yield Served(settings, open_release(release.archive, workdir / "opened"))
    finally:
        torchserve.stop_server(home)
    assert not torchserve.processes(home)
