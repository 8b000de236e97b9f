"""Images of the review queue that look alike, so that one name can answer for all of them.

Images are compared by their embeddings, as the recognizer compares them. Embeddings of different networks cannot be
compared, so each network has its own groups. An item without an embedding is grouped by what it has: the projected
embedding that earlier logs have, or else its pixels.

Groups come from agglomerative clustering with average linkage: two groups become one while their images are, on
average, closer than images of two classes usually are (``group_distance`` of the release). A class that the network was
not trained on is spread more widely than others, so it may be in several groups. See
docs/decisions/0078-neighbors-as-pictures.md.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evernear.data.image_file import inspect
from evernear.data.preprocess import decode_inspected
from evernear.errors import IntegrityError
from evernear.release.manifest import is_version
from evernear.release.records import Record
from evernear.review.queue import Item
from evernear.settings.section import MAX_PIXELS

MAX_ITEMS = 2000
"""Items that are grouped. Time and memory grow with the square of their number: 0.3 s and 35 MB for these."""
DEFAULT_DISTANCE = 1.0
"""``group_distance`` of a release of an earlier version: L2 of unit vectors (0 to 2)."""
PIXEL_DISTANCE = 0.9
"""The same for pixels, less their mean: a correlation of 0.6."""
_SIDE_PX = 12
Vector = NDArray[np.float32]


class Group(NamedTuple):
    """Items that look alike, in the given order. An item like no other is a group of one."""

    items: tuple[Item, ...]


class Grouping(NamedTuple):
    """The groups, the largest first."""

    groups: tuple[Group, ...]
    left_out: int
    """Items beyond the first `MAX_ITEMS`, which are in no group."""


class _Space(NamedTuple):
    """What is compared: vectors of one kind and network. ``distance`` is the mean one up to which images are alike."""

    kind: Literal["embedding", "coordinates", "pixels"]
    network: str
    dim: int
    distance: float


class _Release(NamedTuple):
    network: str
    group_distance: float


def group_items(items: Sequence[Item], find: Callable[[str], Record | None], limit: int = MAX_ITEMS) -> Grouping:
    """Group the first ``limit`` items, which are the newest if ``items`` come from the queue.

    ``find`` returns the record of a release, as `evernear.release.registry.Registry.find`, and raises what it raises.
    """
    grouped = items[:limit]
    releases = {version: _release(version, find) for version in {item.version for item in grouped}}
    spaces: defaultdict[_Space, list[tuple[Item, Vector]]] = defaultdict(list)
    for item in grouped:
        space, vector = _compared(item, releases[item.version])
        spaces[space].append((item, vector))
    groups = [group for space, members in spaces.items() for group in _cluster(members, space.distance)]
    order = {item.id: number for number, item in enumerate(grouped)}
    groups.sort(key=lambda group: (-len(group.items), order[group.items[0].id]))
    return Grouping(tuple(groups), len(items) - len(grouped))


def _release(version: str, find: Callable[[str], Record | None]) -> _Release:
    """The network of a release. One that the store no longer has is compared with itself only."""
    record = None
    with suppress(IntegrityError):  # `evernear store check` reports it
        record = find(version) if is_version(version) else None
    if record is None:
        return _Release(version, DEFAULT_DISTANCE)
    return _Release(record.manifest.network_sha256, record.manifest.group_distance or DEFAULT_DISTANCE)


def _compared(item: Item, release: _Release) -> tuple[_Space, Vector]:
    """The vector by which an item is compared with the others of its space."""
    if item.embedding is not None:
        vector = item.embedding / np.float32(np.linalg.norm(item.embedding))
        return _Space("embedding", release.network, len(vector), release.group_distance), vector
    if item.coordinates:
        vector = np.array(item.coordinates, np.float32)
        return _Space("coordinates", release.network, len(vector), release.group_distance), vector
    vector = _gray(item.image)
    return _Space("pixels", "", len(vector), PIXEL_DISTANCE), vector


def _cluster(members: Sequence[tuple[Item, Vector]], distance: float) -> list[Group]:
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(members) == 1:
        return [Group((members[0][0],))]
    vectors = np.stack([vector for _, vector in members]).astype(np.float64)
    numbers = fcluster(linkage(vectors, "average", "euclidean"), distance, "distance")
    groups: defaultdict[int, list[Item]] = defaultdict(list)
    for (item, _), number in zip(members, numbers.tolist(), strict=True):
        groups[number].append(item)
    return [Group(tuple(group)) for group in groups.values()]


def _gray(image: bytes) -> Vector:
    """Gray values at `_SIDE_PX` pixels, less their mean, of length 1; zeros for an image of one brightness."""
    picture = decode_inspected(inspect(image, MAX_PIXELS), 16).image
    gray = picture.convert("L").resize((_SIDE_PX, _SIDE_PX), Image.Resampling.BOX)
    vector = np.asarray(gray, np.float32).ravel()
    vector = vector - vector.mean()
    return vector / max(float(np.linalg.norm(vector)), 1e-6)
