"""Images and figures for the run page."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import open_store
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.evaluation import example_collector
from evernear.evaluation.evaluate import Evaluation, evaluate_systems
from evernear.evaluation.example_collector import (
    MAP_POINTS,
    SAMPLES_PER_CLASS,
    ExampleCollector,
    map_positions,
    project,
)
from evernear.evaluation.examples import BINS, SHEET_COLUMNS, Examples, Sheet
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.recognizer import Recognizer
from evernear.index.build import build_index
from evernear.settings import IndexSettings
from tests.releases import System
from tests.small_ingest import dataset_of


@pytest.fixture(scope="module")
def evaluated(system: System, recognizer: Recognizer) -> tuple[Evaluation, Examples]:
    collector = ExampleCollector(recognizer, system.dataset)
    evaluation = evaluate_systems(
        recognizer, None, system.dataset, OpenSet(held_out=()), batch_size=50, observers=[collector.add]
    )
    return evaluation, collector.finish(system.dataset)


def tile_of(sheet: Sheet, number: int) -> np.ndarray:
    whole = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet.webp))))
    row, column = divmod(number, SHEET_COLUMNS)
    return whole[row * sheet.height_px :, column * sheet.width_px :][: sheet.height_px, : sheet.width_px, 0]


def images(dataset: Dataset, split: str) -> dict[bytes, str]:
    """The label of each image of a split, by its pixels."""
    return {
        image.tobytes(): dataset.labels[label]
        for block in dataset.blocks(split)  # pyright: ignore[reportArgumentType]
        for image, label in zip(block.images, block.labels, strict=True)
    }


def test_mistakes_are_the_images_not_named_right_with_their_gallery_neighbors(system, recognizer, evaluated) -> None:
    evaluation, examples = evaluated
    answers = evaluation.candidate.answers
    assert 0 < len(examples.mistakes) == min(24, answers.named_wrong + answers.called_unknown)
    assert sum(not mistake.unknown for mistake in examples.mistakes) == min(24, answers.named_wrong)
    test, gallery = images(system.dataset, "test"), images(system.dataset, "gallery")
    for mistake in examples.mistakes:
        assert mistake.unknown or mistake.predicted != mistake.label
        query = tile_of(examples.images, mistake.tile)
        assert test[query.tobytes()] == mistake.label
        neighbors = recognizer.gallery.recognize(recognizer.embed(query[None, :, :, None]), 4)[0].neighbors
        assert [neighbor.label for neighbor in mistake.neighbors] == [neighbor.label for neighbor in neighbors]
        for neighbor in mistake.neighbors:
            assert gallery[tile_of(examples.images, neighbor.tile).tobytes()] == neighbor.label
    ranks = [(mistake.unknown, mistake.distance) for mistake in examples.mistakes]
    assert ranks == sorted(ranks)


def test_neighbors_that_joined_from_the_train_split_are_shown(system: System, tmp_path: Path) -> None:
    dataset = dataset_of("digits", tmp_path, gallery_fraction=0.01)
    embed_dataset(system.network_dir, dataset, tmp_path / "embeddings")
    build_index(Embeddings.open(tmp_path / "embeddings"), dataset.labels, IndexSettings(), tmp_path / "index")
    recognizer = Recognizer.open(system.network_dir, tmp_path / "index")
    collector = ExampleCollector(recognizer, dataset)
    evaluate_systems(recognizer, None, dataset, OpenSet(held_out=()), observers=[collector.add])
    examples = collector.finish(dataset)
    gallery, train = images(dataset, "gallery"), images(dataset, "train")
    neighbors = [
        (tile_of(examples.images, neighbor.tile).tobytes(), neighbor.label)
        for mistake in examples.mistakes
        for neighbor in mistake.neighbors
    ]
    assert any(pixels in train for pixels, _ in neighbors)
    assert all((gallery | train)[pixels] == label for pixels, label in neighbors)


def test_histograms_count_every_query(evaluated: tuple[Evaluation, Examples]) -> None:
    evaluation, examples = evaluated
    label_right = evaluation.candidate.label_right
    assert len(examples.distances_right) == len(examples.distances_wrong) == BINS
    assert sum(examples.distances_right) == label_right.count
    assert sum(examples.distances_wrong) == label_right.total - label_right.count


def test_map_places_neighbors_together(system: System, evaluated: tuple[Evaluation, Examples]) -> None:
    _, examples = evaluated
    test = images(system.dataset, "test")
    assert len(examples.map) == min(MAP_POINTS, system.dataset.count("test")) == examples.map_images.count
    for number in (0, len(examples.map) // 2, len(examples.map) - 1):
        assert test[tile_of(examples.map_images, number).tobytes()] == examples.map[number].label
    places = np.array([(point.x, point.y) for point in examples.map])
    assert 0 <= places.min() < places.max() <= 1
    labels = np.array([point.label for point in examples.map])
    apart = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    assert (labels[apart.argmin(axis=1)] == labels).mean() > 0.5, "chance is 0.1"


def test_samples_are_training_images_of_each_class(system: System, evaluated: tuple[Evaluation, Examples]) -> None:
    _, examples = evaluated
    train = images(system.dataset, "train")
    assert [sample.label for sample in examples.samples] == list(system.dataset.labels)
    for sample in examples.samples:
        assert len(sample.tiles) == SAMPLES_PER_CLASS
        assert {train[tile_of(examples.images, tile).tobytes()] for tile in sample.tiles} == {sample.label}
    assert examples.new_images == (), "the champion's dataset is the same"
    assert sum(examples.images_before.values()) == sum(map(system.dataset.count, ("train", "test", "gallery", "query")))


def test_new_images_are_those_of_added_shards(system: System, recognizer: Recognizer) -> None:
    manifest = system.dataset.manifest
    shards = tuple(shard for shard in manifest.shards if shard.split != "train")
    earlier = manifest.model_copy(update={"shards": shards})
    before = Dataset(earlier, system.dataset._files._store)
    examples = ExampleCollector(recognizer, system.dataset).finish(before)
    train = images(system.dataset, "train")
    assert {sample.label for sample in examples.new_images} == set(system.dataset.labels)
    for sample in examples.new_images:
        assert {train[tile_of(examples.images, tile).tobytes()] for tile in sample.tiles} == {sample.label}


def test_map_of_the_same_embeddings_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path.as_uri())
    embeddings = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    first = map_positions(embeddings, store)
    np.testing.assert_array_equal(first, project(embeddings))
    computed: list[int] = []
    monkeypatch.setattr(example_collector, "project", lambda rows: computed.append(len(rows)) or project(rows))
    np.testing.assert_array_equal(map_positions(embeddings, store), first)
    assert computed == []
    assert map_positions(embeddings[:39], store).shape == (39, 2)
    assert computed == [39]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 40])
def test_projection_of_few_or_equal_embeddings_is_finite(count: int) -> None:
    different = np.random.default_rng(0).normal(size=(count, 16)).astype(np.float32)
    for embeddings in (different, np.ones((count, 16), np.float32), different[:, :2], different[:, :1]):
        places = project(embeddings)
        assert places.shape == (count, 2)
        assert np.isfinite(places).all()
