"""The problems of a dataset, as queries over the tables of an ingest, because duplicates and
conflicts involve several images, and the sentences about them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from evernear.common.output import quantity
from evernear.data.database import Database, batched
from evernear.data.groups import FEWEST_GROUPS, LARGE_GROUPS, LargeGroup
from evernear.data.manifest import SPLITS, Problem, Split
from evernear.data.preprocess import Flaw, Resize, choose_resize
from evernear.data.sources.names import is_reviewed

# Maximum number of problems of each kind in a manifest. Problems that stop a run have a higher
# limit, because each of these problems must be fixed.
_MAX_LISTED = {"undecodable": 1000, "conflicting_labels": 1000}
_MAX_LISTED_OF_OTHERS = 20
_MAX_NAMES = 5
_PAGE_SIZES = 20_000
_NOTES = {
    "hidden_folder": "begins with a dot, so its images were left out",
    "not_an_image": "is not an image of a class",
    "litter": "is hidden, left behind by a system or program, or written by evernear",
    "no_class": "is in no class folder",
    "merged_folders": "are one class",
    "no_label": "has no label",
    "duplicate_row": "is in several rows",
    "nested_folder": "is the label of the images in these folders",
    "outside_link": "leads out of the source",
}
_LEFT_OUT_NOTES = ("no_class", "no_label", "not_an_image")

# ``named``: files, with names that are unique across sources. ``noted``: notes from the listings,
# and files whose content is not an image. ``twins``: images with several files.
_TABLES = """
CREATE OR REPLACE VIEW named AS
SELECT origin || name AS name, digest, label, given_split,
  CASE WHEN starts_with(fault, name) THEN origin || fault ELSE fault END AS fault, unread
FROM (
  SELECT *, CASE WHEN (SELECT count(DISTINCT source) > 1 FROM read) THEN source || '/' ELSE '' END AS origin FROM read
);
CREATE OR REPLACE VIEW noted AS
SELECT rule, CASE WHEN (SELECT count(DISTINCT source) > 1 FROM read) THEN source || '/' || name ELSE name END AS name,
  count
FROM notes
UNION ALL SELECT 'not_an_image', name, 1 FROM named WHERE digest IS NULL AND fault IS NULL AND NOT unread;
CREATE OR REPLACE TABLE named_copies AS
SELECT digest, name, label, given_split FROM named SEMI JOIN copies USING (digest);
CREATE OR REPLACE TABLE twins AS
SELECT min(name) AS name, digest, count(DISTINCT label) AS labels, count(DISTINCT coalesce(given_split, '')) AS splits
FROM named_copies GROUP BY digest;
CREATE OR REPLACE VIEW unread_classes AS
SELECT label, max(fault) AS fault FROM read
WHERE digest IS NULL AND label NOT IN (SELECT label FROM read WHERE digest IS NOT NULL) GROUP BY label;
"""
# ``sizes``: what was done to the images of each size. Most images have the same size, so kinds of
# problems that do not occur are excluded without reading the images again.
_SIZES = pa.schema([
    ("width_px", pa.int32()), ("height_px", pa.int32()), ("flaws", pa.int32()), ("resized", pa.string()),
    ("upscaled", pa.bool_()),
])  # fmt: skip
_ANY = """
SELECT EXISTS (SELECT 1 FROM twins) OR EXISTS (SELECT 1 FROM read WHERE digest IS NULL)
    OR EXISTS (SELECT 1 FROM notes WHERE rule = 'empty_folder'), EXISTS (SELECT 1 FROM noted)
