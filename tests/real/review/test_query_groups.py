"""Groups of images that look alike."""

import base64
from datetime import timedelta

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import Store
from evernear.release.registry import Registry
from evernear.review.groups import group_items
from evernear.review.queue import Item, Queue
from evernear.serving.query_log_files import LoggedQuery, Period, encode_embedding
from tests.dataset_images import saved
from tests.gallery_vectors import blobs
from tests.releases import MakeRelease
from tests.review_queue import NOW, png


def item(number: int, version: str = "v", **fields: object) -> Item:
    made = Item(f"{number:064x}", png(number % 256), NOW - timedelta(seconds=number), True, 0.9, ("a",), version)
    return made._replace(**fields)


def numbers(groups: list[list[Item]]) -> list[list[int]]:
    return [[int(each.id, 16) for each in group] for group in groups]


def test_images_of_one_class_are_a_group(store: Store) -> None:
    vectors, labels = blobs(0, 60, classes=3, spread=0.1)
    items = [item(number, embedding=vector) for number, vector in enumerate(vectors)]
    groups = group_items(items, Registry(store).find)
    assert sorted(map(sorted, numbers(groups))) == sorted(
        np.flatnonzero(labels == label).tolist() for label in range(3)
    )
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert all(group == sorted(group) for group in numbers(groups)), "in the given order"


def test_embeddings_of_two_networks_are_not_compared(store: Store) -> None:
    vector = np.ones(4, np.float32)
    items = [item(0, "old", embedding=vector), item(1, "new", embedding=vector), item(2, "old", embedding=vector)]
    assert numbers(group_items(items, Registry(store).find)) == [[0, 2], [1]]


def test_embeddings_of_one_network_are_compared_across_releases(store: Store, make_release: MakeRelease) -> None:
    """A reindex makes a release with the same network."""
    releases = [make_release(), make_release()]
    for release in releases:
        Registry(store).publish(release.archive)
    vector = np.ones(4, np.float32)
    items = [item(number, release.version, embedding=vector) for number, release in enumerate(releases)]
    assert numbers(group_items(items, Registry(store).find)) == [[0, 1]]


def test_release_says_how_close_images_of_one_group_are(store: Store, make_release: MakeRelease) -> None:
    release = make_release()
    Registry(store).publish(release.archive)
    bound = release.manifest.group_distance
    assert bound is not None
    assert 0.2 < bound < 1.4
    for factor, expected in ((0.98, [[0, 1]]), (1.02, [[0], [1]])):
        cosine = 1 - (factor * bound) ** 2 / 2
        pair = np.array([[1, 0], [cosine, np.sqrt(1 - cosine**2)]], np.float32)
        items = [item(number, release.version, embedding=vector) for number, vector in enumerate(pair)]
        assert numbers(group_items(items, Registry(store).find)) == expected


def test_images_alone_are_grouped_by_their_pixels(store: Store) -> None:
    rng = np.random.default_rng(0)
    shapes = rng.integers(0, 200, (2, 16, 16))

    def noisy(shape: np.ndarray, mode: str, suffix: str) -> bytes:
        pixels = (shape + rng.integers(0, 40, shape.shape)).astype(np.uint8)
        return saved(Image.fromarray(pixels).convert(mode), suffix)

    images = [noisy(shapes[number % 2], *(("L", "PNG") if number < 4 else ("RGB", "JPEG"))) for number in range(8)]
    items = [item(number, image=image) for number, image in enumerate(images)]
    assert numbers(group_items(items, Registry(store).find)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_images_of_one_brightness_do_not_stop_the_others(store: Store) -> None:
    groups = group_items([item(number) for number in range(3)], Registry(store).find)
    assert sum(map(len, groups)) == 3


@pytest.mark.parametrize("embedding", ["", "AAAA", "?"])
def test_queue_reads_what_the_log_has(store: Store, embedding: str) -> None:
    period = Period(version="20260101.000000.00000000", since=NOW, until=NOW, queries=2, unknown=2)
    common = {"at": NOW, "pred": "a", "dist": 0.9, "unknown": True, "coordinates": (0.5,) * 16}
    vector = np.full(4, 0.5, np.float32)
    rows = [
        LoggedQuery(image=base64.b64encode(png(1)).decode(), embedding=encode_embedding(vector), **common),
        LoggedQuery(image=base64.b64encode(png(2)).decode(), embedding=embedding, **common),
    ]
    lines = "".join(row.model_dump_json() + "\n" for row in [period, *rows])
    store.put(f"queries/{NOW:%Y%m%d}/{NOW:%Y%m%dT%H%M%SZ}-v-host-1-0.jsonl", lines.encode())
    first, second = Queue(store).pending((), 10)
    assert first.version == second.version == period.version
    assert first.embedding is not None
    np.testing.assert_array_equal(first.embedding, vector)
    assert second.embedding is None
