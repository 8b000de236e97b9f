"""Small real releases, and free ports for their servers."""

import itertools
import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from evernear.common.disk import sha256_bytes
from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import describe_network, export_network
from evernear.embedding.train import train_network
from evernear.evaluation.verdict import Rule, Verdict
from evernear.evaluation.verdict import System as Measured
from evernear.index.build import build_index
from evernear.index.description import describe_index
from evernear.release.archive import Candidate, make_archive
from evernear.release.archive_reader import ARCHIVE_FILE, MANIFEST_FILE
from evernear.release.manifest import VERDICT_FILE, Part, ReleaseManifest, new_version
from evernear.serving import HANDLER
from evernear.settings import DataSettings, IndexSettings, ServingSettings, TrainSettings
from tests.ports import free_ports

COMPLETE = "complete"
"""A file that `build_system` writes last."""
STUB_HANDLER = Path(__file__).with_name("stub_handler.py")
TORCHSERVE_MANIFEST = "MAR-INF/MANIFEST.json"


@dataclass(frozen=True)
class System:
    """A dataset with its network and index, from which a release is packed."""

    dataset: Dataset
    network_dir: Path
    index_dir: Path


@dataclass(frozen=True)
class PackedRelease:
    """An archived release and its verdict."""

    archive: Path
    manifest: ReleaseManifest
    verdict: Path

    @property
    def version(self) -> str:
        return self.manifest.version


class MakeRelease(Protocol):
    def __call__(
        self, parent: str | None = None, promote: bool = True, verdict: str | None = None
    ) -> PackedRelease: ...


def open_system(directory: Path) -> System | None:
    """The system that `build_system` completed in ``directory``, or None."""
    if not (directory / COMPLETE).exists():
        return None
    return System(Dataset.open(directory / "dataset"), directory / "network", directory / "index")


def build_system(directory: Path, source: str = "digits") -> System:
    """Ingest the digits or another source and train on it for a few seconds."""
    data = DataSettings(source=source, gallery_fraction=0.2, query_fraction=0.1)
    save_manifest(ingest_source(data, (directory / "store").as_uri()), directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    tiny = TrainSettings(epochs=4, min_steps=0, width=4, embedding_dim=16, batch_size=128)
    train_network(dataset, tiny, directory / "trained")
    export_network(directory / "trained", dataset, directory / "network")
    embed_dataset(directory / "network", dataset, directory / "embeddings")
    build_index(Embeddings.open(directory / "embeddings"), dataset.labels, IndexSettings(), directory / "index")
    (directory / COMPLETE).touch()
    return System(dataset, directory / "network", directory / "index")


def copy_store(system: System, directory: Path) -> System:
    """``system`` with a copy of its store in ``directory``, for tests that write to it."""
    original = Path(unquote(urlsplit(system.dataset.store.uri).path))
    store = open_store(shutil.copytree(original, directory).as_uri())
    manifest = system.dataset.manifest.model_copy(update={"store_uri": store.uri})
    return replace(system, dataset=Dataset(manifest, store))


Pack = Callable[[Candidate, Path, datetime], PackedRelease]
"""Packs a candidate in a directory, as created at a time."""


def pack_release(candidate: Candidate, directory: Path, created: datetime, handler: Path = HANDLER) -> PackedRelease:
    release = make_archive(candidate, ServingSettings(), handler, directory, created)
    return PackedRelease(release.archive, release.manifest, candidate.verdict_file)


def release_maker(system: System, new_directory: Callable[[], Path], pack: Pack = pack_release) -> MakeRelease:
    seconds = itertools.count()

    def make(parent: str | None = None, promote: bool = True, verdict: str | None = None) -> PackedRelease:
        directory = new_directory()
        verdict_file = directory / "verdict.json"
        verdict_file.write_text(verdict or decided(system, parent, promote).model_dump_json(indent=2))
        candidate = Candidate(
            dataset=system.dataset,
            network_dir=system.network_dir,
            index_dir=system.index_dir,
            verdict_file=verdict_file,
            metrics={
                "named_right": 17,
                "named_wrong": 0,
                "called_unknown": 3,
                "label_right": 0.9,
                "label_right_low": 0.85,
            },
            parent=parent,
        )
        created = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(seconds))
        return pack(candidate, directory / "release", created)

    return make


