import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evernear.common.store import open_store
from evernear.errors import IntegrityError
from evernear.release.archive_reader import ARCHIVE_FILE, ReleaseParts, open_release, read_release_manifest
from evernear.release.manifest import ReleaseManifest
from evernear.release.registry import Registry


@dataclass(frozen=True)
class ReleaseSource:
    """The release ``version`` (default: the champion) in the registry of ``store_uri``. Without
    ``store_uri``, the archive at ``path``: a ``.mar`` file, or a directory with one."""

    store_uri: str = ""
    version: str = ""
    path: Path = Path()

    def manifest(self) -> ReleaseManifest:
        """Read only the manifest."""
        if self.store_uri:
            registry = self._registry()
            return registry.get(self._version(registry)).manifest
        return read_release_manifest(self._archive())

    @contextmanager
    def unpacked(self) -> Generator[ReleaseParts]:
        """Unpack and verify the release in a temporary directory for the body."""
        with tempfile.TemporaryDirectory(prefix="evernear-") as directory:
            if self.store_uri:
                archive, registry = Path(directory) / ARCHIVE_FILE, self._registry()
                registry.fetch(self._version(registry), archive)
            else:
                archive = self._archive()
            yield open_release(archive, Path(directory) / "parts")

    def _registry(self) -> Registry:
        return Registry(open_store(self.store_uri))

    def _version(self, registry: Registry) -> str:
        return self.version or registry.require_champion().version

    def _archive(self) -> Path:
        archives = [self.path] if self.path.is_file() else sorted(self.path.glob("*.mar"))
        if len(archives) != 1:
            fault = f"has {len(archives)} release archives (.mar)" if self.path.exists() else "does not exist"
            raise IntegrityError(f"{self.path} {fault}; name one with --model_dir, or a registry with --store.")
        return archives[0]
