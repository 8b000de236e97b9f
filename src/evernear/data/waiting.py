"""Classes from review that wait for more images.

A user who names an image may mistype the class, or name the first image of a new class. Such a
class would stop every run, because it has too few images. If all images of a class come from
review, ingest therefore leaves the class out until it has enough of them. A class of the live
release does not wait, because it would be missing from the next release. A class with images of the
source itself does not wait either: if it is too small, validation reports it.

The names of files show which images come from review (`evernear.data.sources.names.answer_in`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from evernear.data.manifest import SmallClasses
from evernear.data.sources.base import FileEntry
from evernear.data.sources.names import answer_in

NO_IMAGES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class ClassMinimum:
    """The number of images from which on a class from review is used. Classes in ``live`` are used
    in any case."""

    images: int = 1
    live: Collection[str] = ()


class Admission:
    """Leaves out the files of the classes that wait. The other attributes and methods are final
    once `admitted` is exhausted."""

    def __init__(self, minimum: ClassMinimum) -> None:
        self._minimum, self._live = minimum.images, frozenset(minimum.live)
        self._held: dict[str, dict[str, list[FileEntry]]] = {}
        """The files of each class that waits, keyed by the answer in their names."""
        self._from_review: set[str] = set()
        """Other classes all of whose images come from review."""

    def admitted(self, entries: Iterable[FileEntry]) -> Iterator[FileEntry]:
        """Yield the files of the classes that do not wait. The first files of a class from review
        are yielded once it has enough images. Memory use grows only with the number of classes."""
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
        """The classes that wait, and the classes from review with too few of the dataset's
        images."""
        counts = {label: count for label, count in images_by_class.items() if label in self._from_review}
        used = {label: count for label, count in counts.items() if count < self._minimum}
        waiting = {label: len(held) for label, held in sorted(self._held.items())}
        return SmallClasses(minimum=self._minimum if waiting or used else 0, waiting=waiting, used=used)
