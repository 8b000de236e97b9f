"""Images of the queue that look alike, so that one name answers for all of them."""

from collections.abc import Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evernear.review.queue import Item

SIDE_PX = 12
ALIKE = 0.5
"""Smallest mean correlation of an image with the members of its group."""


class Group(NamedTuple):
    """Items that look alike; an item that resembles no other is a group of one."""

    items: Sequence[Item]


def group(items: Sequence[Item]) -> list[Group]:
    """Group ``items``, the largest group first; within a group, and among groups of a size, in the given order.

    Images are compared by the correlation of their gray values at `SIDE_PX` pixels, because the query log has no
    embeddings of them. Each image joins the group whose members it resembles most on average, if that is at least
    `ALIKE`. Time and memory grow with the square of the number of items, which a page bounds.
    """
    if not items:
        return []
    vectors = np.stack([_vector(item.image) for item in items])
    sums: list[NDArray[np.float32]] = []
    members: list[list[int]] = []
    for row, vector in enumerate(vectors):
        alike = [float(total @ vector) / len(rows) for total, rows in zip(sums, members, strict=True)]
        best = int(np.argmax(alike)) if alike else -1
        if best >= 0 and alike[best] >= ALIKE:
            sums[best] = sums[best] + vector
            members[best].append(row)
        else:
            sums.append(vector)
            members.append([row])
    members.sort(key=lambda rows: -len(rows))
    return [Group([items[row] for row in rows]) for rows in members]


def _vector(image: bytes) -> NDArray[np.float32]:
    """Gray values with mean 0 and length 1."""
    with Image.open(BytesIO(image)) as picture:
        gray = picture.convert("L").resize((SIDE_PX, SIDE_PX), Image.Resampling.BOX)
    vector = np.asarray(gray, np.float32).ravel()
    vector -= vector.mean()
    return vector / max(float(np.linalg.norm(vector)), 1e-6)
