"""The first stage of an ingest: list a source into the view ``listed``.

A user who names an image in review may mistype the class, or name the first image of a new class.
Such a class would stop every run, because it has too few images. If all images of a class come from
review, it therefore *waits*: ingest leaves it out until it has enough of them. A class of the live
release does not wait, because it would be missing from the next one, and neither does a class with
images of the source itself: if it is too small, validation reports it. The names of files show
which images come from review (`evernear.data.sources.names.answer_in`).
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

import pyarrow as pa

from evernear.common.output import named, quantity
from evernear.common.text import class_name
from evernear.data.books import source_uri
from evernear.data.database import ArrowTable, Database, batched
from evernear.data.groups import DOMINANT_SHARE, LARGE_GROUPS, LargeGroup, grouping
from evernear.data.manifest import Manifest, SmallClasses
from evernear.data.sources import ArraySource, FileSource, name_of
from evernear.data.sources.base import FileEntry, NameSample
from evernear.data.sources.names import answer_in
from evernear.data.sources.packed import PackedFiles
from evernear.errors import DataError, SettingsError
from evernear.settings import DataSettings
from evernear.settings.data import COLUMN

NO_IMAGES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class ClassMinimum:
    """The number of images from which on a class from review is used, unless it is live."""

    images: int = 1
    live: Collection[str] = ()


class Admission:
    """Leaves out files of classes that wait. Its results are final after `admitted`."""

    def __init__(self, minimum: ClassMinimum) -> None:
        self._minimum, self._live = minimum.images, frozenset(minimum.live)
        self._held: dict[str, dict[str, list[FileEntry]]] = {}
        """The files of each class that waits, keyed by the answer in their names."""
        self._from_review: set[str] = set()
        """Other classes all of whose images come from review."""

    def admitted(self, entries: Iterable[FileEntry]) -> Iterator[FileEntry]:
        """The first files of a class from review follow once it has enough images."""
        decided = set[str]()
        for entry in entries:
            answer, label = answer_in(entry.name), entry.label
            if not answer:
                self._from_review.discard(label)
            if label in decided:
                yield entry
                continue
            held = self._held.setdefault(label, {})
            held.setdefault(answer, []).append(entry)
            if not answer or len(held) >= self._minimum or label in self._live:
                decided.add(label)
                if answer:
                    self._from_review.add(label)
                yield from chain.from_iterable(self._held.pop(label).values())

    @property
    def left_out(self) -> list[str]:
        return [entry.name for held in self._held.values() for files in held.values() for entry in files]

    def small_classes(self, images_by_class: Mapping[str, int] = NO_IMAGES) -> SmallClasses:
        """Classes that wait, and used classes from review with too few images."""
        counts = {label: count for label, count in images_by_class.items() if label in self._from_review}
        used = {label: count for label, count in counts.items() if count < self._minimum}
        waiting = {label: len(held) for label, held in sorted(self._held.items())}
        return SmallClasses(minimum=self._minimum if waiting or used else 0, waiting=waiting, used=used)


ANY_NUMBER = ClassMinimum()


def dataset_name(settings: DataSettings, source: ArraySource | FileSource, moved_from: str = "") -> str:
    name = settings.dataset or (name_of(moved_from) if moved_from else source.name)
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", name):
        raise SettingsError(
            f"data.dataset={name!r} is not valid: use at most 63 lower-case letters, digits, '.', '_' and '-', and"
            " begin with a letter or a digit."
        )
    return name


_PAGE_NAMES = 20_000
_LISTING = pa.schema({
    "name": pa.string(), "etag": pa.string(), "label": pa.string(), "given_split": pa.string(),
    "size_bytes": pa.int64(), "given_group": pa.string(), "modified_us": pa.int64(), "group": pa.string(),
    "number": pa.int64(),
})  # fmt: skip
# The position of a file in the order of decoding. Held-out splits come first, so that an image that
# is also in train is held out. Within a split: by the hash of the name, or in the order of an
# export, or (in_order()) by the name.
_LISTED = r"""
CREATE VIEW listed AS
SELECT name, etag, label, given_split, size_bytes, given_group, "group",
  CASE WHEN modified_us <> 0 THEN make_timestamp(modified_us) END AS modified
