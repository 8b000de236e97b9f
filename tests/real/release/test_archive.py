"""What a release contains, which includes the drift baseline, and how it is opened to compare."""

import ast
import io
import json
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from evernear.common.disk import sha256_file
from evernear.common.store import open_store
from evernear.embedding.data_loader import embed_images
from evernear.embedding.export import load_network
from evernear.errors import IntegrityError, SettingsError, StoreError
from evernear.evaluation.evaluate import ReleasedSystem, UnavailableSystem
from evernear.index.search import Gallery
from evernear.kubeflow.publish import default_version
from evernear.release.archive import SMOKE_QUERIES, Candidate, make_archive
from evernear.release.archive_reader import open_release, read_part, read_release_manifest
from evernear.release.champion import open_anchor, open_champion
from evernear.release.drift_baseline import DriftBaseline, evenly
from evernear.release.manifest import DRIFT_BASELINE_FILE, git_commit
from evernear.release.registry import Registry
from evernear.serving import HANDLER
from evernear.settings import PipelineSettings, ServingSettings
from tests.limits import largest_file
from tests.releases import MakeRelease, System, release_maker


@pytest.fixture(scope="module")
def pack_release(system: System, tmp_path_factory: pytest.TempPathFactory) -> MakeRelease:
    """Packs every release."""
    return release_maker(system, lambda: tmp_path_factory.mktemp("release"))


def test_archive_round_trip(system: System, pack_release: MakeRelease, tmp_path: Path) -> None:
    packed = pack_release()
    parts = open_release(packed.archive, tmp_path / "opened")

    assert parts.manifest == packed.manifest == read_release_manifest(packed.archive)
    assert sha256_file(parts.directory / "network.pt") == packed.manifest.network_sha256
    for name in ("index.faiss", "labels.npy", "index.json"):
        assert parts.read(name) == (system.index_dir / name).read_bytes()
    assert parts.read("verdict.json") == packed.verdict.read_bytes()
    assert packed.manifest.dataset_digest == system.dataset.digest
    assert packed.manifest.labels == system.dataset.labels
    assert json.loads(parts.read("preprocessing.json")) == packed.manifest.preprocessing.model_dump(mode="json")


def test_full_disk_during_archiving_is_reported(pack_release: MakeRelease) -> None:
    size_bytes = pack_release().archive.stat().st_size
    with largest_file(size_bytes - 1), pytest.raises(StoreError, match="would exceed the file size limit"):
        pack_release()


def test_smoke_queries_are_query_images_with_the_predictions_of_the_release(
    system: System, pack_release: MakeRelease, tmp_path: Path
) -> None:
    from evernear.data.preprocess import decode, image_digest, to_array

    queries = open_release(pack_release().archive, tmp_path / "opened").smoke_queries()
    known = {
        bytes(d): system.dataset.labels[n]
        for b in system.dataset.blocks("query")
        for d, n in zip(b.digests, b.labels, strict=True)
    }
    network = load_network(system.network_dir)
    gallery = Gallery.open(system.index_dir, sha256_file(system.network_dir / "network.pt"))

    assert len(queries) == SMOKE_QUERIES
    assert len({query.label for _, query in queries}) == len(queries), "one per class while classes remain"
    for image, query in queries:
        decoded = decode(image, 10_000)
        assert known[image_digest(decoded)] == query.label
        (recognition,) = gallery.recognize(embed_images(network, to_array(decoded, 8, 8, 1)[None]))
        assert (recognition.pred, recognition.unknown) == (query.pred, query.unknown)
        assert recognition.dist == pytest.approx(query.dist, abs=1e-5)


