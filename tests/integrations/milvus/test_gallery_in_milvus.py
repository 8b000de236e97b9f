"""Releases whose vectors are in Milvus: network, vectors and labels change together."""

import dataclasses
import itertools
import shutil
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from pymilvus import MilvusClient

from evernear.common.plugins import run_ended
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.common.store.base import owner_of
from evernear.deployment import deploy_release, promote_release, roll_back
from evernear.embedding.embeddings import Embeddings
from evernear.errors import IntegrityError, TransientStoreError
from evernear.index.build import build_index
from evernear.index.description import Collection, collection_owner
from evernear.integrations.milvus import client as milvus_client
from evernear.release.archive import Candidate
from evernear.release.archive_reader import open_release
from evernear.release.manifest import ReleaseManifest
from evernear.release.promotions import Cause
from evernear.release.pruning import prune_releases
from evernear.release.registry import Registry
from evernear.serving.core import Predictor
from evernear.serving.responses import Prediction, Rejection
from evernear.settings import IndexSettings, RunSettings
from tests.releases import MakeRelease, PackedRelease, System, pack_release, release_maker

Make = Callable[..., PackedRelease]


@pytest.fixture
def make(
    system: System, milvus_uri: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest,
    run_settings: RunSettings,
) -> Make:  # fmt: skip
    """Pack a release with a collection of the index type ``kind``; the alias is that of the test.
    Each release is newer than the one before and older than those of ``make_release``."""
    seconds = itertools.count()

    def pack(candidate: Candidate, directory: Path, created: datetime) -> PackedRelease:
        return pack_release(candidate, directory, created - timedelta(hours=1) + timedelta(seconds=next(seconds)))

    def make(kind: str = "FLAT", parent: str | None = None) -> PackedRelease:
        index_dir = tmp_path_factory.mktemp("index")
        alias = request.node.originalname
        index = IndexSettings(backend="milvus", uri=milvus_uri, collection=alias, type=kind)
        embeddings = Embeddings.open(system.index_dir.parent / "embeddings")
        owner = owner_of(open_store(run_settings.store_uri))
        build_index(embeddings, system.dataset.labels, index, index_dir, owner=owner)
        in_milvus = dataclasses.replace(system, index_dir=index_dir)
        made = release_maker(in_milvus, lambda: tmp_path_factory.mktemp("release"), pack)
        return made(parent=parent)

    return make


@pytest.fixture
def run_settings(tmp_path: Path) -> RunSettings:
    return RunSettings(workdir=tmp_path / "work", target="registry")


def registry(settings: RunSettings) -> Registry:
    return Registry(open_store(settings.store_uri))


def collection_of(release: PackedRelease) -> Collection:
    assert release.manifest.collection
    return release.manifest.collection


def alias_target(release: PackedRelease) -> str | None:
    collection = collection_of(release)
    return milvus_client.alias_target(milvus_client.connect(collection.uri), collection)


def test_release_has_no_vectors_but_names_their_collection(
    make: Make, run_settings, tmp_path, make_release: MakeRelease
):
    release = make()
    parts = open_release(release.archive, tmp_path / "parts")
    assert "index.faiss" not in parts.manifest.parts
    assert {"labels.npy", "network.pt"} < set(parts.manifest.parts)
    predictor, in_archive = Predictor.open(parts), make_release()
    reference = Predictor.open(open_release(in_archive.archive, tmp_path / "reference"))
    for image, query in parts.smoke_queries():
        (answer,), (expected,) = predictor.predict([image]), reference.predict([image])
        assert isinstance(answer, Prediction)
        assert isinstance(expected, Prediction)
        assert (answer.pred, answer.unknown) == (query.pred, query.unknown) == (expected.pred, expected.unknown)
        assert answer.dist == pytest.approx(expected.dist, abs=1e-4)


@pytest.mark.parametrize("change", [{"collection": None}, {"parts": "without labels"}])
def test_manifest_must_name_either_the_collection_or_the_vectors(make: Make, change):
    tree = make().manifest.model_dump(mode="json")
    if change == {"collection": None}:
        tree |= change
    else:
        tree["parts"].pop("labels.npy")
    with pytest.raises(ValueError, match="parts are missing or unknown"):
        ReleaseManifest.model_validate(tree)


def test_alias_follows_promotions_and_rollbacks(make: Make, make_release: MakeRelease, run_settings):
    first = make()
    deploy_release(first.archive, first.verdict, run_settings)
    assert alias_target(first) == collection_of(first).name
    second = make("IVF_FLAT,nlist=4", parent=first.version)
    deploy_release(second.archive, second.verdict, run_settings)
    assert alias_target(first) == collection_of(second).name != collection_of(first).name

    roll_back(run_settings)
    assert alias_target(first) == collection_of(first).name
    promote_release(second.version, run_settings, cause=Cause(by="test"))
    assert alias_target(first) == collection_of(second).name

    in_archive = make_release(parent=second.version)
    deploy_release(in_archive.archive, in_archive.verdict, run_settings)
    assert alias_target(first) is None
    roll_back(run_settings)
    assert alias_target(first) == collection_of(second).name


def test_alias_of_a_collection_that_evernear_did_not_make_stays(make: Make, run_settings, caplog):
    first = make()
    collection = collection_of(first)
    client, foreign = milvus_client.connect(collection.uri), f"{collection.alias}_of_someone"
    client.create_collection(foreign, dimension=4)
    client.create_alias(foreign, collection.alias)
    deploy_release(first.archive, first.verdict, run_settings)
    assert f"{collection.alias} points at {foreign}, which belongs to another store" in caplog.text
    assert alias_target(first) == foreign


