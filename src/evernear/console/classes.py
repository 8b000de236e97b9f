"""The classes that answers name: which are new, mistyped, or waiting for more images."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from evernear.common.text import class_name, lookalike_key
from evernear.console.answers import Answer

_SIMILARITY = 0.65
"""Smallest `difflib` ratio of two names that may be one name, mistyped. A wrong letter among three
has the ratio 0.67."""
_MAX_MEANT = 3


def images_by_class(answers: Iterable[Answer]) -> Counter[str]:
    return Counter(class_name(answer.label) for answer in answers if answer.action == "label")


def waiting_classes(answers: Iterable[Answer], used: Collection[str], minimum: int) -> dict[str, int]:
    """The number of images of each class that a run leaves out, because ``answers`` give it fewer
    than ``minimum`` images and it is not in ``used``: neither the source itself nor the live
    release has it."""
    images = images_by_class(answers).items()
    return {label: count for label, count in sorted(images) if label not in used and count < minimum}


def meant_classes(name: str, classes: Iterable[str]) -> list[str]:
    """The ``classes`` whose names a user may have meant by the new ``name``, most similar first.
    Names whose numbers differ, such as ``cup 1`` and ``cup 2``, count as intended."""
    keys = {_key(each): each for each in classes if _numbers(each) == _numbers(name)}
    return [keys[key] for key in get_close_matches(_key(name), keys, _MAX_MEANT, _SIMILARITY)]


def _key(name: str) -> str:
    return re.sub(r"[\s_.-]+", " ", lookalike_key(name))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
