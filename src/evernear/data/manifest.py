"""What a dataset snapshot is: an immutable manifest that names its shards by their hash."""

import json
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from evernear.errors import IntegrityError
from evernear.store import disk_errors, sha256_bytes, write_atomically

Split = Literal["train", "test", "gallery", "query"]
SPLITS: tuple[Split, ...] = get_args(Split)
FILE_NAME = "manifest.json"
_IDENTITY = {"format", "shape", "labels", "shards", "problems", "problem_counts"}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(_Frozen):
    """One file of images of one split: ``datasets/<name>/shards/<sha256>.npy``."""

    sha256: str
    split: Split
    count: int
    size_bytes: int
    label_counts: dict[str, int]


class Problem(_Frozen):
    """A fault that ingest met; ``kind`` is a rule of `evernear.settings.ValidationSettings`.

    ``names`` are files of the source, a few where there are many.
    """

    kind: str
    names: tuple[str, ...]
    detail: str


class Manifest(_Frozen):
    """A snapshot of a dataset. It never changes; the next ingest makes another one with this as ``parent``.

    ``labels`` only ever grows at its end, so that a label's number is the same in every snapshot.
    ``problems`` lists some of each kind, ``problem_counts`` counts them all. ``created`` is UTC, ISO 8601.
    """

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

    def to_json(self) -> bytes:
        """The manifest as it is stored."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def manifest_key(name: str, digest: str) -> str:
    """Where the store has the snapshot ``digest`` of the dataset ``name``."""
    return f"datasets/{name}/manifests/{digest}.json"


def ledger_key(name: str, sha256: str) -> str:
    """Where the store has the ledger of a snapshot of the dataset ``name``."""
    return f"datasets/{name}/ledgers/{sha256}.sqlite"


def parse_manifest(data: bytes, place: str) -> Manifest:
    """A stored manifest.

    Raises:
        IntegrityError: ``data``, which came from ``place``, is no manifest.
    """
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise IntegrityError(f"{place} is no dataset manifest: {where} {fault['msg'].lower()}.") from None


def save_manifest(manifest: Manifest, directory: Path) -> None:
    """Write ``manifest.json`` into ``directory``: all that a pipeline step hands on of a dataset."""
    write_atomically(directory / FILE_NAME, manifest.to_json())


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a dataset artifact.

    Raises:
        IntegrityError: the directory holds none, or a broken one.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        raise IntegrityError(f"{directory} is no dataset: it holds no {FILE_NAME}.")
    with disk_errors(path):
        return parse_manifest(path.read_bytes(), str(path))


def as_split(name: str) -> Split | None:
    """``name`` as a split, or None where it is none."""
    return name if name in SPLITS else None
