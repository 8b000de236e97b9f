"""Suspect labels: confident learning on neighbors, and the relabeled files of the source."""

import json
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from evernear.cli.app import app
from evernear.common.store import Store, open_store
from evernear.data.ingest import ingest_source
from evernear.data.sources import open_source
from evernear.errors import DataError
from evernear.evaluation.label_errors import Embedded, find_label_errors, nearest_others
from evernear.review.answers import Answer, Answers
from evernear.review.label_target import open_label_target
from evernear.review.suspects import Suspect, load_suspects, picture
from evernear.settings import DataSettings
from tests.deep_png import deep_png
from tests.digits import load_digits

NOW = datetime.now(UTC)


def clusters(count: int = 200, classes: int = 4) -> Embedded:
    """Well separated classes of unit vectors, and images that do not resemble each other."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % classes
    vectors = np.eye(classes, 16, dtype=np.float32)[labels] + rng.normal(0, 0.05, (count, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    images = rng.integers(0, 256, (count, 8, 8, 1), np.uint8)
    return Embedded(vectors, labels, rng.integers(0, 256, (count, 32), np.uint8), images)


def test_planted_errors_are_found_and_nothing_else() -> None:
    embedded = clusters()
    wrong = {3: 1, 40: 2, 101: 3}
    correct = embedded.labels.copy()
    for row, label in wrong.items():
        assert embedded.labels[row] != label
        embedded.labels[row] = label
    errors = find_label_errors(embedded)
    assert {error.row: error.suggested for error in errors} == {row: correct[row] for row in wrong}
    assert all(error.margin < -0.5 for error in errors)


def test_copies_of_an_image_do_not_vote_for_it() -> None:
    embedded = clusters()
    for copy in range(4, 44, 4):  # eleven copies in the place of class 0, all with the wrong label
        embedded.vectors[copy] = embedded.vectors[0]
        embedded.labels[copy] = 1
    embedded.labels[0] = 1
    rows = nearest_others(embedded.vectors, 20)
    assert not np.isin(rows[0], range(0, 44, 4)).any()
    assert {error.row for error in find_label_errors(embedded)} == set(range(0, 44, 4))


def test_near_duplicates_with_different_labels_come_first() -> None:
    embedded = clusters()
    embedded.images[1] = np.clip(embedded.images[0].astype(int) + 2, 0, 255)
    embedded.vectors[1] = embedded.vectors[0] + np.float32(0.01) * embedded.vectors[1]
    embedded.vectors[1] /= np.linalg.norm(embedded.vectors[1])
    embedded.labels[3] = 1
    errors = find_label_errors(embedded)
    assert [(error.row, error.duplicate) for error in errors] == [(0, 1), (1, 0), (3, -1)]


@pytest.fixture
def mislabeled_digits(tmp_path: Path) -> Path:
    """Digits 0 to 3 as files, of which every thirtieth has the next label."""
    images, labels = load_digits()
    for number, (image, label) in enumerate(zip(images[labels < 4], labels[labels < 4], strict=True)):
        folder = tmp_path / "digits" / str((label + (number % 30 == 0)) % 4)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(image * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}-is-{label}.png")
    return tmp_path / "digits"


def suspect_of(source: Path, name: str, suggested: str) -> Suspect:
    return Suspect(image="ab" * 32, files=(name,), label=name[0], suggested=suggested, margin=-1.0)


def answer(suspect: Suspect, action: str = "label", label: str = "") -> Answer:
    fields = {"image": suspect.image, "action": action, "label": label, "files": suspect.files}
    return Answer.model_validate(fields | {"who": "ann", "at": NOW})


def names(source: Path) -> set[str]:
    return {entry.name for entry in open_source(f"folder:{source}").entries()}


@pytest.mark.slow
def test_check_finds_wrong_labels_of_a_source_with_networks_that_have_not_seen_them(
    store: Store, mislabeled_digits: Path
) -> None:
    options = ["--source", f"folder:{mislabeled_digits}", "--preset", "quick", "--set", f"store={store.uri}"]
    refused = CliRunner().invoke(app, ["labels", "check", *options])
    assert isinstance(refused.exception, DataError)
    assert "has not been ingested" in str(refused.exception)
    ingest_source(DataSettings(source=f"folder:{mislabeled_digits}"), store.uri)
    result = CliRunner().invoke(app, ["labels", "check", "--json", *options], catch_exceptions=False)
    checked = json.loads(result.stdout)
    assert checked["images"] == 720
    listed = {suspect.files[0]: suspect.suggested for suspect in load_suspects(store, f"folder:{mislabeled_digits}")}
    wrong = {name: name[-5] for name in names(mislabeled_digits) if name[0] != name[-5]}
    assert len(wrong) == 24
    correct = [name for name, suggested in listed.items() if wrong.get(name) == suggested]
    assert len(correct) >= 0.8 * len(wrong)
    assert len(correct) >= 0.8 * len(listed)
    assert load_suspects(store, "folder:other") == ()


def test_relabel_of_a_bucket_stays_in_its_split(store: Store, bucket: str) -> None:
    uri = f"s3://{bucket}/given"
    for name in ("train/1/a.png", "test/1/b.png", "train/0/c.png"):
        open_store(uri).put(name, name.encode())
    suspect = suspect_of(Path(), "test/1/b.png", "0")
    answers = Answers(store, open_label_target(uri))
    answers.label(b"", answer(suspect, label="0"))
    moved = f"test/0/b-review-{'ab' * 8}.png"
    assert {entry.name for entry in open_source(uri).entries()} == {"train/1/a.png", "train/0/c.png", moved}
    answers.undo(answer(suspect, "undo"))
    assert open_store(uri).get("test/1/b.png") == b"test/1/b.png"


def test_relabel_of_a_missing_file_is_refused_and_not_recorded(store: Store, mislabeled_digits: Path) -> None:
    answers = Answers(store, open_label_target(f"folder:{mislabeled_digits}"))
    with pytest.raises(DataError, match="no longer in the source"):
        answers.label(b"", answer(suspect_of(mislabeled_digits, "1/gone.png", "0"), label="0"))
    assert answers.latest() == {}


def test_name_that_was_taken_in_the_meantime_is_reported_once(store: Store, mislabeled_digits: Path) -> None:
    suspect = suspect_of(mislabeled_digits, "1/000-is-0.png", "0")
    answers = Answers(store, open_label_target(f"folder:{mislabeled_digits}"))
    answers.label(b"", answer(suspect, label="0"))
    (mislabeled_digits / suspect.files[0]).write_bytes(b"another image")
    with pytest.raises(DataError, match="another image has that name"):
        answers.undo(answer(suspect, "undo"))
    assert (mislabeled_digits / suspect.files[0]).read_bytes() == b"another image"
    assert f"0/000-is-0-review-{'ab' * 8}.png" in names(mislabeled_digits)
    answers.recover()


def test_picture_of_a_deep_image_uses_the_bits_of_the_image() -> None:
    """A person sees it with its contrast, whatever the dataset's bit depth."""
    deep = deep_png(np.array([[0, 1023], [512, 100]], np.uint16))
    png = picture({"deep.png": deep}.get, "deep.png")
    assert png is not None
    assert np.asarray(Image.open(BytesIO(png))).tolist() == [[0, 255], [128, 25]]
