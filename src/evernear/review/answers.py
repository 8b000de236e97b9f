"""Answers of people: an audit log in the store, and labeled images in the source.

::

    review/answers.jsonl                      in the store: one `Answer` per line, oldest first, never rewritten
    <class>/review-<first 16 of sha256>.png   in the source (``train/<class>/...`` if the source has split folders)

The last answer about an image counts. Appending is a compare-and-swap, so of two people who answer at once the second
is refused.
"""

from pathlib import Path
from typing import Literal, Protocol

from pydantic import AwareDatetime, Field

from evernear.data.sources import open_source
from evernear.data.sources.folder import Bucket, Folder
from evernear.disk import disk_errors, write_atomically
from evernear.errors import ConflictError, EvernearError, IntegrityError, SettingsError
from evernear.frozen import Frozen
from evernear.store import Store, open_store

ANSWERS = "review/answers.jsonl"
_ATTEMPTS = 5
_SPLITS = frozenset({"train", "test", "gallery", "query", "val", "valid", "validation", "dev"})


class Answer(Frozen):
    """What a person decided about an image. ``label`` is set for the action ``label`` only."""

    image: str = Field(pattern=r"^[0-9a-f]{64}$")
    action: Literal["label", "skip", "undo"]
    label: str = ""
    who: str
    at: AwareDatetime


class LabelTarget(Protocol):
    """The source to which labeled images are written."""

    labels: list[str]

    def add(self, name: str, image: bytes) -> None:
        """Write an image under ``<class>/<file>``."""
        ...

    def remove(self, name: str) -> None:
        """Remove an image that `add` wrote; a missing one is no error."""
        ...


class FolderTarget:
    """A directory of class folders."""

    def __init__(self, directory: Path) -> None:
        self.labels, prefix = _layout(Folder(directory))
        self._directory = directory / prefix

    def add(self, name: str, image: bytes) -> None:
        """Write the file atomically."""
        path = self._directory / name
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, image)

    def remove(self, name: str) -> None:
        """Remove the file, and its class folder if it is empty now."""
        path = self._directory / name
        with disk_errors(path):
            path.unlink(missing_ok=True)
            if path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()


class BucketTarget:
    """A prefix of a bucket."""

    def __init__(self, uri: str) -> None:
        self.labels, self._prefix = _layout(Bucket(uri))
        self._store = open_store(uri)

    def add(self, name: str, image: bytes) -> None:
        """Put the object."""
        self._store.put(self._prefix + name, image)

    def remove(self, name: str) -> None:
        """Delete the object."""
        self._store.delete(self._prefix + name)


def open_target(source: str) -> LabelTarget:
    """Open ``data.source`` for writing. Lists it once, for its classes.

    Raises:
        SettingsError: the source is not a folder or a bucket.
        DataError: the directory is missing.
    """
    match source.partition(":"):
        case "folder", _, directory if directory:
            return FolderTarget(Path(directory))
        case "s3", _, _:
            return BucketTarget(source)
        case _:
            open_source(source)
            raise SettingsError(
                f"Labels cannot be written to {source!r}; review needs folder:DIRECTORY or s3://bucket."
            )


class Answers:
    """Records answers, and changes the source accordingly."""

    def __init__(self, store: Store, target: LabelTarget) -> None:
        self._store = store
        self._target = target

    def latest(self) -> dict[str, Answer]:
        """The answer that counts for each image; undone ones are absent. Oldest first.

        Raises:
            IntegrityError: the audit log is damaged.
        """
        return _fold(self._read()[0])

    def label(self, image: bytes, answer: Answer) -> None:
        """Record ``answer``, and for a label write the image to the source.

        Raises:
            SettingsError: the label is not a usable folder name.
            ConflictError: the image is answered already.
        """
        name = _file_name(answer) if answer.action == "label" else ""
        self._append(answer, expects_answer=False)
        if name:
            try:
                self._target.add(name, image)
            except EvernearError:
                self._append(answer.model_copy(update={"action": "undo", "label": ""}), expects_answer=True)
                raise
            if answer.label not in self._target.labels:
                self._target.labels = sorted([*self._target.labels, answer.label])

    def undo(self, undo: Answer) -> None:
        """Remove the image from the source and record the ``undo``: the image is in the queue again.

        Raises:
            ConflictError: the image has no answer.
        """
        answer = self.latest().get(undo.image)
        if answer and answer.action == "label":
            self._target.remove(_file_name(answer))
        self._append(undo, expects_answer=True)

    def _read(self) -> tuple[list[Answer], bytes, str | None]:
        found = self._store.find(ANSWERS)
        if found is None:
            return [], b"", None
        data, etag = found
        try:
            return [Answer.model_validate_json(line) for line in data.splitlines()], data, etag
        except ValueError:
            raise IntegrityError(f"{self._store.uri}/{ANSWERS} is not a valid audit log of answers.") from None

    def _append(self, answer: Answer, expects_answer: bool) -> None:
        for attempt in range(_ATTEMPTS):
            answers, data, etag = self._read()
            if (answer.image in _fold(answers)) != expects_answer:
                state = "has no answer to undo" if expects_answer else "was answered meanwhile"
                raise ConflictError(f"The image {state}; reload the page.")
            try:
                self._store.put_if(ANSWERS, data + answer.model_dump_json().encode() + b"\n", etag)
                return
            except ConflictError:
                if attempt == _ATTEMPTS - 1:
                    raise


def _fold(answers: list[Answer]) -> dict[str, Answer]:
    latest: dict[str, Answer] = {}
    for answer in answers:
        latest.pop(answer.image, None)
        if answer.action != "undo":
            latest[answer.image] = answer
    return latest


def _file_name(answer: Answer) -> str:
    label = answer.label
    unusable = not label or len(label.encode()) > 200 or label != label.strip() or label.startswith(".")
    if unusable or not label.isprintable() or "/" in label or "\\" in label or label.lower() in _SPLITS:
        raise SettingsError(f"{label!r} cannot be the name of a class; use a plain name without slashes.")
    return f"{label}/review-{answer.image[:16]}.png"


def _layout(source: Folder | Bucket) -> tuple[list[str], str]:
    """The classes of a source, and the prefix of training images: ``train/`` if it has split folders."""
    labels: set[str] = set()
    split_folders = False
    for entry in source.entries():
        labels.add(entry.label)
        split_folders = split_folders or (entry.name.count("/") > 1 and not entry.name.startswith(f"{entry.label}/"))
    return sorted(labels), "train/" if split_folders else ""
