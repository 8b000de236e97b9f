"""The fourth stage of an ingest: combine the results of its parts with the images of the previous
snapshot, in one process.

The statements find out which images the files contain now. Images whose files are gone, or whose
labels conflict, are removed; those with another label or group are changed in their shards. New
images are put into splits and shards in the order of decoding, because the split of an image
depends on earlier images of its class. The result does not depend on how files were divided into
parts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from evernear.common.output import quantity
from evernear.data.database import ArrowBatch, ArrowTable, Database
from evernear.data.decoding import ImageForm
from evernear.data.manifest import SPLITS, Split
from evernear.data.parts import RESULTS
from evernear.data.plan import Draft
from evernear.data.preprocess import Pixels, pixels_digest, to_array
from evernear.data.sources import ArrayBlock, ArraySource
from evernear.data.splits import Members, Placer
from evernear.data.writer import Change, ShardWriter, group_number
from evernear.errors import MissingObjectError
from evernear.settings import DataSettings

# The changed files as they are read now. ``former`` is the image of an unchanged file before it was
# read again.
_CHANGED_FILES = """
CREATE TABLE changed_files AS
SELECT $source AS source, c.name, c.etag, c.size_bytes, c.modified, c.label, c.given_split, c.given_group, c."group",
  CASE WHEN c.unchanged THEN c.former ELSE r.digest END AS digest, r.fault, false AS unread, c.former,
  NOT c.unchanged AND r.name IS NULL AS missing, r.position, r.plan, r.part, r.row, r.width_px, r.height_px, r.flaws
FROM changed c LEFT JOIN results r ON r.name = c.name AND r.etag = c.etag WHERE NOT c.gone;
"""
# ``read``: the files of all sources. ``affected``: the images for which anything may change: one of
# their files changed, or their rows were made again from a shard; ``again``: their pixels must be
# stored again, because other code decodes them. ``touched``: the files of these images.
#
# Each join of all files or images makes a table, because DuckDB runs out of memory if the same
# statement also groups or sorts the result, or joins it again.
_ALL_READ = """
CREATE VIEW read AS FROM changed_files;
CREATE VIEW touched AS FROM read;
"""
_READ = """
CREATE TABLE read AS
FROM changed_files UNION ALL BY NAME
SELECT source, name, etag, size_bytes, modified, label, given_split, given_group, "group", digest, fault, unread,
  digest AS former
FROM old_files ANTI JOIN changed USING (source, name) WHERE NOT waiting;
CREATE TABLE affected AS
SELECT digest, bool_or(again) AS again FROM (
  SELECT digest, false AS again FROM changed_files UNION ALL SELECT old_digest, $decode_again FROM changed
  UNION ALL SELECT digest, false FROM stored_files JOIN renamed USING (source) WHERE current IS NULL
  UNION ALL SELECT digest, false FROM old_images WHERE width_px = 0
) WHERE digest IS NOT NULL GROUP BY digest;
CREATE TABLE touched AS FROM read SEMI JOIN affected USING (digest);
"""
# ``copies``: the files of images with several files. ``found``: the images that ``touched`` files
# contain. If labels conflict, ``other_label`` is not ``label``.
_FOUND = r"""
CREATE TABLE copied AS SELECT digest FROM read WHERE digest IS NOT NULL GROUP BY digest HAVING count(*) > 1;
CREATE TABLE copies AS FROM read SEMI JOIN copied USING (digest);
CREATE MACRO by_review(name) AS
contains(name, 'review-') AND regexp_full_match(name, '(?s)(.*/)?review-[0-9a-f]{16}\.[^./]+');
CREATE TABLE found AS
SELECT digest, label, label AS other_label, "group", position, by_review(name) AS by_review,
  CASE WHEN given_split IN ('test', 'query') THEN given_split END AS measured, given_split, former, plan, part, row,
  width_px, height_px, flaws