def test_archiving_leaves_the_temporary_directory_unchanged(
    pack_release: MakeRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default, torch-model-archiver stages in TMPDIR/<model name> and first deletes that
    # directory, which may contain the files of a user or of another run.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    existing = tmp_path / "embedding" / "precious"
    existing.parent.mkdir()
    existing.write_text("mine")
    pack_release()
    assert existing.read_text() == "mine"


def test_index_of_another_network_is_not_packed(system: System, tmp_path: Path) -> None:
    index_dir = tmp_path / "index"
    index_dir.mkdir()
    for file in system.index_dir.iterdir():
        (index_dir / file.name).write_bytes(file.read_bytes())
    described = json.loads((index_dir / "index.json").read_bytes())
    (index_dir / "index.json").write_text(json.dumps(described | {"network_sha256": "0" * 64}))
    verdict = tmp_path / "verdict.json"
    verdict.write_text("{}")

    candidate = Candidate(system.dataset, system.network_dir, index_dir, verdict, metrics={}, parent=None)
    with pytest.raises(IntegrityError, match="contains vectors of network 000000000000"):
        make_archive(candidate, ServingSettings(), HANDLER, tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_commit_is_the_current_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    assert git_commit().removesuffix("-dirty") == head

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, value in (("GIT_DIR", tmp_path / ".git"), ("GIT_INDEX_FILE", tmp_path / "index"), ("GIT_WORK_TREE", "/")):
        monkeypatch.setenv(name, str(value))
    assert git_commit().removesuffix("-dirty") == head, "a hook of another repository calls evernear"


def test_missing_commit_has_gits_own_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "evernear" / "manifest.py"
    module.parent.mkdir()
    module.touch()
    monkeypatch.setattr("evernear.release.manifest.__file__", str(module))
    reasons: list[str] = []
    assert (git_commit(reasons.append), reasons) == ("", []), "an installed package"
    with pytest.raises(SettingsError, match="not installed from a git checkout"):
        default_version(None, PipelineSettings())

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert (git_commit(reasons.append), reasons) == ("", []), "an installed package inside an unrelated tree"

    subprocess.run(["git", "-C", tmp_path, "add", module], check=True)
    (tmp_path / ".git" / "HEAD").write_text("not a reference")
    assert git_commit(reasons.append) == ""
    assert f"git does not name the commit of {module.parent}: fatal: not a git repository" in reasons[0]
    with pytest.raises(SettingsError, match=r"pass --version: git does not name .* fatal: not a git repository"):
        default_version(None, PipelineSettings())

    monkeypatch.setenv("PATH", "")
    assert git_commit(reasons.append) == ""
    assert reasons[1] == "git cannot be started (No such file or directory)."


def test_champion_opens_for_evaluation(pack_release: MakeRelease, tmp_path: Path, system: System) -> None:
    store = open_store((tmp_path / "store").as_uri())
    with open_champion(store) as champion:
        assert champion is None

    packed = pack_release()
    registry = Registry(store)
    registry.publish(packed.archive)
    registry.set_champion(packed.version, None)
    with open_champion(store) as champion:
        assert champion is not None
        assert champion.dataset is None, "this store contains no datasets"
        recognizer = champion.recognizer
        assert recognizer.name == packed.version
        (block, *_) = system.dataset.blocks("test", 8)
        assert recognizer.embed(block.images).shape == (8, packed.manifest.embedding_dim)


def test_unreadable_champion_is_reported_with_a_remedy(pack_release: MakeRelease, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    packed = pack_release()
    registry = Registry(store)
    record = registry.publish(packed.archive)
    registry.set_champion(packed.version, None)
    store.put(record.archive_key, b"damaged")
    message = f"champion {packed.version} cannot be opened for comparison: .* is damaged.*; .*registry promote"
    with pytest.raises(IntegrityError, match=message), open_champion(store):
        pass


def test_anchor_opens_for_evaluation_unless_it_is_the_champion(pack_release: MakeRelease, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    registry, releases = Registry(store), [pack_release(), pack_release()]
    with open_anchor(store) as anchor:
        assert anchor is None
    champion = None
    for packed, expected in zip(releases, (None, releases[0].version), strict=True):
        registry.publish(packed.archive)
        champion = registry.set_champion(packed.version, champion)
        with open_anchor(store) as anchor:
            assert (anchor.recognizer.name if isinstance(anchor, ReleasedSystem) else anchor) == expected


@pytest.mark.parametrize("damage", ["archive", "record"])
def test_damaged_anchor_does_not_stop_the_evaluation(pack_release: MakeRelease, tmp_path: Path, damage: str) -> None:
    store = open_store((tmp_path / "store").as_uri())
    registry, champion = Registry(store), None
    for packed in (pack_release(), pack_release()):
        record = registry.publish(packed.archive)
        champion = registry.set_champion(packed.version, champion)
        if champion.pointer.number == 1:
            key = record.archive_key if damage == "archive" else f"releases/manifests/{packed.version}.json"
    store.delete(key) if damage == "record" else store.put(key, b"damaged")
    with open_anchor(store) as anchor:
        assert isinstance(anchor, UnavailableSystem)
        assert anchor.name in anchor.fault or "is damaged" in anchor.fault
        assert anchor.fault.endswith(".")


def test_archived_handler_contains_no_version_dependent_code(pack_release: MakeRelease) -> None:
    with zipfile.ZipFile(pack_release().archive) as members:
        tree = ast.parse(members.read("handler.py"))
    imports = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imports == ["evernear.serving.handler"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Import)]


@pytest.fixture(scope="module")
def reference(pack_release: MakeRelease) -> DriftBaseline:
    data = read_part(pack_release().archive, DRIFT_BASELINE_FILE)
    assert data is not None
    return DriftBaseline.parse(data, "here")


def test_baseline_contains_the_predictions_on_the_query_and_test_splits(
    reference: DriftBaseline, system: System
) -> None:
    """The query split is smaller than a baseline may be."""
    images = np.concatenate([block.images for split in ("query", "test") for block in system.dataset.blocks(split)])
    embeddings = embed_images(load_network(system.network_dir), images)
    gallery = Gallery.open(system.index_dir, reference_network(system))
    recognitions = gallery.recognize(embeddings)
    assert reference.distances == pytest.approx([recognition.dist for recognition in recognitions], abs=1e-5)
    assert reference.unknown.tolist() == [recognition.unknown for recognition in recognitions]
    assert reference.coordinates == pytest.approx(embeddings @ reference.projection, abs=1e-5)
    assert reference.labels is not None
    assert reference.labels.tolist() == [recognition.pred for recognition in recognitions]


def reference_network(system: System) -> str:
    from evernear.embedding.export import describe_network

    return describe_network(system.network_dir).sha256


@pytest.mark.parametrize("total", [0, 1, 999, 1000, 1001, 123_456])
def test_large_split_is_sampled_evenly(total: int) -> None:
    rows = list(evenly(total))
    assert len(rows) == min(total, 1000)
    assert rows == sorted(set(rows))
    assert not rows or (rows[0] == 0 and rows[-1] < total)
    assert len({*np.diff(rows)} or {0}) <= 2


def test_invalid_baseline_is_rejected_with_its_path(reference: DriftBaseline) -> None:
    def packed(**changes: np.ndarray) -> bytes:
        arrays = {name: getattr(reference, name) for name in ("projection", "coordinates", "distances", "unknown")}
        buffer = io.BytesIO()
        np.savez(buffer, **(arrays | changes))
        return buffer.getvalue()

    whole = reference.to_bytes()
    unusable = [
        b"",
        b"text",
        whole[:100],
        packed(distances=reference.distances[1:]),
        packed(coordinates=reference.coordinates[:, 1:]),
        packed(distances=reference.distances.astype(np.float64)),
        packed(projection=np.array([{"a": "pickle"}], dtype=object)),
        packed(projection=reference.projection[0]),
        packed(labels=np.array(["one"])),
        packed(labels=np.arange(len(reference.distances))),
    ]
    for data in unusable:
        with pytest.raises(IntegrityError, match="somewhere is not a drift baseline"):
            DriftBaseline.parse(data, "somewhere")
