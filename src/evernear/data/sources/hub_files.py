"""The files of a Hugging Face dataset, and files beside them that belong to no dataset or to
another configuration.

``save_to_disk`` lists its files in ``state.json``, and the splits of a `DatasetDict` in
``dataset_dict.json``. A dataset of the hub lists its configurations in ``README.md``.
"""

import json
import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import yaml

from evernear.data.sources.layout import split_option
from evernear.data.sources.packed import split_position
from evernear.errors import DataError

_MAX_NAMES = 5
# Cached results of functions such as `map` and `filter` of `datasets`.
_CACHE = re.compile(r"cache-[0-9a-f]{16}.*\.arrow")


def stray_files(names: Sequence[str], read: Callable[[str], bytes]) -> set[str]:
    """The files that do not belong to a dataset, although they may contain its rows. ``names`` are
    the paths of all files, and ``read`` reads a file."""
    strays = {name for name in names if _CACHE.fullmatch(posixpath.basename(name))}
    for name in names:
        folder, base = posixpath.split(name)
        if base == "state.json":
            strays -= (files := _saved_files(name, _json(read(name)), names))
            strays |= {other for other in names if files and posixpath.dirname(other) == folder} - files
    for name in names:
        if posixpath.basename(name) == "dataset_dict.json":
            strays |= _unnamed_splits(name, _json(read(name)), names)
    return strays


def _saved_files(state: str, content: Any, names: Sequence[str]) -> set[str]:
    """The files of a saved dataset, according to its state.json. The result is empty if ``content``
    has another form."""
    match content:
        case {"_data_files": [*entries]} if entries and all(map(_file_name, entries)):
            folder = posixpath.dirname(state)
            files = {posixpath.normpath(posixpath.join(folder, _file_name(entry))) for entry in entries}
        case _:
            return set()
    if content.get("_indices_data_files"):
        raise DataError(
            f"{state} refers to a selection of the rows (_indices_data_files), which evernear does not read; load the"
            " dataset with the version of datasets that saved it, and save flatten_indices() of it."
        )
    if missing := files.difference(names):
        raise DataError(f"{state} names {min(missing)}, which does not exist; copy the whole dataset again.")
    return files


def _unnamed_splits(dataset_dict: str, content: Any, names: Sequence[str]) -> set[str]:
    """Files in folders that a dataset_dict.json does not name as splits."""
    match content:
        case {"splits": [*splits]} if splits:
            inside = dataset_dict.removesuffix("dataset_dict.json")
            folders = tuple(f"{inside}{split}/" for split in splits)
            return {name for name in names if name.startswith(inside) and not name.startswith(folders)}
        case _:
            return set()


def _file_name(entry: Any) -> str:
    match entry:
        case {"filename": str(name)}:
            return name
        case _:
            return ""


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def require_one_configuration(source: str, files: Collection[str], readme: bytes) -> None:
    """Reject several configurations of one dataset. Their images would be mixed. ``readme`` is the
    content of the dataset's README, or empty."""
    named = _named_configurations(files, readme)
    configurations = named or _similar_folders(files)
    if len(configurations) < 2:
        return
    folders = {
        name: posixpath.commonpath([posixpath.dirname(file) for file in own]) for name, own in configurations.items()
    }
    apart = sorted(
        folder
        for name, folder in folders.items()
        if folder and not any(f"{other}/".startswith(f"{folder}/") for each, other in folders.items() if each != name)
    )
    if "" in folders.values() and apart:
        remedy = f"leave out what is in a folder, as in {split_option(posixpath.basename(apart[0]), 'none')}"
    elif apart:
        chosen = posixpath.join(source, apart[0])
        remedy = f"choose one by its folder, as in --source {shlex.quote(chosen)}"
    else:
        own = min(min(configurations.items())[1])
        remedy = f"copy the files of one of them, such as {own}, to a directory of their own"
    belong = "move README.md away" if configurations is named else "give their files different names"
    raise DataError(
        f"{source} contains several configurations of a dataset: {_listed(configurations)}. They are not mixed;"
        f" {remedy}. If they are one dataset, {belong}."
    )


def _named_configurations(files: Collection[str], readme: bytes) -> Mapping[str, frozenset[str]]:
    """The files of each configuration in the header of a README. Configurations with the same files
    are one configuration."""
    found = re.match(r"(?s)\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", readme.decode(errors="replace"))
    try:
        header: Any = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    match header:
        case {"configs": [*configs]}:
            own = {_name(config): frozenset(_matching(files, _patterns(config))) for config in configs}
        case _:
            return {}
    different = {each: name for name, each in own.items() if each}
    return {name: each for each, name in different.items()} if len(different) > 1 else {}


def _name(config: Any) -> str:
    match config:
        case {"config_name": name}:
            return str(name)
        case _:
            return ""


def _patterns(value: Any) -> list[str]:
    """The patterns in ``data_files``, which are text, or lists or mappings of text, for all splits
    together or for each."""
    match value:
        case {"data_files": inner} | {"path": inner}:
            return _patterns(inner)
        case {"config_name": _, "data_dir": str(folder)}:
            return [f"{folder.strip('/')}/*"]
        case str():
            return [value.removeprefix("./")]
        case {**splits}:
            return _patterns([*splits.values()])
        case [*values]:
            return [pattern for each in values for pattern in _patterns(each)]
        case _:
            return []


def _matching(files: Collection[str], patterns: Collection[str]) -> set[str]:
    return {file for file in files for pattern in patterns if fnmatch(file, pattern.replace("**/", "*"))}


def _similar_folders(files: Collection[str]) -> Mapping[str, frozenset[str]]:
    """Folders, each with its files, that contain a file of the same name of the same split, such as
    ``en/train-00000-of-00002`` and ``fr/train-00000-of-00001``."""
    folders: defaultdict[str, set[str]] = defaultdict(set)
    names: defaultdict[str, set[str]] = defaultdict(set)
    for file in files:
        parts = file.split("/")
        depth = split_position(parts)
        if depth is None and "-of-" not in parts[-1]:
            continue
        depth = len(parts) - 1 if depth is None else depth
        folder = "/".join(parts[:depth])
        folders[folder].add(file)
        names[re.sub(r"-of-\d+", "", "/".join(parts[depth:]))].add(folder)
    similar = {folder for sharing in names.values() if len(sharing) > 1 for folder in sharing}
    return {folder or ".": frozenset(own) for folder, own in folders.items() if folder in similar}


def _listed(names: Collection[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(sorted(names)[:_MAX_NAMES]) + (f" and {more:,} more" if more > 0 else "")