"""
_FILE_PROBLEMS = {
    "undecodable": ("SELECT name, NULL AS digest, fault FROM named WHERE fault IS NOT NULL", "{text}"),
    "unreadable_class": (
        "SELECT label, NULL AS digest FROM unread_classes WHERE fault IS NOT NULL",
        "{names} contains no image.",
    ),
    "tiny_class": (
        """
        SELECT name, NULL AS digest FROM notes WHERE rule = 'empty_folder' AND name IS NOT NULL
        UNION SELECT label, NULL FROM unread_classes WHERE fault IS NULL
        """,
        "{names} contains no image.",
    ),
    "conflicting_labels": (
        "SELECT name, digest FROM twins WHERE labels > 1",
        "{names} are copies of one image under several labels.",
    ),
    "duplicate_across_splits": (
        "SELECT name, digest FROM twins WHERE labels = 1 AND splits > 1",
        "{names} are copies of one image in several splits.",
    ),
    "duplicate": ("SELECT name, digest FROM twins WHERE labels = 1 AND splits = 1", "{names} are one image."),
}
_IMAGE_PROBLEMS = """
SELECT (SELECT min(name) FROM named WHERE named.digest = images.digest) AS name, width_px, height_px
FROM images JOIN sizes USING (width_px, height_px, flaws)
WHERE flaws & $flaw <> 0 OR resized = $resized OR upscaled AND $upscaled
"""


class _ImageProblem(NamedTuple):
    flaw: int = 0
    resized: str = ""
    upscaled: bool = False
    text: str = "has {width} x {height} pixels"


_OF_IMAGES = {
    "constant_image": _ImageProblem(int(Flaw.CONSTANT), text="has one value in all its pixels"),
    "low_contrast": _ImageProblem(int(Flaw.FAINT), text="lost its contrast when it was reduced to 8 bits"),
    "clipped": _ImageProblem(int(Flaw.CLIPPED), text="has values beyond the bit depth of the dataset"),
    "grayed": _ImageProblem(int(Flaw.GRAYED), text="is in color and was stored in gray"),
    "cropped": _ImageProblem(resized="crop"),
    "letterboxed": _ImageProblem(resized="letterbox"),
    "stretched": _ImageProblem(resized="stretch"),
    "upscaled": _ImageProblem(upscaled=True),
}
_OF_GROUPS = {
    "split_group": (
        'SELECT "group" FROM images WHERE "group" IS NOT NULL GROUP BY 1 HAVING count(DISTINCT split) > 1',
        "has images in several splits",
    ),
    # An image without a group counts as one group.
    "few_groups": (
        """
        SELECT label FROM images GROUP BY 1 HAVING count(DISTINCT "group") + count(*) FILTER ("group" IS NULL) < 3
        """,
        f"has fewer than {FEWEST_GROUPS} groups",
    ),
}
_GROUP_LABELS = """
CREATE OR REPLACE TABLE group_labels AS
SELECT coalesce("group", '') AS name, label, count(*) AS images FROM images GROUP BY 1, 2
"""
# Images of a source whose files name another split, unless a copy names theirs. Without a given
# split, ingest chooses one.
_TOLD = """
CREATE OR REPLACE TABLE told AS
SELECT name, digest,
  CASE WHEN given_split IS NULL THEN list_contains($chosen, split) ELSE given_split = split END AS agrees