FROM touched ANTI JOIN copies USING (digest) WHERE digest IS NOT NULL
UNION ALL
SELECT c.*, r.given_split, r.former, r.plan, r.part, r.row, r.width_px, r.height_px, r.flaws
FROM (
  SELECT digest, min(label) AS label, max(label) AS other_label, min("group") AS "group", min(position) AS position,
    bool_and(by_review(name)) AS by_review, max(given_split) FILTER (given_split IN ('test', 'query')) AS measured
  FROM copies GROUP BY digest
) c LEFT JOIN copies r USING (position);
"""
# What becomes of the earlier images for which anything changes. ``moves``: an image from review
# leaves the splits that measure.
_CHANGES = """
CREATE TABLE affected_images AS
SELECT digest, slot, split, label, "group", reviewed, again FROM old_images JOIN affected USING (digest);
CREATE TABLE changes AS
SELECT *, split IN ('test', 'query') AND reviewed IS NOT NULL AS moves FROM (
  SELECT i.digest, i.slot, i.split, i.label AS old_label, i."group" AS old_group, i.reviewed AS old_reviewed, f.label,
    f."group", f.digest IS NULL OR f.label <> f.other_label OR i.again AS gone, i.again,
    CASE WHEN i.reviewed IS NOT NULL THEN i.reviewed WHEN f.by_review IS NOT TRUE THEN NULL
      WHEN i.split IN ('test', 'query') THEN i.split ELSE coalesce(f.measured, '') END AS reviewed
  FROM affected_images i LEFT JOIN found f USING (digest)
)
WHERE gone OR label <> old_label OR "group" IS DISTINCT FROM old_group OR reviewed IS DISTINCT FROM old_reviewed
  OR split IN ('test', 'query') AND reviewed IS NOT NULL;
CREATE TABLE moved (digest BLOB, slot INTEGER, row INTEGER, split VARCHAR);
"""
_CHANGED = pa.schema([
    ("digest", pa.binary()), ("split", pa.string()), ("old_group", pa.string()), ("reviewed", pa.string()),
    ("gone", pa.bool_()), ("again", pa.bool_()),
])  # fmt: skip
_KEPT = """
CREATE TABLE kept AS
SELECT i.digest, coalesce(c.label, i.label) AS label, coalesce(m.split, i.split) AS split,
  CASE WHEN c.digest IS NULL THEN i."group" ELSE c."group" END AS "group", i.width_px, i.height_px, i.flaws,
  CASE WHEN c.digest IS NULL THEN i.reviewed ELSE c.reviewed END AS reviewed, coalesce(m.slot, i.slot) AS slot,
  coalesce(m.row, i.row) AS row
FROM old_images i LEFT JOIN changes c USING (digest) LEFT JOIN moved m USING (digest)
WHERE c.digest IS NULL OR NOT c.gone;
"""
# Their sizes are unknown after the tables were lost and made again from shards.
_SIZES = """
UPDATE kept SET width_px = f.width_px, height_px = f.height_px, flaws = f.flaws
FROM found f WHERE f.digest = kept.digest AND kept.width_px = 0 AND f.position IS NOT NULL;
"""
# New images, with the split that each had before it was removed, or before its unchanged file was
# decoded again.
_NEW = """
CREATE VIEW past AS
SELECT digest, split, reviewed FROM old_removed UNION ALL SELECT digest, split, reviewed FROM changes WHERE again;
CREATE TABLE fresh AS
FROM found ANTI JOIN kept USING (digest) WHERE position IS NOT NULL AND label = other_label;
CREATE TABLE new_images AS
SELECT f.position, f.plan, f.part, f.row, f.digest, f.label, f."group", f.given_split, f.width_px, f.height_px, f.flaws,
  coalesce(own.split, former.split) AS earlier_split,
  CASE WHEN own.reviewed IS NOT NULL THEN own.reviewed WHEN NOT f.by_review THEN NULL
    WHEN own.split IN ('test', 'query') THEN own.split ELSE coalesce(f.measured, '') END AS reviewed
