"""Copy a directory to a folder in a store, and copy it back, so that other machines can read the
files of a step."""

from pathlib import Path

from evernear.common.store.base import Store


def put_folder(store: Store, folder: str, directory: Path) -> None:
    """Copy the files of ``directory`` to ``folder``."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            store.put(f"{folder}/{path.relative_to(directory).as_posix()}", path)


def fetch_folder(store: Store, folder: str, directory: Path) -> None:
    """Copy the objects of ``folder`` to ``directory``.

    Raises:
        IntegrityError: an object is damaged.
    """
    for info in store.list(f"{folder}/"):
        store.fetch(info.key, directory / info.key.removeprefix(f"{folder}/"))
