"""The problems of a dataset, as queries over its ledger, because duplicates and conflicts involve
several images, and the sentences about them."""

import sqlite3
from collections.abc import Iterator
from typing import Any

from evernear.data.group_table import GroupTable
from evernear.data.manifest import Problem
from evernear.data.preprocess import Flaw, Resize, choose_resize
from evernear.data.sqlite import sqlite_errors

# Maximum number of problems of each kind in a manifest. Problems that stop a run have a higher
# limit, because each of these problems must be fixed.
_MAX_LISTED = {"undecodable": 1000, "conflicting_labels": 1000}
_MAX_LISTED_OF_OTHERS = 20
_MAX_NAMES = 5
_FLAWS = {
    "constant_image": (Flaw.CONSTANT, "has one value in all its pixels"),
    "low_contrast": (Flaw.FAINT, "lost its contrast when it was reduced to 8 bits"),
    "clipped": (Flaw.CLIPPED, "has values beyond the bit depth of the dataset"),
}
_SIZE = "'has ' || width || ' x ' || height || ' pixels'"
_RESIZED = {"cropped": "crop", "letterboxed": "letterbox", "stretched": "stretch"}
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

# Images with more than one file.
_TWINS = """
CREATE TEMP TABLE twins AS
SELECT MIN(name) AS name, digest,
  COUNT(DISTINCT label) AS labels, COUNT(DISTINCT COALESCE(given, '')) AS splits
FROM named
WHERE digest IN (SELECT digest FROM files WHERE digest IS NOT NULL GROUP BY digest HAVING COUNT(*) > 1)
GROUP BY digest
"""

# Most images have the same size, so ``resized`` is called once per size, and kinds of problems that
# do not occur are excluded without reading the images again.
_SIZES = """
CREATE TEMP TABLE sizes AS
SELECT width, height, constant, resized(width, height) AS resize
FROM (SELECT DISTINCT width, height, constant FROM images)
"""


_Query = tuple[str, str, tuple[object, ...]]
"""Kind, query and values. The query returns name, digest if several files have it, and text."""


def list_problems(
    db: sqlite3.Connection, groups: GroupTable, height_px: int, width_px: int, resize: Resize
) -> tuple[list[Problem], dict[str, int]]:
    def resized(width: int, height: int) -> str | None:
        return choose_resize((width, height), height_px, width_px, resize)

    with sqlite_errors():
        db.create_function("resized", 2, resized, deterministic=True)
    _all(db, _SIZES)
    problems: list[Problem] = []
    counts: dict[str, int] = {}
    _all(db, _TWINS)
    for kind, query, values in (*_file_queries(), *_image_queries(db, height_px, width_px)):
        count = _all(db, f"SELECT COUNT(*) FROM ({query})", *values)[0][0]  # noqa: S608 - our own words
        if not count:
            continue
        counts[kind] = count
        limit = _MAX_LISTED.get(kind, _MAX_LISTED_OF_OTHERS)
        for name, digest, text in _all(db, f"{query} ORDER BY 1 LIMIT {limit}", *values):
            names = _names(db, name, digest)
            detail = text if kind == "undecodable" else f"{', '.join(names)} {text}."
            problems.append(Problem(kind=kind, names=names, detail=detail))
    for kind, names, count, text in groups.problems(_MAX_LISTED_OF_OTHERS):
        counts[kind] = count
        problems += [Problem(kind=kind, names=(name,), detail=f"{name} {text}.") for name in names]
    for rule, count in _all(
        db, "SELECT rule, SUM(count) FROM noted WHERE rule != 'empty_folder' GROUP BY 1 ORDER BY 1"
    ):
        counts[rule] = count
        query = "SELECT name FROM noted WHERE rule = ? AND name IS NOT NULL ORDER BY name LIMIT ?"
        for (name,) in _all(db, query, rule, _MAX_LISTED_OF_OTHERS):
            problems.append(Problem(kind=rule, names=(name,), detail=f"{name} {_NOTES[rule]}."))
    return problems, counts


