"""Which answers a release contains: by its images, not by the time of its promotion."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from evernear.common.store import Store
from evernear.data.ingest import ingest_source
from evernear.data.list import ClassMinimum
from evernear.data.manifest import Manifest, manifest_key
from evernear.release.manifest import ReleaseManifest
from evernear.review.answers import Answer, Answers, ReleasedAnswers
from evernear.review.label_target import open_label_target
from evernear.settings import DataSettings
from tests.releases import MakeRelease
from tests.review_queue import NOW, png


@pytest.fixture
def name(answers: Answers) -> Callable[[int, str], Answer]:
    """``name(1, "cat")`` gives the image 1 the label ``cat``."""

    def name(number: int, label: str) -> Answer:
        fields = {"image": f"{number:016x}" + 48 * "0", "action": "label", "label": label, "who": "ann", "at": NOW}
        answer = Answer.model_validate(fields)
        answers.label(png(number), answer)
        return answers.latest()[answer.image]

    return name


@pytest.fixture
def ingest_with_minimum(store: Store, source: Path) -> Callable[..., Manifest]:
    settings = DataSettings(source=f"folder:{source}")
    return lambda minimum=1: ingest_source(settings, store.uri, minimum=ClassMinimum(minimum))


@pytest.fixture
def release_of(make_release: MakeRelease) -> Callable[[Manifest], ReleaseManifest]:
    """A release that was built from a snapshot."""
    packed = make_release().manifest
    return lambda snapshot: packed.model_copy(
        update={"dataset_name": snapshot.name, "dataset_digest": snapshot.digest, "created": NOW}
    )


def test_release_that_is_live_again_lacks_the_images_of_later_ones(
    store, answers, name, ingest_with_minimum, release_of
) -> None:
    layout = open_label_target(ingest_with_minimum().source).layout
    name(1, "cat")
    older = release_of(ingest_with_minimum())
    second = name(2, "bird")
    newer = release_of(ingest_with_minimum())
    released = ReleasedAnswers(store)
    given = list(answers.latest().values())
    assert released.missing(given, layout, newer) == []
    assert released.missing(given, layout, older) == [second], "after a rollback to it"
    assert released.missing(given, layout, newer) == [], "after a promotion"
    answers.undo(second.model_copy(update={"action": "undo", "label": ""}))
    renamed = name(2, "dog")
    assert released.missing(answers.latest().values(), layout, newer) == [renamed]


def test_images_that_wait_are_in_no_release(store, answers, name, ingest_with_minimum, release_of) -> None:
    layout = open_label_target(ingest_with_minimum().source).layout
    waiting = name(1, "brid")
    assert ReleasedAnswers(store).missing([waiting], layout, release_of(ingest_with_minimum(10))) == [waiting]


def test_without_the_snapshot_the_time_of_the_release_decides(store, name, ingest_with_minimum, release_of) -> None:
    snapshot = ingest_with_minimum()
    layout = open_label_target(snapshot.source).layout
    store.delete(manifest_key(snapshot.name, snapshot.digest))
    answer = name(1, "cat")
    given = [answer.model_copy(update={"at": NOW + timedelta(hours=hours)}) for hours in (-1, 1)]
    assert ReleasedAnswers(store).missing(given, layout, release_of(snapshot)) == given[1:]
