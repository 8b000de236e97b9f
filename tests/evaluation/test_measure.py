from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from evernear.embedding.embed import embed
from evernear.embedding.embeddings import Embeddings
from evernear.errors import DataError, IntegrityError
from evernear.evaluation.measure import ELSEWHERE, Measurement, Outcomes, measure
from evernear.evaluation.recognizer import Recognizer
from evernear.index.build import build
from evernear.index.search import Recognition
from evernear.settings import EvaluationSettings, IndexSettings
from tests.conftest import System

SETTINGS = EvaluationSettings(batch_size=32)


@pytest.fixture(scope="module")
def recognizer(system: System) -> Recognizer:
    return Recognizer.open(system.network_dir, system.index_dir, "v1")


@pytest.fixture(scope="module")
def measured(system: System, recognizer: Recognizer) -> tuple[Measurement, Outcomes]:
    return measure(recognizer, system.dataset, SETTINGS)


@pytest.fixture(scope="module")
def one_by_one(system: System, recognizer: Recognizer) -> list[tuple[str, Recognition]]:
    """Each test image's label and the answer to it, asked as a server would ask."""
    return [
        (system.dataset.labels[label], recognizer.gallery.recognize(recognizer.embed(image[None]))[0])
        for block in system.dataset.blocks("test")
        for image, label in zip(block.images, block.labels, strict=True)
    ]


def test_every_figure_is_that_of_the_answers_counted_one_by_one(measured, one_by_one):
    found, outcomes = measured
    right = [answer.pred == label for label, answer in one_by_one]
    near = [[neighbor.label == label for neighbor in answer.neighbors] for label, answer in one_by_one]
    assert outcomes.right.tolist() == right
    assert 0 < found.accuracy.count < found.accuracy.total  # else the test could not tell much
    assert (found.accuracy.count, found.accuracy.total) == (sum(right), len(right))
    assert found.recall_at_1.count == sum(labels[0] for labels in near)
    assert found.recall_at_5.count == sum(map(any, near))
    assert found.false_rejects.count == sum(answer.unknown for _, answer in one_by_one)
    assert {(label, answer): count for label, answer, count in found.confusions} == Counter(
        (label, answer.pred) for label, answer in one_by_one
    )
    for label, recall in found.class_recall.items():
        mine = [answer.pred == label for known, answer in one_by_one if known == label]
        assert (recall.count, recall.total) == (sum(mine), len(mine))


def test_the_batch_size_changes_nothing(system: System, recognizer: Recognizer, measured):
    found, outcomes = measure(recognizer, system.dataset, EvaluationSettings(batch_size=1000))
    assert found == measured[0]
    assert (outcomes.right == measured[1].right).all()


def test_a_measurement_says_of_what_it_is(system: System, recognizer: Recognizer, measured):
    found = measured[0]
    assert found.dataset_digest == system.dataset.digest
    assert found.network_sha256 == recognizer.gallery.description.network_sha256
    assert found.index_digest == recognizer.gallery.description.digest
    assert found.queries_sha256 != measure(recognizer, system.dataset, SETTINGS, "query")[0].queries_sha256


def test_a_confusion_matrix_has_a_bounded_size_and_loses_no_query(measured):
    found = measured[0]
    labels, rows = found.confusion_matrix()
    assert labels == list(found.labels)
    assert sum(map(sum, rows)) == found.accuracy.total
    assert sum(rows[i][i] for i in range(len(rows))) == found.accuracy.count
    few, small = found.confusion_matrix(max_labels=3)
    assert (len(few), few[-1], len(small), {len(row) for row in small}) == (4, "(others)", 4, {4})
    assert sum(map(sum, small)) == found.accuracy.total
    assert all(type(count) is int for row in small for count in row)


@pytest.fixture(scope="module")
def index_without(system: System, tmp_path_factory: pytest.TempPathFactory):
    embeddings = tmp_path_factory.mktemp("embeddings")
    embed(system.network_dir, system.dataset, embeddings)

    def make(labels: tuple[str, ...], exclude: frozenset[str] = frozenset()) -> Path:
        directory = tmp_path_factory.mktemp("index")
        build(Embeddings.open(embeddings), labels, IndexSettings(), directory, exclude)
        return directory

    return make


def test_a_class_that_is_not_in_the_index_is_never_answered(system: System, index_without, measured):
    index_dir = index_without(system.dataset.labels, frozenset({"3"}))
    found, _ = measure(Recognizer.open(system.network_dir, index_dir), system.dataset, SETTINGS)
    assert found.known_labels == tuple("012456789")
    assert found.class_recall["3"].count == 0
    assert all(answer != "3" for _, answer, _ in found.confusions)
    assert found.accuracy.total == measured[0].accuracy.total


def test_labels_go_by_name_and_not_by_number(system: System, index_without, measured):
    """A champion may know other labels than the dataset has today, in another order."""
    renamed = tuple("gone" if label == "3" else label for label in system.dataset.labels)
    found, _ = measure(Recognizer.open(system.network_dir, index_without(renamed)), system.dataset, SETTINGS)
    assert found.class_recall["3"].count == 0
    assert {label: recall for label, recall in found.class_recall.items() if label != "3"} == {
        label: recall for label, recall in measured[0].class_recall.items() if label != "3"
    }
    assert sum(count for _, answer, count in found.confusions if answer == ELSEWHERE) > 0
    labels, rows = found.confusion_matrix()
    assert labels[-1] == ELSEWHERE
    assert sum(map(sum, rows)) == found.accuracy.total


def test_images_of_another_shape_are_refused_in_a_sentence(system: System, recognizer: Recognizer):
    from dataclasses import replace

    with pytest.raises(DataError, match=r"v1 takes images of \(28, 28, 1\).*\(8, 8, 1\).*another --workdir"):
        measure(replace(recognizer, shape=(28, 28, 1)), system.dataset, SETTINGS)


def test_an_index_of_another_network_does_not_open(system: System, index_without, tmp_path):
    for path in system.index_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    description = (tmp_path / "index.json").read_text()
    stamp = Recognizer.open(system.network_dir, system.index_dir).network_sha256
    (tmp_path / "index.json").write_text(description.replace(stamp, "0" * 64))
    with pytest.raises(IntegrityError, match="run embed and index again"):
        Recognizer.open(system.network_dir, tmp_path)


def test_memory_does_not_hold_the_split(system: System, recognizer: Recognizer, monkeypatch):
    """Blocks are asked for one after another, none larger than the batch."""
    sizes: list[int] = []
    embedding = Recognizer.embed

    def noted(self, images):
        sizes.append(len(images))
        return embedding(self, images)

    monkeypatch.setattr(Recognizer, "embed", noted)
    measure(recognizer, system.dataset, SETTINGS)
    assert max(sizes) == 32
    assert np.sum(sizes) == system.dataset.count("test")