class Restamp:
    """A `Pack` of candidates that differ in verdict and parent alone: only the first one takes half
    a second."""

    def __init__(self, handler: Path = HANDLER) -> None:
        self._handler = handler
        self._first: PackedRelease | None = None

    def __call__(self, candidate: Candidate, directory: Path, created: datetime) -> PackedRelease:
        if self._first is None:
            self._first = pack_release(candidate, directory, created, self._handler)
            return self._first
        verdict = candidate.verdict_file.read_bytes()
        described = Part(sha256=sha256_bytes(verdict), size_bytes=len(verdict))
        parts = self._first.manifest.parts | {VERDICT_FILE: described}
        content = "\n".join(f"{name} {part.sha256}" for name, part in parts.items())
        version = new_version(created, sha256_bytes(content.encode()))
        stamps = {"version": version, "created": created, "parent": candidate.parent}
        stamps |= {"parts": parts, "verdict_sha256": described.sha256}
        manifest = self._first.manifest.model_copy(update=stamps)
        directory.mkdir()
        (directory / MANIFEST_FILE).write_bytes(manifest.to_json())
        _rewrite(self._first.archive, directory / ARCHIVE_FILE, manifest, verdict)
        return PackedRelease(directory / ARCHIVE_FILE, manifest, candidate.verdict_file)


def _rewrite(archive: Path, copy: Path, manifest: ReleaseManifest, verdict: bytes) -> None:
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(copy, "w") as new:
        torchserves = json.loads(old.read(TORCHSERVE_MANIFEST))
        torchserves["model"]["modelVersion"] = manifest.version
        changed = {
            MANIFEST_FILE: manifest.to_json(),
            VERDICT_FILE: verdict,
            TORCHSERVE_MANIFEST: json.dumps(torchserves, indent=2).encode(),
        }
        for name in old.namelist():
            new.writestr(name, changed.get(name) or old.read(name))


def decided(system: System, parent: str | None, promote: bool) -> Verdict:
    """A verdict of one rule on ``system``, measured against ``parent``."""
    network_sha256 = describe_network(system.network_dir).sha256
    index_digest = describe_index(system.index_dir).digest
    return Verdict.of(
        [Rule(name="test", passed=promote, reason="A test says so.")],
        candidate=Measured(name="", network_sha256=network_sha256, index_digest=index_digest),
        champion=Measured(name=parent, network_sha256=network_sha256, index_digest=index_digest) if parent else None,
        dataset_digest=system.dataset.digest,
    )


def settings_on_free_ports(**changes: object) -> ServingSettings:
    """Settings of a server on free ports."""
    names = [name for name in ServingSettings.model_fields if name.endswith("_port")]
    return ServingSettings.model_validate(dict(zip(names, free_ports(len(names)), strict=True)) | changes)


def forge(release: PackedRelease, archive: Path, without: Sequence[str] = (), **parts: bytes) -> PackedRelease:
    """Repack a release with other parts (``smoke_json=...``) and a matching manifest."""
    changed = {name.replace("_", "."): data for name, data in parts.items()}
    described = {n: Part(sha256=sha256_bytes(d), size_bytes=len(d)) for n, d in changed.items()}
    kept = {name: part for name, part in release.manifest.parts.items() if name not in without}
    described = kept | described
    stamps = {"network_sha256": described["network.pt"].sha256, "verdict_sha256": described["verdict.json"].sha256}
    manifest = release.manifest.model_copy(update={"parts": described, **stamps})
    with zipfile.ZipFile(release.archive) as old, zipfile.ZipFile(archive, "w") as new:
        for name in old.namelist():
            if name in without:
                continue
            data = manifest.to_json() if name == "manifest.json" else changed.get(name, old.read(name))
            new.writestr(name, data)
    return PackedRelease(archive, manifest, release.verdict)