FROM read JOIN images USING (digest) WHERE source = $source AND reviewed IS NULL
"""
_DISAGREEING = "SELECT min(name) AS name FROM told GROUP BY digest HAVING NOT bool_or(agrees)"
_UNGROUPED = """
SELECT min(name) FROM read WHERE source = $source AND digest IS NOT NULL GROUP BY digest HAVING min("group") IS NULL
"""


def list_problems(
    db: Database, source: str, chosen_splits: Sequence[Split], height_px: int, width_px: int, resize: Resize
) -> tuple[list[Problem], dict[str, int]]:
    """Some problems of each kind, and the number of all. ``chosen_splits`` are those of
    ``source``, to which ingest assigns images."""
    db.run(_TABLES)
    problems: list[Problem] = []
    counts: dict[str, int] = {}
    has_files, has_notes = db.row(_ANY)
    for kind, (query, text) in _FILE_PROBLEMS.items() if has_files else ():
        counts[kind], rows = db.first(query, _MAX_LISTED.get(kind, _MAX_LISTED_OF_OTHERS))
        for name, digest, *fault in rows:
            names = (name,) if digest is None else _names(db, digest)
            detail = text.format(names=", ".join(names), text="".join(fault)) if not fault else fault[0]
            problems.append(Problem(kind=kind, names=names, detail=detail))
    occurring = _list_sizes(db, height_px, width_px, resize)
    for kind, problem in _OF_IMAGES.items():
        if kind in occurring:
            chosen = {"flaw": problem.flaw, "resized": problem.resized, "upscaled": problem.upscaled}
            counts[kind], rows = db.first(_IMAGE_PROBLEMS, _MAX_LISTED_OF_OTHERS, **chosen)
            for name, width, height in rows:
                detail = f"{name} {problem.text.format(width=width, height=height)}."
                problems.append(Problem(kind=kind, names=(name,), detail=detail))
    for kind, names, count, text in (*_earlier_splits(db, source, chosen_splits), *_group_problems(db, source)):
        counts[kind] = count
        problems += [Problem(kind=kind, names=(name,), detail=f"{name} {text}.") for name in names]
    rules = "SELECT rule, sum(count)::BIGINT FROM noted WHERE rule <> 'empty_folder' GROUP BY 1 ORDER BY 1"
    for rule, count in db.rows(rules) if has_notes else ():
        counts[rule] = count
        query = "SELECT name FROM noted WHERE rule = $rule AND name IS NOT NULL"
        for (name,) in db.first(query, _MAX_LISTED_OF_OTHERS, rule=rule)[1]:
            problems.append(Problem(kind=rule, names=(name,), detail=f"{name} {_NOTES[rule]}."))
    return problems, {kind: count for kind, count in counts.items() if count}


def list_left_out(db: Database) -> Iterator[tuple[str, str]]:
    """Name and reason of each file that was left out and can be used, after `list_problems`."""
    yield from db.stream("SELECT name, fault FROM named WHERE fault IS NOT NULL ORDER BY name")
    conflicts = (
        "SELECT name FROM named_copies JOIN (SELECT digest FROM twins WHERE labels > 1) USING (digest) ORDER BY 1"
    )
    for (name,) in db.stream(conflicts):
        yield name, f"{name} has several labels."
    for rule in _LEFT_OUT_NOTES:
        query = "SELECT name FROM noted WHERE rule = $rule AND name IS NOT NULL ORDER BY name"
        for (name,) in db.stream(query, rule=rule):
            yield name, f"{name} {_NOTES[rule]}."
        unnamed = "SELECT coalesce(sum(count), 0)::BIGINT FROM noted WHERE rule = $rule AND name IS NULL"
        if more := db.value(unnamed, rule=rule):  # a listing names the first ones (`NameSample`)
            yield "", f"{quantity(more, 'more file')}: each {_NOTES[rule]}."


def _list_sizes(db: Database, height_px: int, width_px: int, resize: Resize) -> set[str]:
    """Make the table ``sizes``, and return the kinds of problems that occur in it."""
    occurring = set[str]()
    db.create("sizes", _SIZES)
    for page in batched(db.stream("SELECT DISTINCT width_px, height_px, flaws FROM images"), _PAGE_SIZES):
        widths, heights, flaws = (list(column) for column in zip(*page, strict=True))
        resized = [choose_resize((width, height), height_px, width_px, resize) for width, height, _ in page]
        upscaled = [width < width_px or height < height_px for width, height, _ in page]
        db.insert("sizes", pa.table([widths, heights, flaws, resized, upscaled], _SIZES))
        for flaw, kind, is_upscaled in set(zip(flaws, resized, upscaled, strict=True)):
            occurring.update(
                name
                for name, problem in _OF_IMAGES.items()
                if flaw & problem.flaw or kind == problem.resized or (is_upscaled and problem.upscaled)
            )
    return occurring


def _earlier_splits(
    db: Database, source: str, chosen_splits: Sequence[Split]
) -> Iterator[tuple[str, list[str], int, str]]:
    """As `_group_problems` does. An image of an earlier ingest never moves."""
    if len(chosen_splits) == len(SPLITS):
        return
    db.run(_TOLD, source=source, chosen=list(chosen_splits))
    count, names = db.first(_DISAGREEING, _MAX_LISTED_OF_OTHERS)
    if count:
        yield "earlier_split", [name for (name,) in names], count, "stays in the split of an earlier ingest"


def _group_problems(db: Database, source: str) -> Iterator[tuple[str, list[str], int, str]]:
    """Yield kind, some names, their total number, and a description."""
    if not db.value('SELECT count("group") FROM images'):
        return
    db.run(_GROUP_LABELS)
    if large := [str(LargeGroup._make(row)) for row in db.rows(LARGE_GROUPS)]:
        yield "large_group", large, len(large), "is one group"
    for kind, (query, text) in _OF_GROUPS.items():
        count, names = db.first(query, _MAX_LISTED_OF_OTHERS)
        if count:
            yield kind, [name for (name,) in names], count, text
    ungrouped = sorted(name for (name,) in db.stream(_UNGROUPED, source=source) if not is_reviewed(name))
    if ungrouped:
        yield "ungrouped", ungrouped[:_MAX_LISTED_OF_OTHERS], len(ungrouped), "belongs to no group"


def _names(db: Database, digest: bytes) -> tuple[str, ...]:
    query = "SELECT name FROM named_copies WHERE digest = $digest ORDER BY name LIMIT $most"
    return tuple(name for (name,) in db.rows(query, digest=digest, most=_MAX_NAMES))
