"""Groups of similar images in the review queue, so that a user can label all images of a group at
once.

Images are compared by the recognizer's embeddings, separately for each network. An item without an
embedding is grouped by its pixels.

The groups come from agglomerative clustering with average linkage. Two groups are merged if the
mean distance between their images is at most the release's ``group_distance``. A class that the
network was not trained on has a larger spread, so its images may be in several groups. See
docs/decisions/0031-the-console.md.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.data.image_file import inspect
from evernear.data.preprocess import decode_inspected
from evernear.errors import IntegrityError
from evernear.release.manifest import is_version
from evernear.release.records import Record
from evernear.review.queue import Item
from evernear.serving.decoding import gray_vector
from evernear.settings.section import MAX_PIXELS

DEFAULT_DISTANCE = 1.0
"""``group_distance`` for releases that have none or were pruned, as an L2 distance between unit
vectors (0 to 2)."""
PIXEL_DISTANCE = 0.9
"""``group_distance`` for the vectors from `gray_vector`. It corresponds to a correlation of 0.6
between two images."""
_SIDE_PX = 12
Vector = NDArray[np.float32]


class _Space(NamedTuple):
    """Vectors of one kind from one network. Only vectors in the same space are compared. Groups
    whose mean distance is at most ``distance`` are merged."""

    kind: Literal["embedding", "pixels"]
    network: str
    dim: int
    distance: float


class _Release(NamedTuple):
    network: str
    group_distance: float


def group_items(items: Sequence[Item], find: Callable[[str], Record | None]) -> list[list[Item]]:
    """Groups of similar items, largest first, each in the given order. Time and memory grow with
    the square of their number: 2000 items take 0.3 s and 35 MB. ``find`` is a function such as
    `evernear.release.registry.Registry.find`, with the same errors."""
    releases = {version: _release(version, find) for version in {item.version for item in items}}
    spaces: defaultdict[_Space, list[tuple[Item, Vector]]] = defaultdict(list)
    for item in items:
        space, vector = _compared(item, releases[item.version])
        spaces[space].append((item, vector))
    groups = [group for space, members in spaces.items() for group in _cluster(members, space.distance)]
    order = {item.id: number for number, item in enumerate(items)}
    return sorted(groups, key=lambda group: (-len(group), order[group[0].id]))


def _release(version: str, find: Callable[[str], Record | None]) -> _Release:
    """The network and ``group_distance`` of a release. Items of a release that is no longer in the
    store are compared only with each other."""
    record = None
    with suppress(IntegrityError):  # `evernear store check` reports it
        record = find(version) if is_version(version) else None
    if record is None:
        return _Release(version, DEFAULT_DISTANCE)
    return _Release(record.manifest.network_sha256, record.manifest.group_distance or DEFAULT_DISTANCE)


def _compared(item: Item, release: _Release) -> tuple[_Space, Vector]:
    if item.embedding is not None:
        vector = item.embedding / np.float32(np.linalg.norm(item.embedding))
        return _Space("embedding", release.network, len(vector), release.group_distance), vector
    vector = gray_vector(decode_inspected(inspect(item.image, MAX_PIXELS), 16).image, _SIDE_PX)
    return _Space("pixels", "", len(vector), PIXEL_DISTANCE), vector


def _cluster(members: Sequence[tuple[Item, Vector]], distance: float) -> list[list[Item]]:
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(members) == 1:
        return [[members[0][0]]]
    vectors = np.stack([vector for _, vector in members]).astype(np.float64)
    numbers = fcluster(linkage(vectors, "average", "euclidean"), distance, "distance")
    groups: defaultdict[int, list[Item]] = defaultdict(list)
    for (item, _), number in zip(members, numbers.tolist(), strict=True):
        groups[number].append(item)
    return list(groups.values())
