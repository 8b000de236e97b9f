"""Labeling live queries: the queue, the answers in the source and the audit log, and the page."""

import os
from functools import partial
from pathlib import Path

import pytest

from evernear.common.store import Store, open_store
from evernear.data.sources import open_source
from evernear.errors import ConflictError, DataError, SettingsError, StoreError
from evernear.review import queue as queue_module
from evernear.review.answers import ANSWERS, PENDING, Answer, Answers
from evernear.review.label_target import LabelTarget, open_label_target, require_folder_name
from evernear.review.queue import Item, Queue
from tests.review_queue import NOW, log_queries, png


def answer(item: Item, action: str = "label", label: str = "") -> Answer:
    return Answer.model_validate({"image": item.id, "action": action, "label": label, "who": "ann", "at": NOW})


@pytest.fixture
def item(store: Store) -> Item:
    """The only one of the queue."""
    log_queries(store, png(1))
    (item,) = Queue(store).pending((), 10)
    return item


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
    answers = Answers(store, open_label_target(uri))
    (item,) = Queue(store).pending((), 10)
    answers.label(item.image, answer(item, label="bird"))
    assert {(entry.label, entry.name) for entry in open_source(uri).entries()} == {
        ("cat", "train/cat/a.png"),
        ("bird", f"train/bird/review-{item.id[:16]}.png"),
    }
    answers.undo(answer(item, "undo"))
    assert [entry.label for entry in open_source(uri).entries()] == ["cat"]


def test_label_is_an_image_of_the_source_and_undo_removes_it(
    store: Store, source: Path, item: Item, answers: Answers
) -> None:
    before = names(source)
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
    Answers(store, open_label_target(f"folder:{tmp_path / 'given'}")).label(item.image, answer(item, label="cat"))
    assert (tmp_path / "given" / splits[0] / "cat" / f"review-{item.id[:16]}.png").read_bytes() == png(9)


@pytest.mark.parametrize("label", ["", "../up", "a/b", ".hidden", "train", "a\nb", " a", "x" * 300, "__MACOSX"])
def test_unusable_class_name_is_refused_and_nothing_is_recorded(
    store: Store, source: Path, item: Item, label: str
) -> None:
    before = names(source)
    with pytest.raises(SettingsError, match="cannot be the name of a class"):
        Answers(store, open_label_target(f"folder:{source}")).label(item.image, answer(item, label=label))
    assert store.find(ANSWERS) is None
    assert names(source) == before


def test_names_with_joined_emoji_are_usable_and_a_refusal_says_why() -> None:
    require_folder_name("\N{WOMAN}\N{ZERO WIDTH JOINER}\N{EAR OF RICE}")
    for label, remedy in (
        ("x" * 5000, "shorten it"),
        ("a/b", "slashes"),
        ("a\u202eb", "invisible"),
        ("Train", "split"),
    ):
        with pytest.raises(SettingsError, match=remedy) as error:
            require_folder_name(label)
        assert len(str(error.value)) < 250


class KilledError(Exception):
    """The process ends."""


