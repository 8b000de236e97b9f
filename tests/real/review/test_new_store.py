"""Labels that were given in review outlive the store, because they stand in the source."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from evernear.common.frozen import FORMAT
from evernear.common.store import Store, open_store
from evernear.data.books import opened_books
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest
from evernear.errors import FormatError
from evernear.review.answers import Answer, Answers
from evernear.review.label_target import open_label_target
from evernear.settings import DataSettings
from tests.dataset_images import write_files
from tests.review_queue import NOW, png

Images = dict[str, tuple[str, str, str | None]]


@pytest.fixture
def ingest_into(source: Path) -> Callable[[Store], Manifest]:
    settings = DataSettings(source=f"folder:{source}")
    return lambda store: ingest_source(settings, store.uri)


def images(manifest: Manifest) -> Images:
    """The file, label and review of each image."""
    query = "SELECT hex(digest), name, i.label, i.reviewed FROM images i JOIN files USING (digest)"
    with opened_books(open_store(manifest.store_uri), manifest) as books:
        return {digest: tuple(row) for digest, *row in books.rows(query)}


def test_labels_given_in_review_survive_a_new_store(store: Store, source: Path, ingest_into, tmp_path: Path) -> None:
    write_files(
        source, {f"{label}/{number}.png": png(number) for number in range(40) for label in [("cat", "dog")[number % 2]]}
    )
    answers = Answers(store, open_label_target(ingest_into(store).source))

    def answer(image: bytes, action: str, label: str = "", *files: str) -> None:
        fields = {"image": sha256(image).hexdigest(), "action": action, "label": label, "files": files}
        answers.label(image, Answer.model_validate({**fields, "who": "ann", "at": NOW}))

    answer(png(200), "label", "bird")
    answer(png(201), "label", "bird")
    answer(png(7), "label", "cat", "dog/7.png")
    answer(png(9), "remove", "", "dog/9.png")
    known = images(ingest_into(store))
    assert sorted(label for name, label, _ in known.values() if "review-" in name) == ["bird", "bird", "cat"]

    head = "datasets/source/head.json"
    store.put(head, json.dumps(json.loads(store.get(head)) | {"format": FORMAT + 1}).encode())
    with pytest.raises(FormatError, match="of another version of evernear and was not changed"):
        ingest_into(store)
    new = open_store((tmp_path / "new store").as_uri())
    manifest = ingest_into(new)
    assert images(manifest) == known
    with opened_books(new, manifest) as books:
        measured = "SELECT count(*) FROM images WHERE reviewed IS NOT NULL AND split IN ('test', 'query')"
        assert books.value(measured) == 0
