from collections import Counter
from collections.abc import Iterable
from hashlib import sha256

import pytest

from evernear.data.manifest import SPLITS, Split
from evernear.data.splits import choose_split, hash_split, images_of_all_splits, split_fractions
from evernear.settings import DataSettings, load

SETTINGS = DataSettings()


def digests(count: int) -> list[bytes]:
    return [sha256(str(number).encode()).digest() for number in range(count)]


def assign(
    images: Iterable[bytes], candidates: tuple[Split, ...] = SPLITS, settings: DataSettings = SETTINGS
) -> dict[bytes, Split]:
    counts: Counter[Split] = Counter()
    splits: dict[bytes, Split] = {}
    for digest in images:
        complete = images_of_all_splits(settings)
        splits[digest] = choose_split(digest, counts, split_fractions(candidates, settings), complete)
        counts[splits[digest]] += 1
    return splits


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (1, {"gallery": 1}),
        (2, {"gallery": 1, "train": 1}),
        (10, {"gallery": 1, "train": 7, "test": 1, "query": 1}),
        (19, {"gallery": 2, "train": 14, "test": 2, "query": 1}),
    ],
)
def test_small_classes_are_divided_exactly(images: int, expected: dict[str, int]) -> None:
    assert Counter(assign(digests(images)).values()) == expected


@pytest.mark.parametrize(
    ("images", "candidates", "expected"),
    [
        (5, SPLITS, {"gallery": 1, "train": 2, "test": 1, "query": 1}),
        (5, ("train", "gallery", "query"), {"gallery": 1, "train": 3, "query": 1}),
        (20, SPLITS, {"gallery": 1, "train": 13, "test": 4, "query": 2}),
    ],
)
def test_five_photographs_are_in_every_split_and_most_of_many_are_trained_on(
    images: int, candidates: tuple[Split, ...], expected: dict[str, int]
) -> None:
    splits = assign(digests(images), candidates, load(preset="photos").data)
    assert Counter(splits.values()) == expected


@pytest.mark.parametrize("candidates", [SPLITS, ("train", "gallery", "query"), ("train", "query")])
@pytest.mark.parametrize("images", [40, 300, 3000])
def test_no_split_falls_behind_its_share(images: int, candidates: tuple[Split, ...]) -> None:
    counts = Counter(assign(digests(images), candidates).values())
    for split, fraction in split_fractions(candidates, SETTINGS).items():
        assert -3 < counts[split] - images * fraction < 9


def test_in_large_classes_the_content_decides_rather_than_the_order() -> None:
    images = digests(3000)
    splits, reversed_splits = assign(images), assign(reversed(images))
    by_hash = {digest: hash_split(digest, split_fractions(SPLITS, SETTINGS)) for digest in images}
    assert sum(splits[digest] == by_hash[digest] for digest in images) > 2500
    assert sum(splits[digest] == reversed_splits[digest] for digest in images) > 2500