def list_left_out(db: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """Name and reason of each file that was left out and can be used, after `list_problems`."""
    yield from _all(db, "SELECT name, fault FROM named WHERE fault IS NOT NULL ORDER BY name")
    query = "SELECT name FROM named WHERE digest IN (SELECT digest FROM twins WHERE labels > 1) ORDER BY name"
    for (name,) in _all(db, query):
        yield name, f"{name} has several labels."
    for rule in _LEFT_OUT_NOTES:
        for (name,) in _all(db, "SELECT name FROM noted WHERE rule = ? AND name IS NOT NULL ORDER BY name", rule):
            yield name, f"{name} {_NOTES[rule]}."


def _file_queries() -> Iterator[_Query]:
    yield "undecodable", "SELECT name, NULL, fault FROM named WHERE fault IS NOT NULL", ()
    no_image = "'contains no image'"
    unusable = (
        f"SELECT label, NULL, {no_image} FROM files WHERE digest IS NULL"  # noqa: S608 - our own words
        " AND label NOT IN (SELECT label FROM files WHERE digest IS NOT NULL) GROUP BY label HAVING MAX(fault)"
    )
    yield "unreadable_class", f"{unusable} IS NOT NULL", ()
    empty = f"SELECT name, NULL, {no_image} FROM notes WHERE rule = 'empty_folder' AND name IS NOT NULL"  # noqa: S608
    yield "tiny_class", f"{empty} UNION {unusable} IS NULL", ()
    twins = "SELECT name, digest, {} FROM twins WHERE {}"
    yield "conflicting_labels", twins.format("'are copies of one image under several labels'", "labels > 1"), ()
    across = twins.format("'are copies of one image in several splits'", "labels = 1 AND splits > 1")
    yield "duplicate_across_splits", across, ()
    yield "duplicate", twins.format("'are one image'", "labels = 1 AND splits = 1"), ()


def _image_queries(db: sqlite3.Connection, height_px: int, width_px: int) -> Iterator[_Query]:
    conditions: list[tuple[str, str, str, tuple[object, ...]]] = [
        *((kind, f"'{text}'", "constant & ?", (int(flaw),)) for kind, (flaw, text) in _FLAWS.items()),
        *((problem, _SIZE, "resize = ?", (kind,)) for problem, kind in _RESIZED.items()),
        ("upscaled", _SIZE, "(width < ? OR height < ?)", (width_px, height_px)),
    ]
    for kind, text, condition, values in conditions:
        if _all(db, f"SELECT 1 FROM sizes WHERE {condition} LIMIT 1", *values):  # noqa: S608 - our own words
            query = (
                f"SELECT (SELECT MIN(name) FROM named WHERE named.digest = images.digest), NULL, {text}"  # noqa: S608 - our own words
                f" FROM images JOIN sizes USING (width, height, constant) WHERE {condition}"
            )
            yield kind, query, values


def _names(db: sqlite3.Connection, name: str, digest: bytes | None) -> tuple[str, ...]:
    if digest is None:
        return (name,)
    query = "SELECT name FROM named WHERE digest = ? ORDER BY name LIMIT ?"
    return tuple(row[0] for row in _all(db, query, digest, _MAX_NAMES))


def _all(db: sqlite3.Connection, query: str, *values: object) -> list[tuple[Any, ...]]:
    with sqlite_errors():
        return db.execute(query, values).fetchall()


PROBLEMS = {
    "undecodable": (
        "file cannot be decoded and was left out",
        "files cannot be decoded and were left out",
        "; fix or remove",
    ),
    "cropped": (
        "image has another aspect ratio and was cropped to its center",
        "images have another aspect ratio and were cropped to their centers",
        "",
    ),
    "letterboxed": (
        "image has another aspect ratio and was padded with gray bars",
        "images have another aspect ratio and were padded with gray bars",
        "",
    ),
    "stretched": (
        "image has another aspect ratio and was stretched",
        "images have another aspect ratio and were stretched",
        "",
    ),
    "upscaled": (
        "image is smaller than the dataset's size and was enlarged",
        "images are smaller than the dataset's size and were enlarged",
        "",
    ),
    "duplicate": (
        "image occurs more than once and was used once",
        "images occur more than once and were used once",
        "",
    ),
    "duplicate_across_splits": (
        "image is in several splits and was added to one of them",
        "images are in several splits, and each was added to one of them",
        "; keep one of",
    ),
    "conflicting_labels": (
        "image has several labels and was left out",
        "images have several labels and were left out",
        "; keep the right one of",
    ),
    "hidden_folder": (
        "class folder has a name that begins with a dot, and was left out",
        "class folders have names that begin with a dot, and were left out",
        "; rename or remove",
    ),
    "constant_image": (
        "image has one value in all its pixels",
        "images have one value in all their pixels",
        "; look at",
    ),
    "no_class": (
        "image is in no class folder and was left out",
        "images are in no class folder and were left out",
        "; move",
    ),
    "not_an_image": (
        "file is not an image of a class and was left out",
        "files are not images of a class and were left out",
        ":",
    ),
    "litter": (
        "file or folder is hidden, left behind by a program or written by evernear, and was left out",
        "files or folders are hidden, left behind by a program or written by evernear, and were left out",
        ":",
    ),
    "nested_folder": (
        "class folder contains folders, whose names are not used",
        "class folders contain folders, whose names are not used",
        ":",
    ),
    "outside_link": (
        "link leads out of the source, to a folder whose images are used",
        "links lead out of the source, to folders whose images are used",
        ":",
    ),
    "merged_folders": (
        "class has several folders or spellings, because their names look the same",
        "classes have several folders or spellings each, because their names look the same",
        ":",
    ),
    "no_label": (
        "image has no label and was left out",
        "images have no label and were left out",
        "; complete",
    ),
    "duplicate_row": ("row of the table repeats another", "rows of the table repeat others", ":"),
    "split_group": (
        "group (data.group) has images in several splits, which the source or an earlier ingest chose",
        "groups (data.group) have images in several splits, which the source or an earlier ingest chose",
        ":",
    ),
    "few_groups": (
        "class has fewer than three groups (data.group), so it is missing in train, test or gallery",
        "classes have fewer than three groups (data.group), so they are missing in train, test or gallery",
        "; add other scenes of",
    ),
    "ungrouped": (
        "image has a name in which data.group finds no group, and counts as a group of one",
        "images have names in which data.group finds no group, and count as groups of one",
        ":",
    ),
    "low_contrast": (
        "image lost its contrast when it was reduced to 8 bits (data.bit_depth)",
        "images lost their contrast when they were reduced to 8 bits (data.bit_depth)",
        "; look at",
    ),
    "clipped": (
        "image has 16-bit values beyond the dataset's range (data.bit_depth) and was clipped",
        "images have 16-bit values beyond the dataset's range (data.bit_depth) and were clipped",
        "; look at",
    ),
}
"""The text for a single file, the text for several files, and the words before the names of the
files. If the last words are empty, the message mentions one affected file as an example."""

ADVICE = {
    "nested_folder": " If the innermost folders are the classes, add --set data.layout=innermost; if the labels are"
    " right, add {off}.",
}
"""Advice that follows the sentence. ``{off}`` is the option that disables the rule."""
