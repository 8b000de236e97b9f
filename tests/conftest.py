"""What tests of several rooms share: an S3 that answers on loopback, and a system to be released."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import pytest
from minio import Minio
from moto.server import ThreadedMotoServer

from evernear.data.ingest import ingest
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import Embeddings, embed
from evernear.embedding.export import export
from evernear.embedding.train import train
from evernear.index.build import build
from evernear.release.archive import archive
from evernear.release.manifest import ReleaseManifest
from evernear.settings import DataSettings, IndexSettings, ServingSettings, TrainSettings

_bucket_numbers = itertools.count()


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
    client = Minio(
        s3_endpoint.removeprefix("http://"), "tester", "not-a-secret", secure=False, region="us-east-1"
    )
    client.make_bucket(name)
    return name


@dataclass(frozen=True)
class System:
    """A dataset, and a network and an index made of it: all that a release is packed from."""

    dataset: Dataset
    network_dir: Path
    index_dir: Path


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> System:
    """The real digits, and a small network trained on them."""
    directory = tmp_path_factory.mktemp("system")
    data = DataSettings(source="digits", gallery_fraction=0.2, query_fraction=0.1)
    save_manifest(ingest(data, (directory / "store").as_uri()), directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    tiny = TrainSettings(epochs=4, min_steps=0, width=4, embedding_dim=16, batch_size=128, patience_epochs=4)
    train(dataset, tiny, directory / "trained")
    export(directory / "trained", dataset, directory / "network", tiny.parity_tolerance)
    embed(directory / "network", dataset, directory / "embeddings")
    build(Embeddings.open(directory / "embeddings"), dataset.labels, IndexSettings(), directory / "index")
    return System(dataset, directory / "network", directory / "index")


@dataclass(frozen=True)
class PackedRelease:
    """An archived release and the verdict that goes with it."""

    archive: Path
    manifest: ReleaseManifest
    verdict: Path

    @property
    def version(self) -> str:
        return self.manifest.version


class MakeRelease(Protocol):
    def __call__(self, parent: str | None = None, promote: bool = True) -> PackedRelease: ...


@pytest.fixture(scope="session")
def make_release(system: System, tmp_path_factory: pytest.TempPathFactory) -> MakeRelease:
    """Pack the system as a release, each time one that is a second younger."""
    seconds = itertools.count()

    def make(parent: str | None = None, promote: bool = True) -> PackedRelease:
        directory = tmp_path_factory.mktemp("release")
        verdict = directory / "verdict.json"
        verdict.write_text(json.dumps({"promote": promote, "reasons": ["a test says so"]}))
        release = archive(
            dataset=system.dataset,
            network_dir=system.network_dir,
            index_dir=system.index_dir,
            verdict_file=verdict,
            metrics={"accuracy": 0.9},
            parent=parent,
            settings=ServingSettings(),
            out_dir=directory / "release",
            created=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(seconds)),
        )
        return PackedRelease(release.archive, release.manifest, verdict)

    return make
