"""A row in an answer leads to the image that the index has in that row."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import Store, open_store
from evernear.data.manifest import Manifest, save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.errors import IntegrityError
from evernear.index.build import build_index
from evernear.index.search import Gallery
from evernear.release.archive import Candidate, make_archive
from evernear.release.records import MANIFESTS, PRUNED
from evernear.release.registry import Registry
from evernear.serving import HANDLER
from evernear.serving.gallery_images import GalleryImages
from evernear.settings import DataSettings, IndexSettings, ServingSettings
from tests.digits import load_digits
from tests.releases import System, decided
from tests.small_ingest import ingest_small

NOW = datetime(2026, 1, 1, tzinfo=UTC)
COUNTS = {"a": 60, "b": 25, "c": 12}


@dataclass(frozen=True)
class Indexed:
    """A release of one snapshot, and the digests of the images by row of its index."""

    store: Store
    version: str
    manifest: Manifest
    directory: Path

    @property
    def digests(self) -> list[str]:
        """From the embeddings that the index was built from."""
        blocks = Embeddings.open(self.directory / "embeddings").blocks("gallery")
        return [digest.tobytes().hex() for block in blocks for digest in block.digests]


@pytest.fixture(scope="module")
def indexed_twice(system: System, tmp_path_factory: pytest.TempPathFactory) -> tuple[Indexed, Indexed]:
    """Index three classes; then remove images of a and all of c, add d, and index again, as a
    reindex does."""
    root = tmp_path_factory.mktemp("rows")
    for number, (label, count) in enumerate(COUNTS.items()):
        write_images(root / "images" / label, number, count)
    settings = DataSettings(source=f"folder:{root / 'images'}", gallery_fraction=0.2, query_fraction=0.1)
    store = open_store((root / "store").as_uri())
    first = release(system, root / "first", ingest_into_small_shards(settings, store.uri), frozenset())
    for path in sorted((root / "images").glob("a/*.png"))[::3] + list((root / "images").glob("c/*.png")):
        path.unlink()
    write_images(root / "images/d", 3, 20)
    second = release(system, root / "second", ingest_into_small_shards(settings, store.uri), frozenset({"d"}))
    return first, second


def ingest_into_small_shards(settings: DataSettings, store_uri: str) -> Manifest:
    """Shards of about 17 images, so that rows are spread over many."""
    return ingest_small(settings, store_uri, shard_size_bytes=2048)


def write_images(folder: Path, digit: int, count: int) -> None:
    images, digits = load_digits()
    folder.mkdir(parents=True)
    for number, image in enumerate(images[digits == digit][:count]):
        Image.fromarray((image * 15.9).astype(np.uint8)).save(folder / f"{number}.png")


def release(system: System, directory: Path, manifest: Manifest, untrained: frozenset[str]) -> Indexed:
    """Publish a release of a snapshot with the network of ``system``."""
    save_manifest(manifest, directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    embed_dataset(system.network_dir, dataset, directory / "embeddings", untrained=untrained)
    embeddings = Embeddings.open(directory / "embeddings")
    # Unmoved vectors, each of which is its own nearest neighbor.
    build_index(embeddings, dataset.labels, IndexSettings(), directory / "index", toward_mean=0)
    decided(System(dataset, system.network_dir, directory / "index"), None, promote=True).save(directory / "verdict")
    candidate = Candidate(dataset, system.network_dir, directory / "index", directory / "verdict", {}, None)
    created = NOW + timedelta(seconds=len(untrained))
    packed = make_archive(candidate, ServingSettings(), HANDLER, directory / "release", created)
    store = open_store(manifest.store_uri)
    Registry(store).publish(packed.archive)
    return Indexed(store, packed.manifest.version, manifest, directory)


def pixels_by_digest(indexed: Indexed) -> dict[str, bytes]:
    dataset = Dataset(indexed.manifest, indexed.store)
    return {
        digest.tobytes().hex(): image.tobytes()
        for split in ("train", "gallery")
        for block in dataset.blocks(split)
        for digest, image in zip(block.digests, block.images, strict=True)
    }


def test_each_row_leads_to_the_image_that_was_indexed_in_it(indexed_twice: tuple[Indexed, Indexed]) -> None:
    for indexed in indexed_twice:
        manifest, expected = indexed.manifest, indexed.digests
        joined = Registry(indexed.store).get(indexed.version).manifest.joined_gallery
        assert joined
        assert len(expected) == manifest.count("gallery") + sum(joined.values()), "train images have joined"
        assert len(manifest.shards) > 6
        images, pixels = GalleryImages(indexed.store), pixels_by_digest(indexed)
        found = [images.find(indexed.version, row) for row in range(len(expected))]
        assert [image and image.digest for image in found] == expected
        assert all(image and image.pixels.tobytes() == pixels[image.digest] for image in found)
        labels = np.load(indexed.directory / "index" / "labels.npy")
        assert [image and image.label for image in found] == [manifest.labels[label] for label in labels]


@pytest.mark.slow
def test_neighbors_of_an_answer_carry_these_rows(indexed_twice: tuple[Indexed, Indexed]) -> None:
    embeddings = Embeddings.open(indexed_twice[1].directory / "embeddings")
    gallery = Gallery.open(indexed_twice[1].directory / "index", embeddings.network_sha256)
    vectors = np.concatenate([block.embeddings for block in embeddings.blocks("gallery")])
    for row, answer in enumerate(gallery.recognize(vectors, k=1)):
        assert vectors[answer.neighbors[0].row] == pytest.approx(vectors[row], abs=1e-3)


def test_row_or_release_that_does_not_exist_has_no_image(indexed_twice: tuple[Indexed, Indexed]) -> None:
    images = GalleryImages(indexed_twice[0].store)
    for row in (-1, 10_000):
        with pytest.raises(IntegrityError, match=f"no row {row}"):
            images.find(indexed_twice[0].version, row)
    for version in ("20200101.000000.00000000", "../../x", ""):
        assert images.find(version, 0) is None
        assert images.names(version, "00") == ()


def test_pruned_release_shows_its_images_as_long_as_its_snapshot_is_stored(
    indexed_twice: tuple[Indexed, Indexed],
) -> None:
    store, version = indexed_twice[0].store, indexed_twice[0].version
    key = f"{MANIFESTS}{version}.json"
    record = store.get(key)
    store.put(f"{PRUNED}{version}.json", record)
    store.delete(key)
    try:
        assert GalleryImages(store).find(version, 0)
    finally:
        store.put(key, record)
        store.delete(f"{PRUNED}{version}.json")


@pytest.mark.slow
def test_image_has_the_names_of_its_files(indexed_twice: tuple[Indexed, Indexed]) -> None:
    images, version = GalleryImages(indexed_twice[1].store), indexed_twice[1].version
    image = images.find(version, 0)
    assert image
    (name,) = images.names(version, image.digest)
    assert name.startswith(f"{image.label}/")
    assert images.names(version, "00" * 32) == ()
