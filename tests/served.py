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

SECRETS = {
    **{name: f"{name.replace('_', '')}=wJalrXUt" for name in ("EVERNEAR_MILVUS_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS")},
    "KFP_TOKEN": "KFPTOKEN=wJalrXUt",
    "DATABASE_URL": "http://user:wJalrXUt-2@127.0.0.1:9",
}
"""Environment variables for a server."""
SMALL_HEAP = 128 * 2**20


def modules_without_torch(directory: Path) -> Path:
    """A PYTHONPATH with which a worker starts in a tenth of the time. TorchServe imports torch even
    if the handler does not."""
    (directory / "torch.py").write_text("class Tensor: ...\n")
    return directory


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
