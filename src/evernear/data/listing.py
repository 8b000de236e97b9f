"""List a source, and record the source's files and labels in the dataset's ledger.

A user who names an image in review may mistype the class, or name the first image of a new class.
Such a class would stop every run, because it has too few images. If all images of a class come from
review, it therefore *waits*: ingest leaves it out until it has enough of them. A class of the live
release does not wait, because it would be missing from the next one, and neither does a class with
images of the source itself: if it is too small, validation reports it. The names of files show
which images come from review (`evernear.data.sources.names.answer_in`).
"""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from evernear.common.output import named, quantity
from evernear.data.groups import Grouping
from evernear.data.ledger import Ledger
from evernear.data.manifest import SmallClasses
from evernear.data.sources import ArraySource, FileSource, name_of
from evernear.data.sources.base import FileEntry
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
        raise SettingsError(f"data.dataset={name!r} is not valid: use lower-case letters, digits, '.', '_' and '-'.")
    return name


def list_source(
    source: ArraySource | FileSource,
    ledger: Ledger,
    uri: str,
    minimum: ClassMinimum = ANY_NUMBER,
    *,
    reread: bool = False,
) -> Admission:
    """Record the files and labels of a source, without classes that wait."""
    labels: set[str] = set()
    admission = Admission(minimum)
    if isinstance(source, FileSource):
        if isinstance(source, PackedFiles) and not reread:
            source.remembered = ledger.members
        ledger.list_files(admission.admitted(source.entries()), in_order=isinstance(source, PackedFiles))
        ledger.note_waiting(admission.left_out)
        ledger.forget_unlisted()
        ledger.record_notes(source.notes)
        if not ledger.count_listed():
            raise DataError(
                f"{uri} contains no image in a class folder; put PNG, JPEG, WebP or HEIC files under <class>/ or "
                f"<split>/<class>/.{_left_out(source)}{_waiting(admission)}"
            )
    else:
        labels.update(entry.label for entry in source.entries())
    labels.update(ledger.labels_listed())
    if len(labels) < 2:
        only = min(labels)
        raise DataError(
            f"{uri} contains images of only one class ({only!r}); a recognizer needs at least two. If {only!r} contains"
            f" the class folders, use it as the source.{_waiting(admission)}"
        )
    ledger.add_labels(sorted(labels.difference(ledger.labels()), key=_natural_order))
    return admission


def require_one_source(ledger: Ledger, name: str, source: str) -> None:
    """Reject a source that would join another's dataset only because of its name."""
    if others := ledger.other_sources():
        raise DataError(
            f"The dataset {name!r} was made from {others[0]}, and {source} would be added to it. If the images have"
            f" moved, add --moved-from {shlex.quote(others[0])}. If they belong together, set data.dataset={name}."
            " Otherwise start over with another --workdir or store."
        )


def require_groups(source: ArraySource | FileSource, settings: DataSettings, group: Grouping, ledger: Ledger) -> None:
    """Require that ``data.group`` finds groups, and leaves images to test."""
    if not settings.group:
        return
    groups = ledger.groups
    entries = ledger.in_order if isinstance(source, FileSource) else source.entries
    groups.list_files((group(entry.name, entry.label), entry.label) for entry in entries())
    if not (first := groups.first_listed()):
        raise DataError(
            f"data.group={settings.group} finds a group in none of the names of {settings.source}, such as"
            f" {next(entries()).name}; correct it, or leave it out."
        )
    if "test" in source.chosen_splits and not groups.is_class_divided():
        raise DataError(
            f"data.group={settings.group} makes one group of all images of a class, such as {first}, and a group is"
            " in one split, so no image would be left to test; set a pattern that distinguishes scenes, or leave it"
            " out."
        )
    large = groups.dominant_listed() if ledger.is_new else None
    if large:
        names = (entry.name for entry in entries() if group(entry.name, entry.label) == large.name)
        remedy = (
            "leave the group empty there"
            if settings.group == COLUMN
            else f"set a pattern that finds none in names such as {next(names)}"
        )
        raise DataError(
            f"data.group={settings.group} makes one group of {large}, and a group is in one split. If this value means"
            f" that an image has no group, {remedy}; otherwise name smaller groups."
        )


def _left_out(source: FileSource) -> str:
    """A sentence about files that are not images in a class folder, or an empty string."""
    notes = [note for rule, note in source.notes.items() if rule in ("no_class", "not_an_image", "litter")]
    count = sum(note.count for note in notes)
    if not count:
        return ""
    names = [name for note in notes for name in note.names]
    return f" {quantity(count, 'file was', 'files were')} left out: {named(names, count)}."


def _waiting(admission: Admission) -> str:
    return f" {sentence}." if (sentence := admission.small_classes().sentence()) else ""


def _natural_order(label: str) -> tuple[list[str | int], str]:
    """Sort key that sorts 2 before 10. Labels that differ only in case also have a fixed order."""
    words = re.split(r"(\d+)", label.lower())
    return [int(word) if i % 2 else word for i, word in enumerate(words)], label
