"""Plan an export by assigning the shards of a snapshot to files.

A part (`evernear.common.parts`) is one Parquet file, one tar archive, or the image
files of several shards. Each part consists of whole shards. The division into parts
therefore depends only on the snapshot. Each shard's cached embeddings are used by only
one part::

    <out>/data/train-00000-of-00012.parquet     (Hugging Face's name for a split's file)
    <out>/train-000000.tar
    <out>/train/<label>/<position>-<digest>.png
    <out>/_evernear/plan.json, ...
"""

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field

from evernear.common.frozen import Frozen
from evernear.common.parts import Part, Parts
from evernear.common.store import Store
from evernear.data.export import Format
from evernear.data.manifest import SPLITS, Manifest, Split
from evernear.data.sources.names import OWN_FOLDER, is_skipped
from evernear.errors import ConflictError, SettingsError

KIND = "dataset-export"
PART_BYTES = 2**28
PART_IMAGES = 100_000
"""Maximum number of images in a part. The size of a part in bytes is also limited. A
shard that exceeds a limit forms a part on its own."""
_MAX_NAME_BYTES = 255
"""Maximum length in bytes of a folder name on common file systems."""


class Export(Frozen):
    """Properties shared by all parts: the dataset snapshot and, for an export with
    embeddings, the release."""

    format: Format
    store_uri: str
    dataset: str
    digest: str
    release: str = ""
    groups: bool = False
    """Whether the files name the group of each image."""


class ExportPart(Part):
    """Whole shards of one split, identified by their numbers in the manifest, and the
    first image's position in the split.

    ``name`` is the file's key without the suffix. In the folder format, ``name`` is the
    split.
    """

    split: Split
    name: str
    first: int = Field(ge=0)
    shards: tuple[int, ...]


def plan_export(export: Export, manifest: Manifest, out: Store, part_bytes: int = PART_BYTES) -> Parts:
    """Plan the files of an export to ``out``, or return the parts of an earlier plan.

    Raises:
        ConflictError: ``out`` contains a different export, or other files.
        SettingsError: a label in ``manifest`` cannot be a folder name.
    """
    parts = Parts.find(out, OWN_FOLDER)
    if export.format == "folder":
        _require_folder_names(manifest)
    if parts is None:
        if any(name != f"{OWN_FOLDER}/" for name in out.children("")):
            raise ConflictError(f"{out.uri} is not empty, and has no export to continue; choose another --out.")
        parts = Parts.make(out, OWN_FOLDER, KIND, export.model_dump(), _parts(export.format, manifest, part_bytes))
    if parts.plan.kind != KIND:
        raise ConflictError(f"{out.uri} has results of another command; choose another --out.")
    planned = Export.model_validate(parts.plan.shared)
    # A different store may contain the same snapshot.
    if planned.model_copy(update={"store_uri": export.store_uri}) != export:
        groups = " without groups" if export.groups and not planned.groups else ""
        raise ConflictError(f"{out.uri} has an export of {_described(planned)}{groups}; choose another --out.")
    return parts


def _described(export: Export) -> str:
    release = f" with the embeddings of release {export.release}" if export.release else ""
    return f"the snapshot {export.digest[:12]} of {export.dataset} as {export.format}{release}"


def _require_folder_names(manifest: Manifest) -> None:
    """Require each label to be a folder name that ingest reads back as the same
    label."""
    labels = {label for shard in manifest.shards for label in shard.label_counts}
    for label in sorted(labels):
        if is_skipped(label) or {"/", "\\", "\0"} & set(label) or len(label.encode()) > _MAX_NAME_BYTES:
            raise SettingsError(
                f"The label {label!r} cannot be the name of a folder; use --format parquet or --format webdataset."
            )


class _Group(NamedTuple):
    """Consecutive shards of a split: their numbers in the manifest, the position of the
    first image, and the number of images."""

    shards: tuple[int, ...]
    first: int
    images: int


def _parts(form: Format, manifest: Manifest, part_bytes: int) -> Iterator[ExportPart]:
    for split in SPLITS:
        groups = list(_groups(manifest, split, part_bytes))
        for number, group in enumerate(groups):
            yield ExportPart(
                units=group.images,
                split=split,
                name=_name(form, split, number, len(groups)),
                first=group.first,
                shards=group.shards,
            )


def _name(form: Format, split: Split, number: int, total: int) -> str:
    match form:
        case "parquet":
            return f"data/{split}-{number:05}-of-{total:05}"
        case "webdataset":
            return f"{split}-{number:06}"
        case "folder":
            return split


def _groups(manifest: Manifest, split: Split, part_bytes: int) -> Iterator[_Group]:
    shards: tuple[int, ...] = ()
    first = images = size_bytes = 0
    for number, shard in enumerate(manifest.shards):
        if shard.split != split:
            continue
        if shards and (size_bytes + shard.size_bytes > part_bytes or images + shard.count > PART_IMAGES):
            yield _Group(shards, first, images)
            shards, first, images, size_bytes = (), first + images, 0, 0
        shards, images, size_bytes = (*shards, number), images + shard.count, size_bytes + shard.size_bytes
    if shards:
        yield _Group(shards, first, images)
