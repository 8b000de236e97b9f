"""Labeling live queries: the queue, the answers in the source and the audit log, and the page."""

import base64
import re
from datetime import UTC, datetime, timedelta
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from evernear.data.sources import open_source
from evernear.errors import ConflictError, SettingsError
from evernear.review.answers import ANSWERS, PENDING, Answer, Answers, open_target
from evernear.review.page import create_app
from evernear.review.queue import Item, Queue
from evernear.serving.query_log import LoggedQuery, Period
from evernear.store import Store, open_store

NOW = datetime.now(UTC)


def png(value: int) -> bytes:
    buffer = BytesIO()
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def log_queries(store: Store, *images: bytes, candidates: tuple[str, ...] = ("cat", "dog"), day: int = 0) -> None:
    at = NOW - timedelta(days=day)
    period = Period(version="v", since=at, until=at, queries=len(images), unknown=1)
    rows = [
        LoggedQuery(
            at=at, pred="cat", dist=0.5, unknown=True, image=base64.b64encode(image).decode(), candidates=candidates
        )
        for image in images
    ]
    lines = "".join(row.model_dump_json() + "\n" for row in [period, *rows])
    store.put(f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-v-host-1-{day}.jsonl", lines.encode())


def answer(item: Item, action: str = "label", label: str = "") -> Answer:
    return Answer.model_validate({"image": item.id, "action": action, "label": label, "who": "ann", "at": NOW})


def names(source: Path) -> set[tuple[str, str]]:
    return {(entry.name, entry.label) for entry in open_source(f"folder:{source}").entries()}


def test_queue_is_newest_first_without_duplicates_and_damaged_images(store: Store) -> None:
    log_queries(store, png(1), png(2), day=1)
    log_queries(store, png(2), b"no image")
    store.put(f"queries/{NOW:%Y%m%d}/{NOW:%Y%m%dT%H%M%SZ}-v-host-1-bad.jsonl", b"damaged")
    assert [item.image for item in Queue(store).pending((), 10)] == [png(2), png(1)]
    assert [item.image for item in Queue(store).pending((), 1)] == [png(2)]


def test_label_is_an_object_of_the_bucket_and_undo_removes_it(store: Store, bucket: str) -> None:
    uri = f"s3://{bucket}/images"
    open_store(uri).put("train/cat/a.png", png(100))
    log_queries(store, png(1))
    answers = Answers(store, open_target(uri))
    (item,) = Queue(store).pending((), 10)
    answers.label(item.image, answer(item, label="bird"))
    assert {(entry.label, entry.name) for entry in open_source(uri).entries()} == {
        ("cat", "train/cat/a.png"),
        ("bird", f"train/bird/review-{item.id[:16]}.png"),
    }
    answers.undo(answer(item, "undo"))
    assert [entry.label for entry in open_source(uri).entries()] == ["cat"]


def test_label_is_an_image_of_the_source_and_undo_removes_it(store: Store, source: Path) -> None:
    before = names(source)
    log_queries(store, png(1))
    answers = Answers(store, open_target(f"folder:{source}"))
    (item,) = Queue(store).pending((), 10)
    answers.label(item.image, answer(item, label="bird"))
    assert names(source) - before == {(f"bird/review-{item.id[:16]}.png", "bird")}
    assert Queue(store).pending(answers.latest().keys(), 10) == []
    with pytest.raises(ConflictError, match="answered in the meantime"):
        answers.label(item.image, answer(item, label="cat"))
    answers.undo(answer(item, "undo"))
    assert names(source) == before
    assert not (source / "bird").exists()
    assert Queue(store).pending(answers.latest().keys(), 10) == [item]
    lines = [Answer.model_validate_json(line) for line in store.get(ANSWERS).splitlines()]
    assert [(line.action, line.label, line.who) for line in lines] == [("label", "bird", "ann"), ("undo", "", "ann")]


@pytest.mark.parametrize("splits", [("train", "test"), ("Training", "Testing")])
def test_source_with_split_folders_gets_training_images(store: Store, tmp_path: Path, splits: tuple[str, str]) -> None:
    for number, split in enumerate(splits):
        (tmp_path / "given" / split / "cat").mkdir(parents=True)
        (tmp_path / "given" / split / "cat" / "a.png").write_bytes(png(number))
    log_queries(store, png(9))
    (item,) = Queue(store).pending((), 10)
    Answers(store, open_target(f"folder:{tmp_path / 'given'}")).label(item.image, answer(item, label="cat"))
    assert (tmp_path / "given" / splits[0] / "cat" / f"review-{item.id[:16]}.png").read_bytes() == png(9)


@pytest.mark.parametrize("label", ["", "../up", "a/b", ".hidden", "train", "a\nb", " a", "x" * 300])
def test_unusable_class_name_is_refused_and_nothing_is_recorded(store: Store, source: Path, label: str) -> None:
    log_queries(store, png(1))
    (item,) = Queue(store).pending((), 10)
    before = names(source)
    with pytest.raises(SettingsError, match="cannot be the name of a class"):
        Answers(store, open_target(f"folder:{source}")).label(item.image, answer(item, label=label))
    assert store.find(ANSWERS) is None
    assert names(source) == before


class KilledError(Exception):
    """The process ends."""


@pytest.mark.parametrize("action", ["label", "undo"])
def test_change_of_a_killed_process_is_completed(
    store: Store, source: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_queries(store, png(1))
    (item,) = Queue(store).pending((), 10)
    target = open_target(f"folder:{source}")
    answers, path = Answers(store, target), source / "cat" / f"review-{item.id[:16]}.png"
    if action == "undo":
        answers.label(item.image, answer(item, label="cat"))

    def killed(*_: object) -> None:
        raise KilledError

    act = {"label": partial(answers.label, item.image), "undo": answers.undo}[action]
    monkeypatch.setattr(target, "add" if action == "label" else "remove", killed)
    with pytest.raises(KilledError):
        act(answer(item, action, "cat" if action == "label" else ""))
    assert path.exists() is (action == "undo")
    Answers(store, open_target(f"folder:{source}")).recover()
    assert path.exists() is (action == "label")
    assert list(store.list(PENDING)) == []


def test_undo_that_was_not_recorded_leaves_the_label(store: Store, source: Path) -> None:
    log_queries(store, png(1))
    (item,) = Queue(store).pending((), 10)
    answers = Answers(store, open_target(f"folder:{source}"))
    answers.label(item.image, answer(item, label="cat"))
    store.put(PENDING + item.id, b"")
    answers.recover()
    assert (source / "cat" / f"review-{item.id[:16]}.png").read_bytes() == png(1)
    assert list(store.list(PENDING)) == []


def test_undo_leaves_a_class_folder_that_was_empty_before(store: Store, source: Path) -> None:
    (source / "bird").mkdir()
    log_queries(store, png(1))
    answers = Answers(store, open_target(f"folder:{source}"))
    (item,) = Queue(store).pending((), 10)
    answers.label(item.image, answer(item, label="bird"))
    answers.undo(answer(item, "undo"))
    assert list((source / "bird").iterdir()) == []


def test_queue_reads_answered_log_files_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log_queries(store, png(1), png(2), day=1)
    log_queries(store, png(3))
    queue, read = Queue(store), list[str]()
    newest, *older = (item.id for item in queue.pending((), 10))
    find = store.find
    monkeypatch.setattr(store, "find", lambda key: (read.append(key), find(key))[1])
    assert [item.id for item in queue.pending({newest}, 10)] == older
    assert len(read) == 1
    assert queue.pending({newest, *older}, 10) == []
    assert len(read) == 1
    found = queue.find(older[0])
    assert (found and found.image, len(read)) == (png(1), 2)


def test_failed_write_returns_the_image_to_the_queue(store: Store, source: Path) -> None:
    log_queries(store, png(1))
    answers = Answers(store, open_target(f"folder:{source}"))
    (item,) = Queue(store).pending((), 10)
    (source / "bird").write_text("in the way")
    with pytest.raises(Exception, match="bird"):
        answers.label(item.image, answer(item, label="bird"))
    assert answers.latest() == {}


def test_source_without_class_folders_is_refused() -> None:
    with pytest.raises(SettingsError, match="review needs folder"):
        open_target("digits")


def test_page_labels_and_undoes(store: Store, source: Path) -> None:
    log_queries(store, png(1), png(2), candidates=("dog", "<b>x</b>"))
    target = open_target(f"folder:{source}")
    client = TestClient(create_app(store, Answers(store, target), target, "secret", "ann"), base_url="http://127.0.0.1")
    page = client.get("/?token=secret")
    assert "<b>x</b>" not in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert re.search(r"<select[^>]*><option value=\"dog\">", page.text), "the suggested class comes first"
    image = re.findall(r'name="image" value="(\w+)"', page.text)[0]
    labeled = client.post("/?token=secret", data={"image": image, "action": "label", "label": "dog", "new": ""})
    assert "labeled <b>dog</b>" in labeled.text
    path = source / "dog" / f"review-{image[:16]}.png"
    assert path.exists()
    again = client.post("/?token=secret", data={"image": image, "action": "label", "label": "cat"})
    assert (again.status_code, "was answered in the meantime" in again.text) == (409, True)
    client.post("/?token=secret", data={"image": image, "action": "undo"})
    assert not path.exists()
    client.post("/?token=secret", data={"image": image, "action": "skip"})
    assert not path.exists()
    assert "skipped" in client.get("/?token=secret").text


def test_page_requires_the_token(store: Store, source: Path) -> None:
    target = open_target(f"folder:{source}")
    client = TestClient(create_app(store, Answers(store, target), target, "secret", "ann"))
    for response in (client.get("/"), client.get("/?token=other"), client.post("/?token=x", data={"action": "skip"})):
        assert response.status_code == 403
    assert client.post("/?token=secret", content=b"x" * 5000).status_code == 413
    assert store.find(ANSWERS) is None