def make_champion_the_anchor(releases: Registry) -> None:
    """The first promoted release, the anchor, is not pruned."""
    champion = releases.champion()
    assert champion
    releases.set_anchor(champion.version, champion)


def test_pruning_deletes_only_collections_that_no_release_needs(make: Make, make_release, run_settings, milvus_uri):
    releases = [make()]
    releases += [make(parent=releases[0].version)]  # the same collection
    releases += [make("IVF_FLAT,nlist=4", parent=releases[1].version)]
    other = make("HNSW,M=8,efConstruction=40")
    assert collection_of(releases[0]) == collection_of(releases[1])
    registry(run_settings).publish(other.archive)
    for release in releases:
        deploy_release(release.archive, release.verdict, run_settings)
    champion = make_release(parent=releases[2].version)
    deploy_release(champion.archive, champion.verdict, run_settings)
    client = MilvusClient(milvus_uri)

    def remaining() -> set[str]:
        alias = collection_of(other).alias
        return {name for name in client.list_collections() if name.startswith(alias)}

    make_champion_the_anchor(registry(run_settings))
    assert prune_releases(registry(run_settings), keep=1) == tuple(
        sorted([releases[0].version, releases[1].version, other.version])
    )
    assert remaining() == {collection_of(releases[2]).name}


def test_unreachable_milvus_does_not_undo_a_promotion(make: Make, run_settings, monkeypatch, caplog):
    release = make()
    unreachable = TransientStoreError("Milvus at somewhere cannot be reached: no answer.")

    def fail(collection: Collection) -> None:
        raise unreachable

    with monkeypatch.context() as patch:
        patch.setattr(milvus_client, "point_alias", fail)
        assert deploy_release(release.archive, release.verdict, run_settings).version == release.version
    assert "cannot be reached: no answer. The next run sets it." in caplog.text
    assert registry(run_settings).champion().version == release.version  # pyright: ignore[reportOptionalMemberAccess]
    assert alias_target(release) is None
    record = RunRecord(open_store(run_settings.store_uri), "20260101-000000-0000")
    assert run_ended(record, "") == []
    assert alias_target(release) == collection_of(release).name


def test_release_with_a_missing_collection_does_not_load(make: Make, tmp_path):
    release = make()
    milvus_client.drop(collection_of(release))
    with pytest.raises(IntegrityError, match="does not exist"):
        Predictor.open(open_release(release.archive, tmp_path / "parts"))


def test_images_are_rejected_while_milvus_is_unreachable(make: Make, tmp_path, monkeypatch):
    parts = open_release(make().archive, tmp_path / "parts")
    predictor = Predictor.open(parts)
    image, _ = parts.smoke_queries()[0]
    with monkeypatch.context() as patch:
        patch.setattr("pymilvus.MilvusClient.search", _unavailable)
        bad, good = predictor.predict([b"text", image])
    assert isinstance(bad, Rejection)
    assert isinstance(good, Rejection)
    assert (bad.code, good.code, good.type) == (400, 503, "GalleryUnavailable")
    assert isinstance(predictor.predict([image])[0], Prediction)


def _unavailable(*_: object, **__: object) -> None:
    from pymilvus import MilvusException

    raise MilvusException(2, "no connection")


def test_copied_store_leaves_the_collections_of_the_original(
    system: System, make_release: MakeRelease, run_settings, milvus_uri, tmp_path, tmp_path_factory, caplog
):
    """Collections belong to a store at a place: a copy has the same id, but prunes only what it
    filled itself."""
    store = open_store(run_settings.store_uri)
    alias, index_dir = f"test_{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("index")
    index = IndexSettings(backend="milvus", uri=milvus_uri, collection=alias, type="FLAT")
    embeddings = Embeddings.open(system.index_dir.parent / "embeddings")
    build_index(embeddings, system.dataset.labels, index, index_dir, owner=owner_of(store))
    made = release_maker(dataclasses.replace(system, index_dir=index_dir), lambda: tmp_path_factory.mktemp("release"))
    first = made()
    deploy_release(first.archive, first.verdict, run_settings)
    assert collection_of(first).alias == alias
    assert collection_owner(collection_of(first).name) == owner_of(store)

    copied = RunSettings(workdir=tmp_path / "copy", target="registry")
    shutil.copytree(run_settings.workdir / "store", tmp_path / "copy" / "store")
    champion = first.version
    for _ in range(2):
        release = make_release(parent=champion)
        deploy_release(release.archive, release.verdict, copied)
        champion = release.version
    make_champion_the_anchor(registry(copied))
    assert first.version in prune_releases(registry(copied), keep=1)
    assert alias_target(first) == collection_of(first).name
    client = MilvusClient(milvus_uri)
    assert collection_of(first).name in client.list_collections()
    assert f"The collection {collection_of(first).name} in milvus is left" in caplog.text

    champion = first.version
    for _ in range(2):
        release = make_release(parent=champion)
        deploy_release(release.archive, release.verdict, run_settings)
        champion = release.version
    make_champion_the_anchor(registry(run_settings))
    assert first.version in prune_releases(registry(run_settings), keep=1)
    assert collection_of(first).name not in client.list_collections()


def test_lost_record_of_the_champion_before_is_no_fault_of_milvus(make_release: MakeRelease, run_settings, caplog):
    first = make_release()
    deploy_release(first.archive, first.verdict, run_settings)
    second = make_release(parent=first.version)
    open_store(run_settings.store_uri).put(f"releases/manifests/{first.version}.json", b"")
    deploy_release(second.archive, second.verdict, run_settings)
    assert "Milvus" not in caplog.text
