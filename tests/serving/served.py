"""A release that a real TorchServe serves."""

from dataclasses import dataclass
from pathlib import Path

from evernear.release.manifest import ReleaseManifest
from evernear.release.parts import ReleaseParts
from evernear.serving.client import Client
from evernear.serving.connection import home_of
from evernear.serving.management import Management
from evernear.settings import Settings


@dataclass(frozen=True)
class Served:
    """A release that a real TorchServe serves."""

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