FROM fresh f LEFT JOIN past own ON own.digest = f.digest LEFT JOIN past former ON former.digest = f.former;
"""
_IMAGES = """
CREATE VIEW images AS SELECT * FROM kept UNION ALL SELECT * FROM placed;
CREATE TABLE removed AS
SELECT * FROM (
  SELECT digest, split, "group", reviewed FROM old_removed
  UNION ALL SELECT digest, split, old_group, reviewed FROM changes WHERE gone
) past WHERE NOT EXISTS (SELECT 1 FROM images i WHERE i.digest = past.digest);
"""
# Each group counts as one image of each of its classes.
_COUNTS = """
SELECT label, split, count(DISTINCT "group") + count(*) FILTER ("group" IS NULL) FROM kept GROUP BY 1, 2
"""
_MEMBERS = """
SELECT "group", label, split, count(*) FROM (
  SELECT "group", label, split FROM kept
  UNION ALL SELECT "group", '', split FROM old_removed r WHERE NOT EXISTS (SELECT 1 FROM kept WHERE digest = r.digest)
  UNION ALL SELECT old_group, '', split FROM changes WHERE again
) WHERE "group" IN (SELECT "group" FROM new_images) GROUP BY 1, 2, 3
"""
_GROUP_LABELS = """
SELECT "group", list(DISTINCT label ORDER BY label) FROM read
WHERE "group" IN (SELECT "group" FROM new_images) GROUP BY 1
"""
# The columns of ``kept``.
_PLACED = pa.schema([
    ("digest", pa.binary()), ("label", pa.string()), ("split", pa.string()), ("group", pa.string()),
    ("width_px", pa.int32()), ("height_px", pa.int32()), ("flaws", pa.int32()), ("reviewed", pa.string()),
    ("slot", pa.int32()), ("row", pa.int32()),
])  # fmt: skip
_IN_ORDER = """
SELECT position, plan, part, row AS part_row, digest, label, "group", given_split, width_px, height_px, flaws, reviewed,
  earlier_split
