"""Nothing in the store may have pixels, hashes or vectors of images that the source removed."""

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from PIL import Image

from evernear.common.disk import sha256_bytes
from evernear.common.run_record import RunRecord
from evernear.common.store import FileStore, open_store
from evernear.common.store.base import owner_of, put_folder
from evernear.data import ingest
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest, save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.train import train_network
from evernear.errors import ConflictError, StoreError
from evernear.evaluation.answer_table import ANSWERS_FILE, AnswerWriter
from evernear.evaluation.verdict import Verdict
from evernear.index.build import build_index
from evernear.maintenance.forget import find, forget_images
from evernear.release.archive import Candidate, make_archive
from evernear.release.registry import Registry
from evernear.review.answers import ANSWERS, Answer
from evernear.review.queue import ORIGINALS, SUBMITTED, Submission
from evernear.review.suspects import SUSPECTS, Suspect, Suspects
from evernear.serving import HANDLER
from evernear.serving.gallery_images import GalleryImages
from evernear.serving.query_log_files import LoggedQuery, Period, parse_file
from evernear.settings import DataSettings, IndexSettings, ServingSettings, TrainSettings
from tests.command_line import evernear
from tests.digits import load_digits
from tests.releases import System, decided

TINY = TrainSettings(epochs=1, min_steps=0, width=4, embedding_dim=16, batch_size=32)
LOG = "queries/20260101/20260101T000000Z-20260101.000000.00000000-host-1-00000000.jsonl"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMED = b"an image that a person called c"


@dataclass(frozen=True)
class Prepared:
    """A store with the history of three snapshots, and its source."""

    root: Path
    images: Path
    """The source, which the copies share."""
    removed: dict[bytes, bytes]
    """Pixels of each removed image by its hash in the store."""
    kept: bytes
    """Pixels of an image that is still in the source."""
    trained: str
    reindexed: str
    """The release after the removal, with the network from before."""
    retrained: str
    before: Manifest
    after: Manifest
    collection: str

    @property
    def source(self) -> DataSettings:
        return DataSettings(source=f"folder:{self.images}", gallery_fraction=0.2, query_fraction=0.1)

    @property
    def store(self) -> FileStore:
        opened = open_store((self.root / "store").as_uri())
        assert isinstance(opened, FileStore)
        return opened


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, milvus_uri: str) -> Prepared:
    """Train on three classes; remove class c and some of b; reindex; train again."""
    root = tmp_path_factory.mktemp("forget")
    images, digits = load_digits()
    for label, name in enumerate("abc"):
        (root / "images" / name).mkdir(parents=True)
        for number, image in enumerate(images[digits == label][:60]):
            Image.fromarray((image * 15.9).astype(np.uint8)).save(root / f"images/{name}/{number}.png")
    store = (root / "store").as_uri()
    settings = DataSettings(source=f"folder:{root / 'images'}", gallery_fraction=0.2, query_fraction=0.1)
    before = ingest_source(settings, store)
    first, trained, collection = release(root, before, 0, None, in_milvus(milvus_uri))
    shutil.rmtree(root / "images/c")
    for number in range(10):
        (root / f"images/b/{number}.png").unlink()
    after = ingest_source(settings, store)
    _, reindexed, _ = release(root, after, 1, first, IndexSettings())
    _, retrained, _ = release(root, after, 2, None, IndexSettings())

    pixels = {manifest.digest: pixels_by_hash(store, manifest) for manifest in (before, after)}
    removed = {digest: image for digest, image in pixels[before.digest].items() if digest not in pixels[after.digest]}
    kept = next(iter(pixels[after.digest].values()))
    return Prepared(root, root / "images", removed, kept, trained, reindexed, retrained, before, after, collection)


def in_milvus(uri: str) -> IndexSettings:
    return IndexSettings(backend="milvus", uri=uri, collection="forget")


def pixels_by_hash(store: str, manifest: Manifest) -> dict[bytes, bytes]:
    dataset = Dataset(manifest, open_store(store))
    return {
        digest.tobytes(): image.tobytes()
        for split in ("train", "test", "gallery", "query")
        for block in dataset.blocks(split)
        for digest, image in zip(block.digests, block.images, strict=True)
    }