@pytest.mark.parametrize("action", ["label", "undo"])
def test_change_of_a_killed_process_is_completed(
    store: Store, source: Path, item: Item, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_label_target(f"folder:{source}")
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
    Answers(store, open_label_target(f"folder:{source}")).recover()
    assert path.exists() is (action == "label")
    assert list(store.list(PENDING)) == []


def test_undo_that_was_not_recorded_leaves_the_label(store: Store, source: Path, item: Item, answers: Answers) -> None:
    answers.label(item.image, answer(item, label="cat"))
    store.put(PENDING + item.id, b"")
    answers.recover()
    assert (source / "cat" / f"review-{item.id[:16]}.png").read_bytes() == png(1)
    assert list(store.list(PENDING)) == []


def test_undo_leaves_a_class_folder_that_was_empty_before(
    store: Store, source: Path, item: Item, answers: Answers
) -> None:
    (source / "bird").mkdir()
    answers.label(item.image, answer(item, label="bird"))
    answers.undo(answer(item, "undo"))
    assert list((source / "bird").iterdir()) == []


def test_queue_reads_each_log_file_once(store: Store, reads: list[str]) -> None:
    log_queries(store, png(1), png(2), day=1)
    log_queries(store, png(3))
    queue = Queue(store)
    newest, *older = (item.id for item in queue.pending((), 10))
    assert len(reads) == 2
    assert [item.id for item in queue.pending({newest}, 10)] == older
    assert queue.pending({newest, *older}, 10) == []
    found = queue.find(older[0])
    assert (found and found.image, len(reads)) == (png(1), 2)


def test_queue_reads_a_log_file_again_that_was_written_again(store: Store) -> None:
    """`evernear forget` removes queries from files."""
    log_queries(store, png(1), png(2))
    queue = Queue(store)
    assert len(queue.pending((), 10)) == 2
    log_queries(store, png(1))
    assert [item.image for item in queue.pending((), 10)] == [png(1)]


def test_queue_keeps_no_more_images_in_memory_than_it_may(
    store: Store, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "CACHED_BYTES", len(png(3)) + len(png(4)))
    log_queries(store, png(1), png(2), day=1)
    log_queries(store, png(3), png(4))
    queue = Queue(store)
    for _ in range(2):
        assert [item.image for item in queue.pending((), 10)] == [png(3), png(4), png(1), png(2)]
    assert len(reads) == 3, "only the file that is not in memory is read again"


LONG = f"{'x' * 240}.png"
"""A valid file name that has no room for the mark of a relabeled file."""


def relabel(source: Path, name: str, digit: int = 1) -> Answer:
    """An answer that moves ``cat/<name>`` to dog."""
    (source / "cat" / name).write_bytes(png(digit))
    return Answer(image=f"{digit}" * 64, action="label", label="dog", files=(f"cat/{name}",), who="ann", at=NOW)


def test_answer_that_the_file_system_refuses_is_undone_and_the_others_go_on(
    store: Store, source: Path, answers: Answers
) -> None:
    too_long, other = relabel(source, LONG), relabel(source, "b.png", 2)
    before = names(source)
    with pytest.raises(DataError, match=r"is undone: .* too long a name .* shorten the name"):
        answers.label(b"", too_long)
    assert names(source) == before
    assert list(store.list(PENDING)) == []
    answers.label(b"", other)
    assert list(answers.latest()) == [other.image]
    Answers(store, open_label_target(f"folder:{source}")).recover()


def test_file_with_a_name_as_long_as_possible_can_be_moved_back(store: Store, source: Path, answers: Answers) -> None:
    answer = relabel(source, f"{'y' * 227}.png")
    before = names(source)
    answers.label(b"", answer)
    assert {len(name) for name, _ in names(source) - before} == {len("dog/") + 255}
    answers.undo(answer.model_copy(update={"action": "undo", "label": ""}))
    assert names(source) == before


def test_store_with_a_stuck_answer_heals(store: Store, source: Path, answers: Answers) -> None:
    answer = relabel(source, LONG)
    undo = answer.model_copy(update={"action": "undo", "label": ""})
    store.put(ANSWERS, b"".join(each.model_dump_json().encode() + b"\n" for each in (answer, undo)))
    store.put(PENDING + answer.image, b"")
    answers.label(b"", relabel(source, "b.png", 2))
    assert answers.set_aside == {}
    assert list(store.list(PENDING)) == []


def test_answer_of_a_killed_process_that_cannot_be_completed_is_set_aside(
    store: Store, source: Path, answers: Answers
) -> None:
    answer, gone = relabel(source, LONG), relabel(source, "gone.png", 3)
    store.put(ANSWERS, b"".join(each.model_dump_json().encode() + b"\n" for each in (answer, gone)))
    for each in (answer, gone):
        store.put(PENDING + each.image, b"")
    (source / "cat" / "gone.png").unlink()
    answers.recover()
    assert answers.latest() == {}, "they are open again"
    assert "too long" in answers.set_aside[answer.image]
    assert "cat/gone.png is no longer in the source" in answers.set_aside[gone.image]
    assert (source / "cat" / LONG).exists()
    assert list(store.list(PENDING)) == []


def test_image_in_several_files_is_moved_completely_or_not_at_all(store: Store, source: Path) -> None:
    answer = relabel(source, "b.png")
    relabel(source, LONG)
    answer = answer.model_copy(update={"files": ("cat/b.png", f"cat/{LONG}"), "label": "bird"})
    before = names(source)
    with pytest.raises(DataError, match="too long"):
        Answers(store, open_label_target(f"folder:{source}")).label(b"", answer)
    assert names(source) == before
    assert not (source / "bird").exists(), "the folder of a class that the answer would have created"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("folder", ["cat", "dog"])
def test_source_that_cannot_be_written_keeps_its_labels(
    store: Store, source: Path, answers: Answers, folder: str
) -> None:
    answer, other = relabel(source, "b.png"), relabel(source, "c.png", 2)
    before = names(source)
    (source / folder).chmod(0o555)
    with pytest.raises(DataError, match="Permission denied"):
        answers.label(b"", answer)
    assert names(source) == before
    (source / folder).chmod(0o755)
    answers.label(b"", other)
    answers.label(b"", answer)
    assert answers.latest().keys() == {answer.image, other.image}


class DeniedTarget:
    """A source that takes new files but lets none be removed, as a bucket without
    s3:DeleteObject."""

    def __init__(self, target: LabelTarget) -> None:
        self._target = target
        self.labels, self.layout = target.labels, target.layout
        self.has_folder, self.add, self.read = target.has_folder, target.add, target.read
        self.denied = True

    def remove(self, name: str, prune: bool) -> None:
        if self.denied:
            raise StoreError("s3:DeleteObject is not permitted.")
        self._target.remove(name, prune)


def test_change_that_cannot_be_taken_back_now_is_taken_back_later(store: Store, source: Path) -> None:
    answer, other = relabel(source, "b.png"), relabel(source, "c.png", 2)
    before = names(source)
    target = DeniedTarget(open_label_target(f"folder:{source}"))
    answers = Answers(store, target)
    with pytest.raises(DataError, match=r"cat/b\.png is undone, but .*DeleteObject is not permitted"):
        answers.label(b"", answer)
    keep = other.model_copy(update={"action": "keep", "label": ""})
    answers.label(b"", keep)
    assert answers.latest() == {keep.image: keep}
    assert "DeleteObject" in answers.set_aside[answer.image]
    target.denied = False
    answers.recover()
    assert answers.set_aside == {}
    assert names(source) == before


def test_missing_source_is_not_created_again(store: Store, source: Path, item: Item, answers: Answers) -> None:
    source.rename(source.with_name("unmounted"))
    with pytest.raises(DataError, match="does not exist"):
        answers.label(item.image, answer(item, label="cat"))
    assert not source.exists()
    assert answers.latest() == {}


def test_source_without_class_folders_is_refused() -> None:
    with pytest.raises(SettingsError, match="review needs folder"):
        open_label_target("digits")