FROM new_images ORDER BY position
"""


StoredPixels = Callable[[Iterable[tuple[int, int]]], Iterator[tuple[tuple[int, int], Pixels]]]
"""Yields the pixels of parts (plan and part), each a uint8 array (N, H, W, C)."""


def list_arrays(source: ArraySource, form: ImageForm, db: Database) -> StoredPixels:
    """Make the table ``results`` for a source of arrays, whose blocks are its parts."""
    position = 0
    with db.written("results", RESULTS) as write:
        for number, block in enumerate(source.blocks()):
            count = len(block.names)
            height, width = block.images.shape[1:]
            flat = block.images.reshape(count, -1)
            columns = {
                "plan": [0] * count, "part": [number] * count, "row": range(count),
                "position": range(position, position + count),
                "name": block.names, "etag": [""] * count,
                "digest": [pixels_digest("L", width, height, row.tobytes()) for row in flat],
                "width_px": [width] * count, "height_px": [height] * count,
                "flaws": (flat.min(axis=1) == flat.max(axis=1)).astype(int).tolist(), "fault": [None] * count,
            }  # fmt: skip
            write(pa.table(columns, RESULTS))
            position += count

    def pixels(needed: Iterable[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Pixels]]:
        wanted = {part for _, part in needed}
        for number, block in enumerate(source.blocks()):
            if number in wanted:
                yield (0, number), _array_pixels(block, form)

    return pixels


def _array_pixels(block: ArrayBlock, form: ImageForm) -> Pixels:
    """Pillow is only used to resize the images."""
    if block.images.shape[1:] == form.shape[:2]:
        return np.repeat(block.images[..., None], form.shape[2], axis=3)
    return np.stack([to_array(Image.fromarray(image), *form.shape, form.resize) for image in block.images])


def combine(
    draft: Draft,
    settings: DataSettings,
    candidates: tuple[Split, ...],
    labels: Sequence[str],
    pixels: StoredPixels,
    writer: ShardWriter,
    on_images: Callable[[int], None],
    *,
    decode_again: bool,
) -> None:
    """Make ``images`` and ``removed``, and write the shards. ``candidates`` contains the splits
    that ingest may choose. If ``decode_again`` is set, the images of the source are stored again.

    Raises:
        MissingObjectError: a pending file has no result, because it has changed or vanished.
    """
    db = draft.db
    db.run(_CHANGED_FILES, source=draft.source)
    if changed := db.value("SELECT count(*) FROM changed_files WHERE missing"):
        raise MissingObjectError(f"{quantity(changed, 'file')} of the source changed or vanished during the ingest.")
    db.run(_ALL_READ if draft.is_new else _READ, decode_again=decode_again)
    db.run(_FOUND)
    numbers = {label: number for number, label in enumerate(labels)}
    if draft.is_new:
        db.create("changes", _CHANGED)
        db.create("kept", _PLACED)
    else:
        db.run(_CHANGES)
        _rewrite(db, writer, numbers)
        db.run(_KEPT)
        if db.value("SELECT min(width_px) FROM kept") == 0:
            db.run(_SIZES)
    db.run(_NEW)
    _add(db, _placer(db, settings, candidates), pixels, writer, numbers, on_images)
    db.run(_IMAGES)


def count_decoded_again(db: Database, source: str) -> int:
    """The number of images that `combine` stores again if other code decodes them."""
    return db.value("SELECT count(DISTINCT digest) FROM old_files WHERE source = $source", source=source)


def _rewrite(db: Database, writer: ShardWriter, numbers: Mapping[str, int]) -> None:
    """Slots from which images move are rewritten last, because these are then added to others."""
    slots = db.rows("SELECT slot, bool_or(moves AND NOT gone) FROM changes GROUP BY slot ORDER BY 2, 1")
    for slot, _ in slots:
        rows = db.rows('SELECT digest, gone, label, "group", moves FROM changes WHERE slot = $slot', slot=slot)
        changes = {
            digest: Change(None) if gone else Change(numbers[label], group_number(group), moves)
            for digest, gone, label, group, moves in rows
        }
        for digests, placed, split in writer.rewrite(slot, changes):
            db.insert("moved", pa.table({
                "digest": pa.array(digests, pa.binary()), "slot": pa.array(placed.slots, pa.int32()),
                "row": pa.array(placed.rows, pa.int32()), "split": pa.array([split] * len(digests), pa.string()),
            }))  # fmt: skip
    writer.close()


def _placer(db: Database, settings: DataSettings, candidates: tuple[Split, ...]) -> Placer:
    counts = defaultdict[str, Counter[Split]](Counter)
    for label, split, count in db.rows(_COUNTS):
        counts[label][split] = count
    members = defaultdict[str, Members](Counter)
    if not db.value('SELECT count("group") FROM read'):
        return Placer(settings, candidates, counts, members, {})
    for group, label, split, count in db.rows(_MEMBERS):
        members[group][label, split] = count
    return Placer(settings, candidates, counts, members, dict(db.rows(_GROUP_LABELS)))


def _add(
    db: Database,
    placer: Placer,
    pixels: StoredPixels,
    writer: ShardWriter,
    numbers: Mapping[str, int],
    on_images: Callable[[int], None],
) -> None:
    parts = db.rows("SELECT plan, part, max(position) FROM new_images GROUP BY 1, 2 ORDER BY min(position)")
    stored = _PartPixels(pixels((plan, part) for plan, part, _ in parts), {(p, n): last for p, n, last in parts})
    with db.written("placed", _PLACED) as write:
        for batch in db.batches(_IN_ORDER):
            write(_place(batch, placer, stored, writer, numbers, on_images))
    writer.close()


def _place(
    batch: ArrowBatch,
    placer: Placer,
    stored: "_PartPixels",
    writer: ShardWriter,
    numbers: Mapping[str, int],
    on_images: Callable[[int], None],
) -> ArrowTable:
    """Put new images into splits and shards. Return their rows in ``placed``."""
    columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
    given, earlier, groups, names = (
        columns[name].to_pylist() for name in ("given_split", "earlier_split", "group", "label")
    )
    digests = np.frombuffer(columns["digest"].cast(pa.binary(32)).buffers()[1], np.uint8).reshape(-1, 32)
    reviewed = columns["reviewed"].is_valid().to_pylist()
    splits = placer.place(names, columns["digest"].to_pylist(), groups, given, earlier, reviewed)
    labels = np.array([*map(numbers.__getitem__, names)], np.int64)
    of_groups = np.array([group_number(group) for group in groups] if any(groups) else [0] * len(groups), np.int64)
    chosen = np.array([*map(SPLITS.index, splits)], np.int8)
    slots, rows = np.empty(len(splits), np.int32), np.empty(len(splits), np.int32)
    for start in range(0, len(splits), writer.block_rows):
        pixels = stored.of(batch.slice(start, writer.block_rows))
        of_batch = chosen[start : start + writer.block_rows]
        for number, split in enumerate(SPLITS):
            at = np.flatnonzero(of_batch == number)
            if len(at):
                own = at + start
                placed = writer.append(split, pixels[at], labels[own], of_groups[own], digests[own])
                slots[own], rows[own] = placed
        on_images(len(of_batch))
    return pa.table({**columns, "split": splits, "slot": slots, "row": rows}).select(_PLACED.names).cast(_PLACED)


class _PartPixels:
    """The pixels of parts, each of which is open from its first image to its last."""

    def __init__(self, stored: Iterator[tuple[tuple[int, int], Pixels]], last: Mapping[tuple[int, int], int]) -> None:
        self._stored, self._last = stored, last
        self._open: dict[tuple[int, int], Pixels] = {}

    def of(self, batch: ArrowBatch) -> Pixels:
        """The pixels (N, H, W, C) of new images."""
        plans, parts, rows = (np.asarray(batch.column(name)) for name in ("plan", "part", "part_row"))
        starts = [0, *(np.flatnonzero((np.diff(plans) != 0) | (np.diff(parts) != 0)) + 1).tolist()]
        runs: list[Pixels] = []
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            key = int(plans[start]), int(parts[start])
            while key not in self._open:
                opened, pixels = next(self._stored)
                self._open[opened] = pixels
            runs.append(self._open[key][rows[start:end]])
        last = batch.column("position")[len(rows) - 1].as_py()
        for key in [key for key in self._open if self._last[key] <= last]:
            del self._open[key]
        return np.concatenate(runs) if len(runs) > 1 else runs[0]


_SWAPPED = """
WITH relabeled AS (
  SELECT old_label, label, count(*) AS count FROM changes WHERE NOT gone AND label <> old_label GROUP BY 1, 2
),
former AS (
  SELECT label, sum(count)::BIGINT AS count FROM (
    SELECT label, count(*) AS count FROM images GROUP BY 1
    UNION ALL SELECT old_label, count FROM relabeled UNION ALL SELECT label, -count FROM relabeled
  ) GROUP BY 1
)
SELECT r.old_label, r.count, a.count, s.old_label, s.count, b.count
FROM relabeled r JOIN relabeled s ON r.old_label = s.label AND r.label = s.old_label AND r.old_label < r.label
  JOIN former a ON a.label = r.old_label JOIN former b ON b.label = s.old_label
