"""Copy a directory to a store and back, so that other machines can read a step's files."""

from pathlib import Path

from evernear.common.store.base import Store


def put_folder(store: Store, folder: str, directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            store.put(f"{folder}/{path.relative_to(directory).as_posix()}", path)


def fetch_folder(store: Store, folder: str, directory: Path) -> None:
    for info in store.list(f"{folder}/"):
        store.fetch(info.key, directory / info.key.removeprefix(f"{folder}/"))
