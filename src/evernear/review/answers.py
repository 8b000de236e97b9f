"""Users' answers: an audit log in the store, and labeled images in the source.

In the store:

- ``review/answers.jsonl`` has one `Answer` per line, oldest first. Lines are never rewritten.
- ``review/pending/<image>`` names an answer that may not be in the source yet.

In the source:

- ``<class>/review-<first 16 of sha256>.png`` is the image, as .jpg, .webp or .heic if its file has
  that format. With split folders, the class folder is below ``train/``.

Only the last answer about an image is effective. Each is appended with a compare-and-swap: if two
people answer at the same time, the second answer is rejected. Changes to the source are idempotent.
`Answers.recover` completes those that a killed process began. An answer that the source rejects is
undone, and later ones are still processed.
"""

import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Literal

from pydantic import AwareDatetime, Field

from evernear.common.frozen import Document
from evernear.common.store import Store
from evernear.common.text import class_name, lookalike_key
from evernear.data.books import opened_books
from evernear.data.image_file import suffix_of
from evernear.data.manifest import Manifest, find_manifest
from evernear.data.sources.layout import Layout
from evernear.data.sources.names import answer_in, reviewed_stem
from evernear.errors import ConflictError, DataError, EvernearError, IntegrityError, SettingsError, StoreError
from evernear.release.manifest import ReleaseManifest
from evernear.review.label_target import LabelTarget, require_folder_name
from evernear.review.renames import Rename, load_renames, renamed_file

ANSWERS = "review/answers.jsonl"
PENDING = "review/pending/"
REMOVED = ".removed"
"""The folder of the source to which removed files move. Ingest skips hidden folders."""
_MOVING = ("label", "remove")
_ATTEMPTS = 5
_SIMILARITY = 0.65
"""Smallest `difflib` ratio of two names that may be one name, mistyped. A wrong letter among three
has the ratio 0.67."""
_MAX_MEANT = 3


class Answer(Document):
    """A user's decision about an image. ``label`` is set only for the ``label`` action. ``files``
    are the names of the image's files in the source before the answer, none for a live query. The
    ``keep`` action confirms the label of an image in the source, and ``remove`` moves its files to
    the folder `REMOVED`, which no run reads."""

    image: str = Field(pattern=r"^[0-9a-f]{64}$")
    action: Literal["label", "skip", "keep", "remove", "undo"]
    label: str = ""
    files: tuple[str, ...] = ()
    new_folder: bool = False
    """Whether the answer created the folder for its class."""
    suffix: Literal[".png", ".jpg", ".webp", ".heic"] = ".png"
    who: str
    at: AwareDatetime


