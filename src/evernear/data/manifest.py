"""The immutable manifest of a dataset snapshot, which identifies shards by their hashes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Document, Frozen
from evernear.common.output import quantity
from evernear.common.store import Store
from evernear.data.preprocess import Resize
from evernear.data.reduction import BitDepth
from evernear.errors import IntegrityError, MissingObjectError

Split = Literal["train", "test", "gallery", "query"]
SPLITS: tuple[Split, ...] = get_args(Split)
FILE_NAME = "manifest.json"
REPAIR = "run `evernear store check --repair`"
"""The remedy for a missing or damaged dataset object in a store."""
_MAX_NAMES = 5
_IDENTITY: dict[str, Any] = {
    **dict.fromkeys(("format", "shape", "labels", "problems", "problem_counts"), True),
    "shards": {"__all__": {"split", "count", "rows_sha256"}},
}


PHOTO_MIN_PX = 64
"""Minimum length of the shorter side for color images to count as photographs."""


def is_photographic(shape: tuple[int, int, int]) -> bool:
    """Whether images of ``shape`` (H, W, C) count as photographs."""
    height, width, channels = shape
    return channels == 3 and min(height, width) >= PHOTO_MIN_PX


class Shard(Frozen):
    """A file with images from one split, ``datasets/<name>/shards/<sha256>.npy``."""

    sha256: str
    split: Split
    count: int
    size_bytes: int
    label_counts: dict[str, int]
    rows_sha256: str = ""
    """A hash of the digest, the label and the group of each image, in order."""


class Partition(Frozen):
    """A Parquet file with rows of a table (`evernear.data.tables`)."""

    sha256: str
    prefix: str
    """The rows are those whose key has a hash that begins with it."""
    rows: int
    size_bytes: int


class Problem(Frozen):
    """``kind`` is a rule in `evernear.settings.ValidationSettings`, and ``names`` are some of the
    affected files."""

    kind: str
    names: tuple[str, ...]
    detail: str


class SmallClasses(Frozen):
    """Classes from review with fewer than ``minimum`` images, with their numbers of images."""

    minimum: int = 0
    waiting: dict[str, int] = {}
    used: dict[str, int] = {}
    """Classes that are used all the same: live ones, and some with files that cannot be used."""

    def sentence(self) -> str:
        if not self.waiting:
            return ""
        number = quantity(len(self.waiting), "class waits", "classes wait")
        return f"{number} for more images from review: {counted(self.waiting, self.minimum)}"


class Manifest(Document):
    """An immutable snapshot of a dataset. The next ingest creates a new snapshot whose ``parent``
    is this snapshot.

    ``labels`` is append-only, so each label has the same number in every snapshot. ``problems``
    lists some problems of each kind, and ``problem_counts`` contains the total number of each kind.
    ``created`` is UTC, ISO 8601.
    """

    remedy = "run the ingest step again"

    name: str
    store_uri: str = ""
    """The store from which a step read it. Empty in the store itself, which may be moved, renamed
    or copied."""
    source: str
    created: str
    parent: str | None
    shape: tuple[int, int, int]
    resize: Resize = "stretch"
    """How images with a different aspect ratio than the dataset were resized."""
    bit_depth: BitDepth = 16
    """Number of bits that the values in 16-bit files use. Larger values were clipped."""
    labels: tuple[str, ...]
    shards: tuple[Shard, ...]
    tables: dict[str, tuple[Partition, ...]] = {}
    """The partitions of each table in `evernear.data.tables`."""
    decoders: dict[str, str] = {}
    """For each source, a hash of the code that decoded its images."""
    given_splits: tuple[Split, ...] = ()
    """The splits that the sources themselves give to images."""
    groups: int = 0
    """Number of image groups (``data.group``). Images without a group are not counted."""
    seen_groups: tuple[int, ...] = ()
    """The numbers of the groups with images in several of the splits train, gallery and query."""
    problems: tuple[Problem, ...] = ()
    problem_counts: dict[str, int] = {}
    reviewed: int = 0
    """Number of images from review, which are only in the train and gallery splits."""
    reviewed_left_out: dict[Split, dict[str, int]] = {}
    """Images from review that left the test or query split, by split and label."""
    small_classes: SmallClasses = SmallClasses()

    @classmethod
    def from_store(cls, data: bytes, store: Store, key: str) -> "Manifest":
        """Parse an object, even if it was written for a different store."""
        return cls.from_json(data, f"{store.uri}/{key}", REPAIR).model_copy(update={"store_uri": store.uri})

    def to_store(self) -> bytes:
        return self.model_copy(update={"store_uri": ""}).to_json()

    @property
    def has_photographs(self) -> bool:
        return is_photographic(self.shape)

    @property
    def digest(self) -> str:
        """sha256 of images, labels, splits, groups, order and problems, in whatever files."""
        identity = self.model_dump(mode="json", include=_IDENTITY)
        return sha256_bytes(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode())

    def count(self, split: Split) -> int:
        return sum(shard.count for shard in self.shards if shard.split == split)

    def label_counts(self, split: Split) -> dict[str, int]:
        """The number of images of each label in a split, in the order of ``labels``."""
        counts = dict.fromkeys(self.labels, 0)
        for shard in self.shards:
            if shard.split == split:
                for label, count in shard.label_counts.items():
                    counts[label] += count
        return counts

    def images_by_class(self) -> dict[str, int]:
        """The number of images of each label in all splits. Labels without images are omitted."""
        per_split = [self.label_counts(split) for split in SPLITS]
        totals = {label: sum(counts[label] for counts in per_split) for label in self.labels}
        return {label: count for label, count in totals.items() if count}

    def summary(self) -> str:
        counts = ", ".join(f"{self.count(split):,} {split}" for split in SPLITS)
        classes = len(self.images_by_class())
        height, width, channels = self.shape
        groups = f"; {quantity(self.groups, 'group')}" if self.groups else ""
        waiting = f"; {sentence}" if (sentence := self.small_classes.sentence()) else ""
        depth = f", 16-bit images read as {self.bit_depth} bits" if self.bit_depth < 16 else ""
        return f"{counts}; {quantity(classes, 'class', 'classes')}, {height}x{width}x{channels}{groups}{depth}{waiting}"


def counted(classes: Mapping[str, int], minimum: int) -> str:
    """The first of ``classes``, each with its number of images, as in ``sevn (1 of 10)``."""
    names = [f"{label} ({count} of {minimum})" for label, count in classes.items()]
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def manifest_key(name: str, digest: str) -> str:
    return f"datasets/{name}/manifests/{digest}.json"


def find_manifest(store: Store, name: str, digest: str) -> Manifest | None:
    """Find the snapshot ``digest`` of the dataset ``name``. Return None if ``store`` does not
    contain the snapshot.

    Raises:
        IntegrityError: the snapshot's manifest is damaged.
    """
    key = manifest_key(name, digest)
    stored = store.find(key)
    if stored is None:
        return None
    manifest = Manifest.from_store(stored[0], store, key)
    if (manifest.name, manifest.digest) != (name, digest):
        raise IntegrityError(f"{store.uri}/{key} does not describe the snapshot with that digest; {REPAIR}.")
    return manifest


def fetch_object(store: Store, key: str, path: Path, sha256: str) -> Path:
    try:
        return store.fetch(key, path, sha256)
    except (IntegrityError, MissingObjectError) as error:
        raise IntegrityError(f"{str(error).removesuffix('.')}; {REPAIR}.") from error


def save_manifest(manifest: Manifest, directory: Path) -> None:
    """A pipeline step receives only this file as the dataset artifact."""
    manifest.save(directory / FILE_NAME)


def load_manifest(directory: Path) -> Manifest:
    return Manifest.load(directory / FILE_NAME)
