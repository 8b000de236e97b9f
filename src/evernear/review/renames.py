"""Classes that users renamed in the console.

``review/renames.json`` in the store has every renaming. A renaming is recorded before the files
move, so that a killed one continues, and the next run knows that the class of the live release has
a new name, as with ``--rename``. The files keep their names, so the images stay in their splits.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath

from pydantic import AwareDatetime

from evernear.common.frozen import Document, Frozen
from evernear.common.store import Store
from evernear.common.text import class_name
from evernear.errors import DataError
from evernear.review.label_target import LabelTarget, require_folder_name
from evernear.settings import ClassSettings

RENAMES = "review/renames.json"


class Rename(Frozen):
    old: str
    new: str
    who: str
    at: AwareDatetime
    is_complete: bool = False
    """Whether all files have moved."""


class Renames(Document):
    remedy = "delete it, and name renamed classes with --rename"

    renames: tuple[Rename, ...] = ()


def load_renames(store: Store) -> tuple[tuple[Rename, ...], str | None]:
    """All renamings, oldest first, and the etag of the document."""
    stored = store.find(RENAMES)
    if stored is None:
        return (), None
    return Renames.from_json(stored[0], f"{store.uri}/{RENAMES}").renames, stored[1]


def files_to_rename(store: Store, target: LabelTarget, old: str, new: str, live: Iterable[str]) -> list[str]:
    """The files of the class ``old`` that move if it becomes ``new``. ``live`` are the classes of
    the live release.

    Raises:
        SettingsError: the new name is not usable as a folder name.
        DataError: the source has no file of the class, or the source or the live release has
            another class with the new name.
    """
    require_folder_name(new)
    files = target.files(old)
    if not files:
        raise DataError(f"The source has no image of the class {old}.")
    if target.files(new):
        raise DataError(f"The class {new} exists. Select the images, and move them there.")
    if new in live and new_names(load_renames(store)[0]).get(new) != old:
        raise DataError(
            f"The live release calls other images {new}, so the next run would mistake one class for the other. Choose "
            "another name, or rename the class once a release without that name is live."
        )
    return files


def rename_class(store: Store, target: LabelTarget, rename: Rename, live: Iterable[str] = ()) -> int:
    """Record ``rename`` and move the files of the class. Return their number.

    Raises:
        SettingsError, DataError: those of `files_to_rename`.
        ConflictError: somebody else renamed a class in the meantime.
    """
    files = files_to_rename(store, target, rename.old, rename.new, live)
    renames, etag = load_renames(store)
    store.put_if(RENAMES, Renames(renames=(*renames, rename)).to_json(), etag)
    finish_renames(store, target)
    return len(files)


def finish_renames(store: Store, target: LabelTarget) -> None:
    """Move the files that a killed process left. Repeated calls have no effect."""
    renames, etag = load_renames(store)
    if all(rename.is_complete for rename in renames):
        return
    for rename in renames:
        if not rename.is_complete:
            for file in target.files(rename.old):
                target.move(file, renamed_file(file, rename))
    complete = tuple(rename.model_copy(update={"is_complete": True}) for rename in renames)
    store.put_if(RENAMES, Renames(renames=complete).to_json(), etag)


def renamed_file(file: str, rename: Rename) -> str:
    """The name of ``file`` with the new name of its class folder, which is the last folder with the
    class's name."""
    *folders, name = PurePosixPath(file).parts
    for depth in reversed(range(len(folders))):
        if class_name(folders[depth]) == rename.old:
            return "/".join([*folders[:depth], rename.new, *folders[depth + 1 :], name])
    return file


def new_names(renames: Iterable[Rename]) -> dict[str, str]:
    """The last name of each renamed class, also of one that was renamed several times."""
    current: dict[str, str] = {}
    for rename in renames:
        current = {old: rename.new if new == rename.old else new for old, new in current.items()}
        current[rename.old] = rename.new
    return current


def with_renames(chosen: ClassSettings, store: Store, labels: Iterable[str] = ()) -> ClassSettings:
    """``chosen``, and the renamings of the store, unless the source has a class with the old name
    among its ``labels`` again, or ``chosen`` says something else about the classes."""
    current = new_names(load_renames(store)[0])
    settled = {*current.values(), *labels, *chosen.retired, *chosen.renamed, *chosen.renamed.values()}
    renamed = {old: new for old, new in current.items() if old not in settled and new not in chosen.former_names}
    return ClassSettings(retired=chosen.retired, renamed=renamed | chosen.renamed)
