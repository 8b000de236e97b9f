"""The handler verifies the files that TorchServe unpacked before torch or FAISS reads them."""

import json
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from evernear.errors import IntegrityError
from evernear.serving.handler import EmbeddingHandler
from tests.releases import PackedRelease, forge


def load(archive: Path, directory: Path) -> None:
    """Load a release as a TorchServe worker does, from the directory that Java unpacked the archive
    into."""
    with zipfile.ZipFile(archive) as members:
        members.extractall(directory)
    EmbeddingHandler().initialize(SimpleNamespace(system_properties={"model_dir": str(directory)}))


@pytest.mark.parametrize("name", ["network.pt", "index.faiss", "labels.npy", "index.json", "handler.py"])
def test_replaced_part_is_rejected(release: PackedRelease, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "proof"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    other = tmp_path / "other.mar"
    with zipfile.ZipFile(release.archive) as old, zipfile.ZipFile(other, "w") as new:
        for member in old.namelist():
            new.writestr(member, pickle.dumps(Payload()) if member == name else old.read(member))
    with pytest.raises(IntegrityError, match=rf"{name} in .* is missing or does not match the manifest\."):
        load(other, tmp_path / "unpacked")
    assert not marker.exists()


def test_index_of_another_network_is_rejected(release: PackedRelease, tmp_path: Path) -> None:
    with zipfile.ZipFile(release.archive) as members:
        index = json.loads(members.read("index.json"))
    stamped = json.dumps(index | {"network_sha256": "0" * 64}).encode()
    foreign = forge(release, tmp_path / "foreign.mar", index_json=stamped)
    with pytest.raises(IntegrityError, match="contains vectors of network 000000000000"):
        load(foreign.archive, tmp_path / "unpacked")


def test_replaced_network_is_rejected(release: PackedRelease, tmp_path: Path) -> None:
    """The manifest's list of parts contains the hash of the replacement, but the index that of the
    original."""
    with zipfile.ZipFile(release.archive) as members:
        network = members.read("network.pt")
    replaced = forge(release, tmp_path / "replaced.mar", network_pt=network + b" ")
    with pytest.raises(IntegrityError, match="contains vectors of network"):
        load(replaced.archive, tmp_path / "unpacked")