FROM listing;
CREATE MACRO turn(given_split, name) AS
(CASE given_split WHEN 'test' THEN 0 WHEN 'query' THEN 1 WHEN 'gallery' THEN 2 ELSE 3 END::BIGINT << 56) + CASE
  WHEN in_order() THEN 0
  WHEN regexp_matches(name, '(^|/)[0-9]{9,16}-[0-9a-f]{64}\.[^./]+$')
    THEN regexp_extract(name, '(^|/)([0-9]{9,16})-[0-9a-f]{64}\.[^./]+$', 2)::BIGINT
  ELSE ('0x' || left(sha256(name), 14))::BIGINT
END
"""
_LISTED_TWICE = """
CREATE TABLE listed_once AS
SELECT * FROM listing QUALIFY row_number() OVER (PARTITION BY name ORDER BY number DESC) = 1;
CREATE OR REPLACE VIEW listing AS SELECT * FROM listed_once;
"""


@dataclass
class Listing:
    """What a listing tells besides its files."""

    admission: Admission
    names_groups: bool = False
    """Whether the source itself names groups."""
    notes: Mapping[str, NameSample] = field(default_factory=dict[str, NameSample])


def list_source(
    source: ArraySource | FileSource, db: Database, uri: str, group: str, minimum: ClassMinimum = ANY_NUMBER
) -> Listing:
    """Make the view ``listed`` of the files of a source, without those of classes that wait.
    ``group`` is ``data.group``."""
    listing = Listing(Admission(minimum))
    is_files = isinstance(source, FileSource)
    entries = listing.admission.admitted(source.entries()) if is_files else source.entries()
    with db.written("listing", _LISTING) as write:
        _write(entries, write, listing, group)
    if is_files:
        listing.notes = source.notes
    count, names = db.row("SELECT count(*), count(DISTINCT name) FROM listing")
    if not count:
        left_out = _left_out(source) if is_files else ""
        found = (
            "contains no image in a class folder; put PNG, JPEG, WebP or HEIC files under <class>/ or <split>/<class>/"
            if _has_class_folders(uri)
            else "names no image with a label; give each image a row with its path and its label"
        )
        raise DataError(f"{uri} {found}.{left_out}{_waiting(listing.admission)}")
    if count > names:
        db.run(_LISTED_TWICE)
    db.run(f"CREATE MACRO in_order() AS {isinstance(source, PackedFiles)}")
    db.run(_LISTED)
    return listing


def _write(entries: Iterable[FileEntry], write: Callable[[ArrowTable], None], listing: Listing, group: str) -> None:
    group_of, number = _group_of(group), 0
    for page in batched(entries, _PAGE_NAMES):  # a page at a time, because a source may read from the tables
        columns = [list(column) for column in zip(*page, strict=True)]
        given = columns[5]
        listing.names_groups = listing.names_groups or any(given)
        columns[5] = [name or None for name in given] if listing.names_groups else [None] * len(page)
        columns.append([group_of(entry) or None for entry in page] if group else [None] * len(page))
        columns.append([*range(number, number := number + len(page))])
        write(pa.table(columns, _LISTING))


def _group_of(setting: str) -> Callable[[FileEntry], str]:
    if setting == COLUMN:
        return lambda entry: class_name(entry.group)
    group = grouping(setting)
    return lambda entry: group(entry.name, entry.label)


_LABELS = """
SELECT DISTINCT label FROM listed UNION SELECT label FROM old_files WHERE source <> $source AND NOT waiting
"""


def labels_of(db: Database, known: Sequence[str], uri: str, source: str, admission: Admission) -> list[str]:
    """The labels of the earlier images, then new ones in natural order."""
    listed = {label for (label,) in db.rows(_LABELS, source=source)}
    if len(listed) < 2:
        only = min(listed)
        remedy = f" If {only!r} contains the class folders, use it as the source." if _has_class_folders(uri) else ""
        raise DataError(
            f"{uri} contains images of only one class ({only!r}); a recognizer needs at least two.{remedy}"
            f"{_waiting(admission)}"
        )
    return [*known, *sorted(listed.difference(known), key=_natural_order)]


def require_one_source(others: Sequence[str], name: str, source: str) -> None:
    """Reject a source that would join another's dataset only because of its name."""
    if others:
        raise DataError(
            f"The dataset {name!r} was made from {others[0]}, and {source} would be added to it. If the images have"
            f" moved, add --moved-from {shlex.quote(others[0])}. If they belong together, set data.dataset={name}."
            " Otherwise start over with another --workdir or store."
        )