class Answers:
    """Records answers and applies them to the source. ``set_aside`` has the error message of each
    image whose change an earlier process left incomplete and `recover` could not complete."""

    def __init__(self, store: Store, target: LabelTarget) -> None:
        self._store = store
        self.target = target
        self.set_aside: dict[str, str] = {}
        self._parsed: tuple[tuple[str, str | None], list[Answer]] = (("", None), [])

    def latest(self) -> dict[str, Answer]:
        """The effective answer for each image, oldest first, without undone ones."""
        return _fold(self._read()[0])

    def label(self, image: bytes, answer: Answer) -> None:
        """Record ``answer``. For the action ``label``, add ``image`` to the source or, if the
        answer has ``files``, move them to the folder of the class.

        Raises:
            SettingsError: the label is not usable as a folder name.
            ConflictError: the image already has an answer.
            DataError: the source rejects the label, or a file to be moved no longer exists. The
                answer is undone.
        """
        self.recover()
        if answer.action not in _MOVING:
            self._append(answer, expects_answer=False)
            return
        if not answer.files:
            answer = answer.model_copy(update={"suffix": suffix_of(image)})
        names = dict(_moves(answer, self.target.layout))
        try:
            new_folder = not all(map(self.target.has_folder, names.values()))
        except StoreError as error:
            raise _refused(answer, error) from error
        answer = answer.model_copy(update={"new_folder": new_folder})
        self._store.put(PENDING + answer.image, b"" if answer.files else image)
        self._append(answer, expects_answer=False)
        self._settle(answer.image)

    def undo(self, undo: Answer) -> None:
        """Record ``undo``, and restore the source. The image returns to the queue.

        Raises:
            ConflictError: the image has no answer.
            DataError: the source cannot be restored.
        """
        self.recover()
        self._store.put(PENDING + undo.image, b"")
        self._append(undo, expects_answer=True)
        self._settle(undo.image)

    def recover(self) -> None:
        """Complete source changes that a killed process may have left incomplete. One that cannot
        be completed is undone and added to ``set_aside``."""
        for info in list(self._store.list(PENDING)):
            image = info.key.removeprefix(PENDING)
            self.set_aside.pop(image, None)
            try:
                self._settle(image)
            except DataError as error:
                self.set_aside[image] = str(error)

    def _settle(self, image: str) -> None:
        """Make the source agree with the last answer about ``image``. A repeated call has no
        effect.

        Raises:
            DataError: the answer was undone because the source rejects it, or the source cannot
                be restored. A later attempt restores it, unless a different image has the name of a
                file to be restored.
        """
        history = [answer for answer in self._read()[0] if answer.image == image]
        labeled = [answer for answer in history if answer.action in _MOVING]
        refusal: EvernearError | None = None
        if labeled and labeled[-1] is history[-1]:
            content = self._store.get(PENDING + image)
            if content or labeled[-1].files:  # if both are missing, the entry is an unrecorded undo
                refusal = self._refusal(labeled[-1], content)
        if refusal:
            history.append(labeled[-1].model_copy(update={"action": "undo", "label": ""}))
            self._append(history[-1], expects_answer=True)
        if labeled and history[-1].action == "undo":
            self._revert(labeled)
        self._store.delete(PENDING + image)
        if refusal:
            raise _refused(labeled[-1], refusal) from refusal

    def _refusal(self, answer: Answer, image: bytes) -> EvernearError | None:
        try:
            for old, new in _moves(answer, self.target.layout):
                if answer.files:
                    self._move(old, new, prune=False)
                else:
                    self.target.add(new, image)
        except EvernearError as error:
            return error
        return None

    def _revert(self, labeled: list[Answer]) -> None:
        """Undo the ``labeled`` answers about one image, newest first.

        Raises:
            DataError: a file cannot be restored. If a different image has its name, a user must
                decide what to do, so the pending record is removed. Otherwise, it remains.
        """
        folders = {each.label for each in self._read()[0] if each.new_folder} | {""}
        failure: EvernearError | None = None
        for answer in reversed(labeled):
            try:
                for old, new in _moves(answer, self.target.layout):
                    self._restore(answer, old, new, prune=answer.label in folders)
            except EvernearError as error:
                failure = failure or error
        if isinstance(failure, DataError | SettingsError):
            self._store.delete(PENDING + labeled[-1].image)
        if failure:
            raise DataError(
                f"The answer about {_subject(labeled[-1])} is undone, but its files are not where they were: {failure}"
            ) from failure

    def _restore(self, answer: Answer, old: str, new: str, prune: bool) -> None:
        if answer.files and self.target.read(new) is not None:
            self._move(new, old, prune)
        elif prune or not answer.files:
            self.target.remove(new, prune)

    def _move(self, old: str, new: str, prune: bool) -> None:
        """A repeated move has no effect."""
        image, present = self.target.read(old), self.target.read(new)
        if image is None and present is None:
            raise DataError(f"{old} is no longer in the source; pages show it until the next run.")
        if image is None:
            return
        if present not in (None, image):
            raise DataError(f"{old} cannot be moved to {new}, because another image has that name.")
        if present is None:
            self.target.add(new, image)
        self.target.remove(old, prune)

    def _read(self) -> tuple[list[Answer], bytes, str | None]:
        stored = self._store.find(ANSWERS)
        if stored is None:
            return [], b"", None
        data, etag = stored
        renames, version = load_renames(self._store)
        if self._parsed[0] != (etag, version):
            answers = [_with_new_names(answer, renames) for answer in _parse(data, self._store)]
            self._parsed = ((etag, version), answers)
        return self._parsed[1], data, etag

    def _follows(self, before: Answer, answer: Answer) -> bool:
        """Whether ``answer`` is about the files where the answer ``before`` left them, as a later
        ingest found them."""
        left = named_files(before, self.target.layout) if before.action in _MOVING else before.files
        return bool(answer.files) and set(left) == {*answer.files}

    def _append(self, answer: Answer, expects_answer: bool) -> None:
        for attempt in range(_ATTEMPTS):
            answers, data, etag = self._read()
            before = _fold(answers).get(answer.image)
            if (before is not None) != expects_answer and not (before and self._follows(before, answer)):
                state = "has no answer to undo" if expects_answer else "was answered in the meantime"
                raise ConflictError(f"The image {state}; reload the page.")
            try:
                self._store.put_if(ANSWERS, data + _line(answer), etag)
                return
            except ConflictError:
                if attempt == _ATTEMPTS - 1:
                    raise


def labels_given(store: Store) -> dict[str, frozenset[str]]:
    """All labels that people gave to each image, including those that were undone."""
    labels: dict[str, frozenset[str]] = {}
    stored = store.find(ANSWERS)
    for answer in _parse(stored[0], store) if stored else ():
        if answer.label:
            labels[answer.image] = labels.get(answer.image, frozenset()) | {answer.label}
    return labels


def corrected_images(store: Store) -> set[bytes]:
    """The digests of the images of the source whose last answer is another label."""
    stored = store.find(ANSWERS)
    latest = _fold(_parse(stored[0], store)) if stored else {}
    return {bytes.fromhex(image) for image, answer in latest.items() if answer.action == "label" and answer.files}