WHERE 2 * r.count > a.count AND 2 * s.count > b.count ORDER BY 1
"""


def swapped_classes(db: Database) -> list[str]:
    """A sentence on each two classes that swapped most images. After `combine`."""
    if not db.value("SELECT count(*) FROM changes"):
        return []
    return [
        f"{moved:,} of {all_of_name:,} images of {name} are now {other}, and {back:,} of {all_of_other:,} of {other}"
        f" are now {name}: these classes seem to have swapped their names"
        for name, moved, all_of_name, other, back, all_of_other in db.rows(_SWAPPED)
    ]


_MANY_SHARE = 0.1
_GONE = "SELECT count(*) FROM changes WHERE gone AND NOT again AND label IS NULL"


def many_gone(db: Database) -> list[str]:
    """A sentence if more than a tenth of the earlier images are in no file. After `combine`."""
    if not db.value("SELECT count(*) FROM changes"):
        return []
    gone, earlier = db.value(_GONE), db.value("SELECT count(*) FROM old_images")
    if gone <= _MANY_SHARE * earlier:
        return []
    return [f"of {earlier:,} earlier images, {gone:,} have changed or are no longer in the source"]


def most_are_larger(db: Database, height_px: int, width_px: int) -> bool:
    """Whether most images were larger before they were resized."""
    query = "SELECT 2 * count(*) FILTER (width_px > $width AND height_px > $height) > count(*) FROM images"
    return db.value(query, width=width_px, height=height_px)
