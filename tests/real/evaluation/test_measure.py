from collections import Counter
from pathlib import Path

import pytest

from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.errors import DataError
from evernear.evaluation.headline import AnswerCounts
from evernear.evaluation.measure import CALLED_UNKNOWN, OTHER_LABEL, Measurement, Outcomes, measure
from evernear.evaluation.recognizer import Recognizer
from evernear.index.build import build_index
from evernear.index.search import Recognition
from evernear.settings import IndexSettings
from tests.releases import System


@pytest.fixture(scope="module")
def measured_digits(system: System, recognizer: Recognizer) -> tuple[Measurement, Outcomes]:
    return measure(recognizer, system.dataset, batch_size=32)


@pytest.fixture(scope="module")
def one_by_one(system: System, recognizer: Recognizer) -> list[tuple[str, Recognition]]:
    """Each test image's label and its prediction, computed one at a time as on a server."""
    return [
        (system.dataset.labels[label], recognizer.gallery.recognize(recognizer.embed(image[None]))[0])
        for block in system.dataset.blocks("test")
        for image, label in zip(block.images, block.labels, strict=True)
    ]


def test_metrics_match_individual_predictions(measured_digits, one_by_one):
    measurement, outcomes = measured_digits
    correct = [recognition.pred == label for label, recognition in one_by_one]
    near = [[neighbor.label == label for neighbor in recognition.neighbors] for label, recognition in one_by_one]
    assert outcomes.correct.tolist() == correct
    assert 0 < measurement.label_right.count < measurement.label_right.total  # otherwise the test is too weak
    assert (measurement.label_right.count, measurement.label_right.total) == (sum(correct), len(correct))
    assert measurement.recall_at_5.count == sum(map(any, near))
    assert measurement.false_rejects.count == sum(recognition.unknown for _, recognition in one_by_one)
    pairs = Counter((label, recognition.pred) for label, recognition in one_by_one)
    unknown = Counter((label, recognition.pred) for label, recognition in one_by_one if recognition.unknown)
    assert measurement.confusions == tuple(sorted((*pair, count, unknown[pair]) for pair, count in pairs.items()))
    assert outcomes.unknown.tolist() == [recognition.unknown for _, recognition in one_by_one]
    named = [recognition.pred == label for label, recognition in one_by_one if not recognition.unknown]
    assert measurement.answers == AnswerCounts(
        named_right=sum(named), named_wrong=len(named) - sum(named), called_unknown=sum(unknown.values())
    )
    assert measurement.answers.images == len(one_by_one)
    assert measurement.answers.called_unknown > 0, "otherwise the test is too weak"
    for label, recall in measurement.class_label_right.items():
        of_class = [recognition.pred == label for known, recognition in one_by_one if known == label]
        assert (recall.count, recall.total) == (sum(of_class), len(of_class))


def test_measurement_records_its_subject(system: System, recognizer: Recognizer, measured_digits):
    measurement = measured_digits[0]
    assert measurement.dataset_digest == system.dataset.digest
    assert measurement.network_sha256 == recognizer.gallery.description.network_sha256
    assert measurement.index_digest == recognizer.gallery.description.digest
    assert measurement.queries_sha256 != measure(recognizer, system.dataset, "query")[0].queries_sha256


def test_confusion_matrix_is_bounded_and_counts_every_query(measured_digits):
    measurement = measured_digits[0]
    columns, rows = measurement.confusion_matrix()
    assert columns == [*measurement.labels, CALLED_UNKNOWN]
    assert sum(map(sum, rows)) == measurement.label_right.total
    assert sum(rows[i][i] for i in range(len(rows))) == measurement.answers.named_right
    assert [row[-1] for row in rows] == [each.called_unknown for each in measurement.class_answers.values()]
    few, small = measurement.confusion_matrix(max_labels=3)
    assert few[-2:] == ["(others)", CALLED_UNKNOWN]
    assert (len(few), len(small), {len(row) for row in small}) == (5, 4, {5})
    assert sum(map(sum, small)) == measurement.label_right.total
    assert all(type(count) is int for row in small for count in row)


@pytest.fixture(scope="module")
def index_without(system: System, tmp_path_factory: pytest.TempPathFactory):
    embeddings = tmp_path_factory.mktemp("embeddings")
    embed_dataset(system.network_dir, system.dataset, embeddings)

    def make(labels: tuple[str, ...], exclude: frozenset[str] = frozenset()) -> Path:
        directory = tmp_path_factory.mktemp("index")
        build_index(Embeddings.open(embeddings), labels, IndexSettings(), directory, exclude)
        return directory

    return make


def test_class_outside_the_index_is_never_predicted(system: System, index_without, measured_digits):
    index_dir = index_without(system.dataset.labels, frozenset({"3"}))
    measurement, _ = measure(Recognizer.open(system.network_dir, index_dir), system.dataset)
    assert measurement.known_labels == tuple("012456789")
    assert measurement.class_label_right["3"].count == 0
    assert all(predicted != "3" for _, predicted, _, _ in measurement.confusions)
    assert measurement.label_right.total == measured_digits[0].label_right.total


def test_labels_are_matched_by_name(system: System, index_without, measured_digits):
    """A champion may have labels that differ from the dataset's, in a different order."""
    renamed = tuple("gone" if label == "3" else label for label in system.dataset.labels)
    measurement, _ = measure(Recognizer.open(system.network_dir, index_without(renamed)), system.dataset)
    assert measurement.class_label_right["3"].count == 0
    assert {label: recall for label, recall in measurement.class_label_right.items() if label != "3"} == {
        label: recall for label, recall in measured_digits[0].class_label_right.items() if label != "3"
    }
    assert sum(count for _, predicted, count, _ in measurement.confusions if predicted == OTHER_LABEL) > 0
    columns, rows = measurement.confusion_matrix()
    assert columns[-2] == OTHER_LABEL
    assert sum(map(sum, rows)) == measurement.label_right.total


def test_image_shape_mismatch_is_reported(system: System, recognizer: Recognizer):
    from dataclasses import replace

    larger = recognizer.preprocessing.model_copy(update={"height_px": 28, "width_px": 28})
    with pytest.raises(
        DataError, match=r"v1 takes images of \(28, 28, 1\).*\(8, 8, 1\).*start over with another --workdir or store"
    ):
        measure(replace(recognizer, preprocessing=larger), system.dataset)