def release(
    root: Path, manifest: Manifest, number: int, network: Path | None, settings: IndexSettings
) -> tuple[Path, str, str]:
    """Publish a release: the directory of its network, its version and its collection."""
    directory = root / f"work{number}"
    save_manifest(manifest, directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    store = open_store(manifest.store_uri)
    if network is None:
        network = directory / "network"
        train_network(dataset, TINY, directory / "trained", store)
        export_network(directory / "trained", dataset, network)
    embed_dataset(network, dataset, directory / "embeddings", store=store)
    put_folder(store, f"parts/{directory.name}", directory / "embeddings" / "parts")
    embeddings, index_dir = Embeddings.open(directory / "embeddings"), directory / "index"
    described = build_index(embeddings, dataset.labels, settings, index_dir, owner=owner_of(store))
    verdict = decided(System(dataset, network, directory / "index"), None, promote=True)
    verdict.save(directory / "verdict.json")
    candidate = Candidate(dataset, network, directory / "index", directory / "verdict.json", {}, None)
    packed = make_archive(candidate, ServingSettings(), HANDLER, directory / "release", NOW + timedelta(seconds=number))
    Registry(store).publish(packed.archive)
    record_run(RunRecord(store, f"run-{number}"), verdict)
    store.put(f"runs/failed-{number}/run.html", b"a page of a run that read no image")
    return network, packed.manifest.version, described.collection.name if described.collection else ""


def record_run(record: RunRecord, verdict: Verdict) -> None:
    pictures = {"examples": {"images": "a sheet"}, "near_duplicates": {"pairs": "a test image"}}
    snapshot = {"dataset_digest": verdict.dataset_digest}
    record.save(validation=snapshot, evaluation={"candidate": snapshot}, metrics={}, **pictures)
    with TemporaryDirectory() as directory:
        with AnswerWriter(Path(directory) / ANSWERS_FILE, ("cat",)):
            pass
        record.put(ANSWERS_FILE, Path(directory) / ANSWERS_FILE)
    record.store.put(f"runs/{record.run}/run.html", b"a page with images")


@pytest.fixture
def prepared(original: Prepared, milvus_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """A copy of the original, with logged queries, and with the champion of the test to be set. The
    copy owns the original's collection, which is filled again if another test has deleted it."""
    owner = owner_of(original.store)
    embeddings = Embeddings.open(original.root / "work0" / "embeddings")
    build_index(embeddings, original.before.labels, in_milvus(milvus_uri), tmp_path / "index", owner=owner)
    monkeypatch.setattr("evernear.release.registry.owner_of", lambda _: owner)
    shutil.copytree(original.root, tmp_path / "copy")
    copied = Prepared(**{**vars(original), "root": tmp_path / "copy"})
    copied.store.put(LOG, "".join(f"{line.model_dump_json()}\n" for line in log_lines()).encode())
    suspect = Suspect(
        image=next(iter(original.removed)).hex(), files=("c/0.png",), label="c", suggested="a", margin=0.1
    )
    suspects = Suspects(
        source=original.source.source,
        dataset_digest=original.before.digest,
        created=NOW,
        found=1,
        images=180,
        suspects=(suspect,),
    )
    copied.store.put(SUSPECTS, suspects.to_json())
    sent = {"0": ("a",), "1": ("b", "a"), "2": ("a",)}
    for number, candidates in sent.items():
        copied.store.put(f"{SUBMITTED}{64 * number}.json", submission(*candidates).to_json())
        copied.store.put(f"{ORIGINALS}{64 * number}", b"a photograph")
    copied.store.put(f"{ORIGINALS}{64 * '3'}", b"a photograph whose sender was killed")
    named = sha256_bytes(NAMED)
    answers = (answer(64 * "2", "c"), answer(64 * "2", "", "undo"), answer(64 * "0", "a"), answer(named, "c"))
    copied.store.put(ANSWERS, b"".join(answers))
    return copied


def log_lines() -> list[Period | LoggedQuery]:
    period = Period(version="20260101.000000.00000000", since=NOW, until=NOW, queries=9, unknown=0)
    image = base64.b64encode(b"an image").decode()
    common = {"at": NOW, "dist": 0.1, "unknown": False}
    return [
        period,
        LoggedQuery(pred="a", image=image, candidates=("a",), **common),
        LoggedQuery(pred="c", **common),
        LoggedQuery(pred="c", image=image, candidates=("c",), **common),
        LoggedQuery(pred="a", image=image, candidates=("a", "b"), **common),
        LoggedQuery(pred="c", file=image, candidates=("c",), id="1", **common),
        LoggedQuery(pred="a", image=base64.b64encode(NAMED).decode(), candidates=("a",), **common),
    ]


def submission(*candidates: str) -> Submission:
    file = base64.b64encode(b"a photograph").decode()
    return Submission(at=NOW, who="ann", dist=0.1, unknown=True, candidates=candidates, version="v", picture=file)


def answer(image: str, label: str, action: str = "label") -> bytes:
    given = Answer.model_validate({"image": image, "action": action, "label": label, "who": "ann", "at": NOW})
    return f"{given.model_dump_json()}\n".encode()


def promote(prepared: Prepared, *versions: str) -> None:
    registry = Registry(prepared.store)
    for version in versions:
        registry.set_champion(version, registry.champion())


def content(prepared: Prepared) -> bytes:
    """Everything in the store, names included."""
    store = prepared.root / "store"
    files = [path for path in sorted(store.rglob("*")) if path.is_file() and store / "maintenance" not in path.parents]
    return b"".join(str(path).encode() + path.read_bytes() for path in files)


def test_nothing_in_the_store_has_a_removed_image(prepared: Prepared, milvus_uri: str):
    from pymilvus import MilvusClient

    everything = content(prepared)
    assert len(prepared.removed) == 70
    assert all(pixels in everything for pixels in prepared.removed.values())
    assert all(digest in everything for digest in prepared.removed)
    promote(prepared, prepared.trained, prepared.reindexed, prepared.retrained)
    milvus = MilvusClient(milvus_uri)
    assert milvus.has_collection(prepared.collection)

    forgotten = forget_images(prepared.store)
    everything = content(prepared)
    assert prepared.kept in everything
    assert not any(pixels in everything for pixels in prepared.removed.values())
    assert not any(digest in everything for digest in prepared.removed)
    assert not any(digest.hex().encode() in everything for digest in prepared.removed)
    assert not milvus.has_collection(prepared.collection)

    assert (forgotten.images, forgotten.labels) == (70, ("b", "c"))
    assert forgotten.releases == (prepared.trained, prepared.reindexed)
    assert forgotten.snapshots == (f"images/{prepared.before.digest}",)
    assert forgotten.queries == 4
    assert forgotten.submissions == 2, "one looks like b, and one was called c for a while"
    assert [info.key for info in prepared.store.list(SUBMITTED)] == [f"{SUBMITTED}{64 * '0'}.json"]
    assert [info.key for info in prepared.store.list(ORIGINALS)] == [f"{ORIGINALS}{64 * '0'}"]
    assert min(forgotten.shards, forgotten.embeddings, forgotten.checkpoints, forgotten.parts) > 0
    assert forgotten.pages == 5
    assert not any(find(prepared.store).model_dump(exclude={"labels"}).values())


def test_objects_without_removed_images_remain(prepared: Prepared):
    promote(prepared, prepared.trained, prepared.retrained)
    forget_images(prepared.store)
    registry = Registry(prepared.store)
    assert list(registry.list()) == [prepared.retrained]
    registry.fetch(prepared.retrained, prepared.root / "fetched.mar")
    champion = registry.champion()
    assert champion
    with pytest.raises(StoreError, match="was pruned"):
        registry.roll_back(champion)
    assert prepared.store.find("runs/run-2/run.html")
    assert not prepared.store.find("runs/run-0/examples.json")
    assert not prepared.store.find("runs/run-0/near_duplicates.json")
    assert not prepared.store.find("runs/run-0/answers.parquet")
    _, queries = parse_file(prepared.store.get(LOG), LOG)
    assert [(query.pred, bool(query.image)) for query in queries] == [("a", True), ("c", False)]
    assert len(pixels_by_hash(prepared.store.uri, prepared.after)) == 110


def test_no_row_leads_to_a_forgotten_image(prepared: Prepared) -> None:
    images = GalleryImages(prepared.store)
    assert images.find(prepared.trained, 0)
    promote(prepared, prepared.trained, prepared.retrained)

    forget_images(prepared.store)
    # The same object, which has the snapshots open.
    for forgetful in (images, GalleryImages(prepared.store)):
        assert forgetful.find(prepared.trained, 0) is None
        assert forgetful.names(prepared.trained, next(iter(prepared.removed)).hex()) == ()
        assert forgetful.find(prepared.retrained, 0)


@pytest.fixture
def returned(prepared: Prepared):
    """Put a removed image back into the source."""
    path = prepared.images / "b/0.png"
    Image.fromarray((load_digits()[0][1] * 15.9).astype(np.uint8)).save(path)
    yield path
    path.unlink()


def test_removed_image_can_be_added_again(prepared: Prepared, request: pytest.FixtureRequest):
    promote(prepared, prepared.retrained)
    forget_images(prepared.store)
    assert ingest_source(prepared.source, prepared.store.uri).digest == prepared.after.digest
    request.getfixturevalue("returned")
    returned = ingest_source(prepared.source, prepared.store.uri)
    assert len(pixels_by_hash(prepared.store.uri, returned)) == 111


@pytest.mark.parametrize("live", ["trained", "reindexed"])
def test_affected_champion_is_refused_and_nothing_is_deleted(prepared: Prepared, live: str):
    """The network of the reindexed release was trained on removed images."""
    champion: str = getattr(prepared, live)
    promote(prepared, prepared.retrained, champion)
    before = content(prepared)
    with pytest.raises(ConflictError, match=f"The champion {champion} was built from images that the source no longer"):
        forget_images(prepared.store)
    assert find(prepared.store).champion == champion
    assert content(prepared) == before


@pytest.mark.slow
def test_releases_are_not_deleted_without_a_champion(prepared: Prepared):
    before = content(prepared)
    with pytest.raises(StoreError, match="only while another one is live"):
        forget_images(prepared.store)
    assert content(prepared) == before


@pytest.mark.parametrize("deletions", [0, 3, 12])
def test_killed_forget_is_completed_by_the_next_one(prepared: Prepared, monkeypatch, deletions: int):
    promote(prepared, prepared.trained, prepared.retrained)
    left = iter(range(deletions))

    def delete(self: FileStore, key: str, delete: Callable[[FileStore, str], None] = FileStore.delete) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        delete(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "delete", delete)
        with pytest.raises(KeyboardInterrupt):
            forget_images(prepared.store)
    forget_images(prepared.store)
    everything = content(prepared)
    assert not any(pixels in everything for pixels in prepared.removed.values())
    assert not any(digest in everything for digest in prepared.removed)
    assert list(Registry(prepared.store).list()) == [prepared.retrained]
    assert len(pixels_by_hash(prepared.store.uri, prepared.after)) == 110


@pytest.mark.usefixtures("returned")
def test_ingest_in_progress_fails_and_can_be_repeated(prepared: Prepared, monkeypatch):
    promote(prepared, prepared.retrained)

    def combine(*arguments: Any, combine: Callable[..., None] = ingest.combine, **named: Any) -> None:
        forget_images(prepared.store)
        combine(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "combine", combine)
        with pytest.raises(ConflictError, match="finished in the meantime; run again"):
            ingest_source(prepared.source, prepared.store.uri)
    manifest = ingest_source(prepared.source, prepared.store.uri)
    assert len(pixels_by_hash(prepared.store.uri, manifest)) == 111


def test_command_lists_first_and_deletes_with_yes(prepared: Prepared):
    promote(prepared, prepared.trained, prepared.retrained)
    before = content(prepared)
    store = ["--store", prepared.store.uri]
    listed = evernear("forget", *store)
    assert "Nothing was deleted. Add --yes" in listed.stdout
    assert f"The champion becomes the anchor, which the gate compares candidates with: {prepared.trained}, the an" in (
        listed.stdout
    )
    assert prepared.trained in listed.stdout
    assert content(prepared) == before
    deleted = json.loads(evernear("forget", "--yes", "--json", *store).stdout)
    assert deleted["releases"] == [prepared.trained, prepared.reindexed]
    assert deleted["anchor"] == prepared.trained
    champion = Registry(prepared.store).champion()
    assert champion.anchor == prepared.retrained
    nothing = evernear("forget", *store).stdout
    assert "images       0" in nothing
    assert "--yes" not in nothing
    assert "Nothing to delete" in nothing


def test_one_damaged_record_does_not_break_the_rest(prepared: Prepared) -> None:
    promote(prepared, prepared.retrained)
    prepared.store.put(f"releases/manifests/{prepared.reindexed}.json", b"")
    for key in (LOG, SUSPECTS, "runs/run-1/verdict.json"):
        prepared.store.put(key, b"")
    found = find(prepared.store)
    assert found.unreadable == (prepared.reindexed, LOG)
    assert found.releases == (prepared.trained,)
    assert forget_images(prepared.store) == found
    rebuilt = Registry(prepared.store)
    rebuilt.rebuild_record(prepared.reindexed)
    assert find(prepared.store).unreadable == ()