def require_moved(parent: Manifest | None, name: str, source: str, moved_from: str) -> None:
    """Reject a ``moved_from`` that the dataset does not know, because its images would get new
    splits. The ``source`` is known if the move is repeated."""
    known = {*parent.decoders} if parent else set[str]()
    is_repaired = parent is not None and not known  # `store check --repair` forgets the sources
    if not moved_from or is_repaired or known & {source_uri(source), source_uri(moved_from)}:
        return
    made = (
        f"The dataset {name!r} was made from {named(sorted(known))}" if known else f"The store has no dataset {name!r}"
    )
    raise SettingsError(
        f"{made}, so no image has moved from {moved_from}. Correct --moved-from (or data.dataset, the name of the"
        " dataset), or leave it out to draw new splits."
    )


_DIVIDED_CLASS = """
SELECT count(*) FROM (
  SELECT label FROM listed GROUP BY label HAVING count(DISTINCT "group") + count(*) FILTER ("group" IS NULL) > 1
)
"""
_LISTED_GROUPS = """
CREATE TABLE group_labels AS
SELECT coalesce("group", '') AS name, label, count(*) AS images FROM listed GROUP BY 1, 2
"""


def require_groups(source: ArraySource | FileSource, settings: DataSettings, db: Database, is_new: bool) -> None:
    """Require that ``data.group`` finds groups, and leaves images to test."""
    if not settings.group:
        return
    first, name = db.row('SELECT min("group"), min(name) FROM listed')
    if not first:
        if settings.group == COLUMN:
            raise DataError(
                f"data.group={COLUMN}, but {settings.source} names the group of no image, such as {name}; name it in"
                " the column group of a table or a Hugging Face dataset, or in the field group of a WebDataset's .json,"
                " or leave data.group out."
            )
        raise DataError(
            f"data.group={settings.group} finds a group in none of the names of {settings.source}, such as"
            f" {name}; correct it, or leave it out."
        )
    # A file without a group counts as one.
    if "test" in source.chosen_splits and not db.value(_DIVIDED_CLASS):
        raise DataError(
            f"data.group={settings.group} makes one group of all images of a class, such as {first}, and a group is"
            " in one split, so no image would be left to test;"
            f" {'name' if settings.group == COLUMN else 'set a pattern that distinguishes'} scenes, or leave it out."
        )
    db.run(_LISTED_GROUPS)
    large = next((LargeGroup._make(row) for row in db.rows(LARGE_GROUPS)), None) if is_new else None
    db.run("DROP TABLE group_labels")
    if large and large.images >= DOMINANT_SHARE * large.total:
        name = db.value('SELECT min(name) FROM listed WHERE "group" = $group', group=large.name)
        remedy = (
            "leave the group empty there"
            if settings.group == COLUMN
            else f"set a pattern that finds none in names such as {name}"
        )
        raise DataError(
            f"data.group={settings.group} makes one group of {large}, and a group is in one split. If this value means"
            f" that an image has no group, {remedy}; otherwise name smaller groups."
        )


def _has_class_folders(uri: str) -> bool:
    return uri.partition(":")[0] in ("folder", "s3")


def _left_out(source: FileSource) -> str:
    """A sentence about files that are not images of a class, or an empty string."""
    notes = [note for rule, note in source.notes.items() if rule in ("no_class", "no_label", "not_an_image", "litter")]
    count = sum(note.count for note in notes)
    if not count:
        return ""
    names = [name for note in notes for name in note.names]
    return f" {quantity(count, 'file was', 'files were')} left out: {named(names, count)}."


def _waiting(admission: Admission) -> str:
    return f" {sentence}." if (sentence := admission.small_classes().sentence()) else ""


def _natural_order(label: str) -> tuple[list[tuple[int, str]], str]:
    """Sort key that sorts 2 before 10. Labels that differ only in case also have a fixed order."""
    words = [word.lstrip("0") if i % 2 else word for i, word in enumerate(re.split(r"(\d+)", label.lower()))]
    return [(len(word) if i % 2 else 0, word) for i, word in enumerate(words)], label
