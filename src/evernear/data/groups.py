"""Images that belong together, such as the frames of one scene, form a group. All images of a group
are in one split.

``data.group`` defines the groups with a regular expression, or with the name of a predefined
pattern that is suitable for many sources. The expression is applied to the name of a file in its
source, as it appears in messages. A group key applies to all classes and sources of a dataset,
because a scene may show several classes. Labeled queries
(`evernear.data.sources.names.is_reviewed`) do not belong to any group.
"""

import posixpath
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evernear.common.text import class_name
from evernear.data.group_table import PublishedGroups
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sources.names import is_reviewed
from evernear.settings.group import COLUMN, GROUP_FORMS

Grouping = Callable[[str, str], str]
"""Maps the file name and the label of an image to the name of its group, or to an empty string if
the image belongs to no group."""

_RUNNING_NUMBER = re.compile(r"[^0-9A-Za-z/]*\d+[^0-9/]*$")


def grouping(setting: str, column: Callable[[str], str] = lambda name: "") -> Grouping:
    """The grouping that a valid value of ``data.group`` defines. If ``setting`` is empty, no image
    belongs to a group. ``column`` returns the group that the source itself specifies for a file."""
    if not setting:
        return lambda name, label: ""
    if setting == COLUMN:
        return lambda name, label: class_name(column(name))
    if setting in GROUP_FORMS:
        form = _folder if setting == "folder" else _stem
        return lambda name, label: "" if is_reviewed(name) else form(below_class(name, label))
    pattern = re.compile(setting)

    def group(name: str, label: str) -> str:
        found = None if is_reviewed(name) else pattern.search(name)
        parts = [part or "" for part in found.groups()] if found else []
        return "/".join(parts) if any(parts) else ""

    return group


def below_class(name: str, label: str) -> str:
    """The part of a file's name after the class folder, or the whole name if no folder has the name
    of the class."""
    folders = name.split("/")[:-1]
    depth = next((depth for depth, folder in enumerate(folders, 1) if class_name(folder) == label), 0)
    return "/".join(name.split("/")[depth:])


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _stem(path: str) -> str:
    """The part of the file name before the last number, preceded by the folders below the class
    folder."""
    stem = posixpath.splitext(path)[0]
    found = _RUNNING_NUMBER.search(stem)
    return stem[: found.start()].rstrip("/") if found else ""


class GroupNumbers:
    """Assigns numbers to the groups of a snapshot's images on demand. The groups are read from the
    snapshot's ledger."""

    def __init__(self, ledger: Path, divided: bool) -> None:
        """Read ``ledger``. ``divided`` states whether any group has images in several splits."""
        self._ledger, self._divided = PublishedGroups(ledger), divided
        self._numbers: dict[str | bytes, int] = {}

    def of(self, digests: NDArray[np.uint8]) -> NDArray[np.int32]:
        """The group number of each image (N,). The images are identified by digest (N, 32). An
        image without a group counts as a separate group."""
        images = [digest.tobytes() for digest in digests]
        keys = self._ledger.groups(images)
        of_image: list[str | bytes] = [keys.get(image) or image for image in images]
        numbers = (self._numbers.setdefault(key, len(self._numbers)) for key in of_image)
        return np.fromiter(numbers, np.int32, len(images))

    def independent(self, digests: NDArray[np.uint8]) -> float:
        """Estimate the number of independent images among N images, where N is at least 1 (Kish
        1965, section 8.2). See `evernear.evaluation.statistics.effective_totals`."""
        sizes = np.unique(self.of(digests), return_counts=True)[1]
        return float(sizes.sum() ** 2 / (sizes**2).sum())

    def seen_queries(self) -> frozenset[bytes]:
        """Digests of the query images whose group also has images in the train or gallery split.

        Query images of such a group resemble the gallery more than images from a new group do.
        Query images of such a group occur only if the dataset was ingested before ``data.group``
        was set, or if the source specifies the splits.
        """
        return self._ledger.queries_of_seen_groups() if self._divided else frozenset()

    def label_counts(self) -> dict[str, dict[str, int]]:
        counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for group, label, images in self._ledger.label_counts():
            counts[group][label] = images
        return counts

    def has_explicit_test_images(self) -> bool:
        return self._ledger.has_explicit_test_images()

    def close(self) -> None:
        self._ledger.close()


@contextmanager
def group_numbers(dataset: Dataset) -> Generator[GroupNumbers | None]:
    """Yield the groups of a dataset's images, or None if the images are independent."""
    if not dataset.manifest.groups:
        yield None
        return
    divided = bool(dataset.manifest.problem_counts.get("split_group"))
    with tempfile.TemporaryDirectory(prefix="evernear-groups-") as scratch:
        path = Path(scratch, "ledger.sqlite")
        Snapshots(dataset.store, dataset.manifest.name).fetch_ledger(dataset.manifest, path)
        with closing(GroupNumbers(path, divided)) as numbers:
            yield numbers
