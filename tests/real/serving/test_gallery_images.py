"""A row in an answer leads to the image that the index has in that row."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

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
from tests.releases import System, decided
from tests.small_ingest import ingest_small

NOW = datetime(2026, 1, 1, tzinfo=UTC)
COUNTS = {"a": 60, "b": 25, "c": 12}


@dataclass(frozen=True)
class Built:
    """A store with a release of each of two snapshots, and the digests of the images by row of
    their indexes."""

    store: Store
    versions: tuple[str, str]
    digests: dict[str, list[str]]
    index_dirs: dict[str, Path]
    manifests: dict[str, Manifest]


@pytest.fixture(scope="module")
def built(system: System, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Index three classes; then remove images of a and all of c, add d, and index again, as a
    reindex does."""
    root = tmp_path_factory.mktemp("rows")
    for number, (label, count) in enumerate(COUNTS.items()):
        write_images(root / "images" / label, number, count)
    settings = DataSettings(source=f"folder:{root / 'images'}", gallery_fraction=0.2, query_fraction=0.1)
    store = open_store((root / "store").as_uri())
    before = ingest_into_small_shards(settings, store.uri)
    first = release(system, root / "first", before, frozenset())
    for path in sorted((root / "images").glob("a/*.png"))[::3] + list((root / "images").glob("c/*.png")):
        path.unlink()
    write_images(root / "images/d", 3, 20)
    after = ingest_into_small_shards(settings, store.uri)
    second = release(system, root / "second", after, frozenset({"d"}))
    versions = (first, second)
    places = dict(zip(versions, (root / "first", root / "second"), strict=True))
    return Built(
        store,
        versions,
        {version: row_digests(directory) for version, directory in places.items()},
        {version: directory / "index" for version, directory in places.items()},
        dict(zip(versions, (before, after), strict=True)),
    )


def ingest_into_small_shards(settings: DataSettings, store_uri: str) -> Manifest:
    """Shards of about 17 images, so that rows are spread over many."""
    return ingest_small(settings, store_uri, shard_size_bytes=2048)


def write_images(folder: Path, digit: int, count: int) -> None:
    digits = load_digits()
    folder.mkdir(parents=True)
    for number, image in enumerate(digits.images[digits.target == digit][:count]):
        Image.fromarray((image * 15.9).astype(np.uint8)).save(folder / f"{number}.png")


def release(system: System, directory: Path, manifest: Manifest, untrained: frozenset[str]) -> str:
    """Publish a release of a snapshot with the network of ``system``."""
    save_manifest(manifest, directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    embed_dataset(system.network_dir, dataset, directory / "embeddings", untrained=untrained)
    build_index(Embeddings.open(directory / "embeddings"), dataset.labels, IndexSettings(), directory / "index")
    decided(System(dataset, system.network_dir, directory / "index"), None, promote=True).save(directory / "verdict")
    candidate = Candidate(dataset, system.network_dir, directory / "index", directory / "verdict", {}, None)
    created = NOW + timedelta(seconds=len(untrained))
    packed = make_archive(candidate, ServingSettings(), HANDLER, directory / "release", created)
    Registry(open_store(manifest.store_uri)).publish(packed.archive)
    return packed.manifest.version


def row_digests(directory: Path) -> list[str]:
    """The images of an index by row, from the embeddings that it was built from."""
    blocks = Embeddings.open(directory / "embeddings").blocks("gallery")
    return [digest.tobytes().hex() for block in blocks for digest in block.digests]


def pixels_by_digest(built: Built, version: str) -> dict[str, bytes]:
    dataset = Dataset(built.manifests[version], built.store)
    return {
        digest.tobytes().hex(): image.tobytes()
        for split in ("train", "gallery")
        for block in dataset.blocks(split)
        for digest, image in zip(block.digests, block.images, strict=True)
    }


@pytest.mark.parametrize("number", [0, 1])
def test_each_row_leads_to_the_image_that_was_indexed_in_it(built: Built, number: int) -> None:
    version = built.versions[number]
    manifest, expected = built.manifests[version], built.digests[version]
    joined = Registry(built.store).get(version).manifest.joined_gallery
    assert joined
    assert len(expected) == manifest.count("gallery") + sum(joined.values()), "train images have joined"
    assert len(manifest.shards) > 6
    images, pixels = GalleryImages(built.store), pixels_by_digest(built, version)
    found = [images.find(version, row) for row in range(len(expected))]
    assert [image and image.digest for image in found] == expected
    assert all(image and image.pixels.tobytes() == pixels[image.digest] for image in found)
    labels = np.load(built.index_dirs[version] / "labels.npy")
    assert [image and image.label for image in found] == [manifest.labels[label] for label in labels]


def test_neighbors_of_an_answer_carry_these_rows(built: Built, system: System) -> None:
    version = built.versions[1]
    embeddings = Embeddings.open(built.index_dirs[version].parent / "embeddings")
    gallery = Gallery.open(built.index_dirs[version], embeddings.network_sha256)
    vectors = np.concatenate([block.embeddings for block in embeddings.blocks("gallery")])
    for row, answer in enumerate(gallery.recognize(vectors, k=1)):
        assert vectors[answer.neighbors[0].row] == pytest.approx(vectors[row], abs=1e-3)


@pytest.mark.parametrize("row", [-1, 10_000])
def test_row_outside_the_gallery_is_an_error(built: Built, row: int) -> None:
    with pytest.raises(IntegrityError, match=f"no row {row}"):
        GalleryImages(built.store).find(built.versions[0], row)


@pytest.mark.parametrize("version", ["20200101.000000.00000000", "../../x", ""])
def test_unknown_release_has_no_images(built: Built, version: str) -> None:
    assert GalleryImages(built.store).find(version, 0) is None
    assert GalleryImages(built.store).names(version, "00") == ()


def test_pruned_release_shows_its_images_as_long_as_its_snapshot_is_stored(built: Built) -> None:
    version = built.versions[0]
    key = f"{MANIFESTS}{version}.json"
    record = built.store.get(key)
    built.store.put(f"{PRUNED}{version}.json", record)
    built.store.delete(key)
    try:
        assert GalleryImages(built.store).find(version, 0)
    finally:
        built.store.put(key, record)
        built.store.delete(f"{PRUNED}{version}.json")


def test_image_has_the_names_of_its_files(built: Built) -> None:
    images, version = GalleryImages(built.store), built.versions[1]
    image = images.find(version, 0)
    assert image
    (name,) = images.names(version, image.digest)
    assert name.startswith(f"{image.label}/")
    assert images.names(version, "00" * 32) == ()
