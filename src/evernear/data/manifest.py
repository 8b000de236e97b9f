"""What a dataset snapshot is: an immutable manifest that names its shards by their hash."""

import json
from pathlib import Path
from typing import Literal, get_args

from evernear.disk import sha256_bytes
from evernear.frozen import Frozen

Split = Literal["train", "test", "gallery", "query"]
SPLITS: tuple[Split, ...] = get_args(Split)
FILE_NAME = "manifest.json"
_IDENTITY = {"format", "shape", "labels", "shards", "problems", "problem_counts"}


class Shard(Frozen):
    """One file of images of one split: ``datasets/<name>/shards/<sha256>.npy``."""

    sha256: str
    split: Split
    count: int
    size_bytes: int
    label_counts: dict[str, int]


class Problem(Frozen):
    """A fault that ingest met; ``kind`` is a rule of `evernear.settings.ValidationSettings`.

    ``names`` are files of the source, a few where there are many.
    """

    kind: str
    names: tuple[str, ...]
    detail: str


class Manifest(Frozen):
    """A snapshot of a dataset. It never changes; the next ingest makes another one with this as ``parent``.

    ``labels`` only ever grows at its end, so that a label's number is the same in every snapshot.
    ``problems`` lists some of each kind, ``problem_counts`` counts them all. ``created`` is UTC, ISO 8601.
    """

    remedy = "run the ingest step again"

    format: Literal[1] = 1
    name: str
    store_uri: str
    source: str
    created: str
    parent: str | None
    shape: tuple[int, int, int]
    labels: tuple[str, ...]
    shards: tuple[Shard, ...]
    ledger_sha256: str
    problems: tuple[Problem, ...] = ()
    problem_counts: dict[str, int] = {}

    @property
    def digest(self) -> str:
        """sha256 of what the snapshot holds: images, labels, splits, order, problems; not of where it is."""
        identity = self.model_dump(mode="json", include=_IDENTITY)
        return sha256_bytes(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode())

    def count(self, split: Split) -> int:
        """Images of a split."""
        return sum(shard.count for shard in self.shards if shard.split == split)

    def label_counts(self, split: Split) -> dict[str, int]:
        """Images of each label of a split, in the order of ``labels``, zeros included."""
        counts = dict.fromkeys(self.labels, 0)
        for shard in self.shards:
            if shard.split == split:
                for label, count in shard.label_counts.items():
                    counts[label] += count
        return counts


def manifest_key(name: str, digest: str) -> str:
    """Where the store has the snapshot ``digest`` of the dataset ``name``."""
    return f"datasets/{name}/manifests/{digest}.json"


def ledger_key(name: str, sha256: str) -> str:
    """Where the store has the ledger of a snapshot of the dataset ``name``."""
    return f"datasets/{name}/ledgers/{sha256}.sqlite"


def save_manifest(manifest: Manifest, directory: Path) -> None:
    """Write ``manifest.json`` into ``directory``: all that a pipeline step hands on of a dataset."""
    manifest.save(directory / FILE_NAME)


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a dataset artifact.

    Raises:
        IntegrityError: the directory holds none, or a broken one.
    """
    return Manifest.load(directory / FILE_NAME)


def as_split(name: str) -> Split | None:
    """``name`` as a split, or None where it is none."""
    return name if name in SPLITS else None
