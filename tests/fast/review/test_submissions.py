"""Images that a person sent to review."""

import json
import os
from datetime import datetime, timedelta
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import stamp
from evernear.common.store import FileStore, Store
from evernear.errors import DataError
from evernear.review import queue
from evernear.review.queue import ORIGINALS, SUBMITTED, Submissions, original_key, remove_submissions
from evernear.serving.query_log_files import encode_embedding
from evernear.serving.responses import Neighbor, Prediction
from tests.dataset_images import saved
from tests.review_queue import NOW, png

VECTOR = np.full(4, 0.5, np.float32)
ANSWER = Prediction(
    pred="a",
    dist=0.9,
    unknown=True,
    neighbors=tuple(Neighbor(label=label, dist=dist, row=0) for label, dist in (("a", 0.9), ("b", 1.0), ("a", 1.1))),
    version="20260101.000000.00000000",
    embedding=encode_embedding(VECTOR),
)


def age(store: Store, image: str, at: datetime) -> None:
    assert isinstance(store, FileStore)
    for key in (f"{SUBMITTED}{image}.json", original_key(image)):
        os.utime(store.path(key), (at.timestamp(), at.timestamp()))


def test_image_is_in_the_queue_at_once_with_its_bytes_and_its_answer(store: Store) -> None:
    image = Submissions(store).add(png(7), ANSWER, "ann", NOW)
    (item,) = Submissions(store).pending((), 10)
    assert (item.id, item.image, item.at) == (sha256_bytes(png(7)), png(7), NOW)
    assert image == item.id
    assert (item.unknown, item.dist, item.candidates, item.version) == (True, 0.9, ("a", "b"), ANSWER.version)
    assert item.embedding is not None
    np.testing.assert_array_equal(item.embedding, VECTOR)
    assert Submissions(store).pending({image}, 10) == []


def test_original_is_stored_beside_a_small_picture(store: Store, reads: list[str]) -> None:
    photograph = saved(Image.effect_noise((640, 480), 90), "JPEG")
    sent = Submissions(store)
    image = sent.add(photograph, ANSWER, "ann", NOW)
    (item,) = sent.pending((), 10)
    with Image.open(BytesIO(item.image)) as picture:
        assert (picture.format, picture.size) == ("PNG", (192, 144))
    assert sent.original(image) == photograph
    reads.clear()
    assert len(sent.pending((), 10)) == 1
    assert sent.find(image) == item
    assert reads == [], "a list reads neither originals nor what it has read before"


def test_deleted_one_is_not_found_in_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "RECENT_S", 0.0)
    sent = Submissions(store)
    image = sent.add(png(7), ANSWER, "ann", NOW)
    assert sent.find(image) is not None
    remove_submissions(store, NOW + timedelta(hours=1))
    assert sent.find(image) is None
    assert sent.original(image) is None
    assert list(store.list("")) == []


def test_newest_come_first_up_to_the_limit(store: Store) -> None:
    sent = Submissions(store)
    ids = [sent.add(png(number), ANSWER, "ann", NOW) for number in range(4)]
    for number, image in enumerate(ids):
        age(store, image, NOW - timedelta(hours=number))
    assert [item.id for item in sent.pending((), 3)] == ids[:3]
    assert [item.id for item in sent.pending({ids[0]}, 3)] == ids[1:]


def test_image_sent_twice_is_one_item(store: Store) -> None:
    sent = Submissions(store)
    sent.add(png(7), ANSWER, "ann", NOW)
    sent.add(png(7), ANSWER.model_copy(update={"dist": 0.5}), "bob", NOW)
    assert [item.dist for item in sent.pending((), 10)] == [0.5]


@pytest.mark.parametrize(("file", "named"), [(b"no image", "not a PNG"), (b"", "empty"), (png(1)[:20], "broken")])
def test_file_that_is_no_image_is_refused(store: Store, file: bytes, named: str) -> None:
    with pytest.raises(DataError, match=named):
        Submissions(store).add(file, ANSWER, "ann", NOW)
    assert list(store.list("")) == []


@pytest.mark.parametrize("damage", [b"", b"{}", json.dumps(stamp() | {"file": 3}).encode()])
def test_damaged_one_is_skipped(store: Store, damage: bytes) -> None:
    image = Submissions(store).add(png(7), ANSWER, "ann", NOW)
    store.put(f"{SUBMITTED}{64 * '0'}.json", damage)
    assert [item.id for item in Submissions(store).pending((), 10)] == [image]
    assert Submissions(store).find(64 * "0") is None


def test_answer_without_an_embedding_is_sent_as_well(store: Store) -> None:
    Submissions(store).add(png(7), ANSWER.model_copy(update={"embedding": ""}), "ann", NOW)
    (item,) = Submissions(store).pending((), 10)
    assert item.embedding is None


def test_old_ones_are_removed(store: Store) -> None:
    sent = Submissions(store)
    old, new = (sent.add(png(number), ANSWER, "ann", NOW) for number in range(2))
    age(store, old, NOW - timedelta(days=15))
    assert remove_submissions(store, NOW - timedelta(days=14)) == 1
    assert [item.id for item in Submissions(store).pending((), 10)] == [new]
    assert [info.key for info in store.list(ORIGINALS)] == [original_key(new)]