def _parse(data: bytes, store: Store) -> list[Answer]:
    try:
        return [Answer.from_json(line, f"{store.uri}/{ANSWERS}") for line in data.splitlines()]
    except IntegrityError:
        raise IntegrityError(f"{store.uri}/{ANSWERS} is not a valid audit log of answers.") from None


def _with_new_names(answer: Answer, renames: Sequence[Rename]) -> Answer:
    """``answer`` with the names that its class and its files have since classes were renamed.
    Removed files did not move."""
    for rename in renames if answer.action != "remove" else ():
        if answer.at < rename.at:
            label = rename.new if class_name(answer.label) == rename.old else answer.label
            files = tuple(renamed_file(file, rename) for file in answer.files)
            answer = answer.model_copy(update={"label": label, "files": files})
    return answer


def _line(answer: Answer) -> bytes:
    return answer.model_dump_json().encode() + b"\n"


def _fold(answers: list[Answer]) -> dict[str, Answer]:
    latest: dict[str, Answer] = {}
    for answer in answers:
        latest.pop(answer.image, None)
        if answer.action != "undo":
            latest[answer.image] = answer
    return latest


def named_files(answer: Answer, layout: Layout) -> list[str]:
    return [new for _, new in _moves(answer, layout)]


def _moves(answer: Answer, layout: Layout) -> Iterator[tuple[str, str]]:
    """The current and the new name of each file that an answer with a label affects."""
    if answer.action == "remove":
        yield from ((file, f"{REMOVED}/{_inside(file)}") for file in answer.files)
        return
    label = answer.label
    require_folder_name(label)
    mark = reviewed_stem(answer.image)
    if not answer.files:
        yield "", f"{layout.class_folder(label)}/{mark}{answer.suffix}"
    for number, file in enumerate(answer.files):
        path, suffix = _inside(file), f"-{mark}{f'-{number}' if number else ''}"
        folder = layout.class_folder(label, file)
        yield file, f"{folder}/{path.stem.removesuffix(suffix)}{suffix}{path.suffix}"


def _inside(file: str) -> PurePosixPath:
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts:
        raise SettingsError(f"{file!r} is not the name of a file in the source.")
    return path


def _refused(answer: Answer, reason: EvernearError) -> DataError:
    return DataError(f"The answer about {_subject(answer)} cannot be carried out and is undone: {reason}")


def _subject(answer: Answer) -> str:
    return answer.files[0] if answer.files else f"query {answer.image[:8]}"


# Files that are in their class because of an answer in review, and contain an image.
_ANSWERED_FILES = """
SELECT name, label FROM files WHERE digest IS NOT NULL AND contains(name, 'review-') AND NOT waiting
"""


class ReleasedAnswers:
    """Looks answers up in the snapshot from which a release was built. For each release, the table
    of its files, about 100 bytes per file, is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._read: tuple[Manifest | None, Mapping[str, str]] = (None, {})

    def missing(self, answers: Iterable[Answer], layout: Layout, release: ReleaseManifest) -> list[Answer]:
        """The answers whose images are not in ``release`` under the label that they give. If the
        store no longer has the release's snapshot, answers that are younger than the release count
        as missing."""
        labeled = [answer for answer in answers if answer.action == "label"]
        manifest = find_manifest(self._store, release.dataset_name, release.dataset_digest) if labeled else None
        if manifest is None:
            return [answer for answer in labeled if answer.at > release.created]
        with self._lock:
            known = self._labels(manifest)
        return [
            answer
            for answer in labeled
            if any(known.get(name) != class_name(answer.label) for name in named_files(answer, layout))
        ]

    def _labels(self, manifest: Manifest) -> Mapping[str, str]:
        if self._read[0] != manifest:
            with opened_books(self._store, manifest, ("files",)) as books:
                rows = books.rows(_ANSWERED_FILES)
            self._read = (manifest, {name: label for name, label in rows if answer_in(name)})
        return self._read[1]


def images_by_class(answers: Iterable[Answer]) -> Counter[str]:
    return Counter(class_name(answer.label) for answer in answers if answer.action == "label")


def waiting_classes(answers: Iterable[Answer], used: Collection[str], minimum: int) -> dict[str, int]:
    """The number of images of each class that a run leaves out, because ``answers`` give it fewer
    than ``minimum`` images and it is not in ``used``: neither the source itself nor the live
    release has it."""
    images = images_by_class(answers).items()
    return {label: count for label, count in sorted(images) if label not in used and count < minimum}


def meant_classes(name: str, classes: Iterable[str]) -> list[str]:
    """The ``classes`` whose names a user may have meant by the new ``name``, most similar first.
    Names whose numbers differ, such as ``cup 1`` and ``cup 2``, count as intended."""
    keys = {_key(each): each for each in classes if _numbers(each) == _numbers(name)}
    return [keys[key] for key in get_close_matches(_key(name), keys, _MAX_MEANT, _SIMILARITY)]


def _key(name: str) -> str:
    return re.sub(r"[\s_.-]+", " ", lookalike_key(name))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
