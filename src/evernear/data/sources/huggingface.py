"""Hugging Face datasets, stored as Parquet files or as Arrow files from ``save_to_disk``. One
column contains the images.

``save_to_disk`` lists its files in ``state.json``, and the splits of a `DatasetDict` in
``dataset_dict.json``. A dataset of the hub lists its configurations in ``README.md``. Files beside
them belong to no dataset or to another configuration.
"""

import json
import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import yaml

from evernear.common.output import named
from evernear.data.sources.arrow_file import ArrowFile, class_names, open_arrow_file
from evernear.data.sources.base import FileEntry
from evernear.data.sources.layout import split_option
from evernear.data.sources.packed import Member, PackedFiles, split_position, split_word
from evernear.errors import DataError
from evernear.settings.data import COLUMN

_BATCH_ROWS = 32


class _Columns(NamedTuple):
    image: str
    label: str
    group: str | None


class HuggingFace(PackedFiles):
    """Rows with an image, a label and perhaps a group. A file's path names their split."""

    suffixes = (".parquet", ".arrow")
    kind = "Parquet or Arrow files"

    def entries(self) -> Iterator[FileEntry]:
        self._numbered: dict[bool, str] = {}
        """A file with class numbers that have names, and one whose numbers have none."""
        return super().entries()

    def _strays(self, names: Sequence[str]) -> set[str]:
        strays, splits = stray_files(names, self._small_file), self._settings.split_folders
        own = [name for name in names if name.lower().endswith(self.suffixes) and name not in strays]
        used = [name for name in own if splits.get(split_word(name, splits)) != "none"]
        readme = self._small_file("README.md") if "README.md" in names else b""
        require_one_configuration(f"huggingface:{self._location}", used, readme)
        return strays

    def _members(self, path: Path, file: str) -> Iterator[Member]:
        with open_arrow_file(path, file) as table:
            columns = self._columns(table)
            texts = table.texts([columns.label, *([columns.group] if columns.group else ())])
            labels = set[str]()
            for row, (label, *group) in enumerate(texts):
                labels.add(label)
                yield Member(f"{row:09}", label, group="".join(group))
            if labels - {"", "-1"}:  # otherwise, the labels are hidden
                self._require_same_names(table, columns.label)

    def _require_same_names(self, table: ArrowFile, label: str) -> None:
        """Reject class numbers of which only some files have the names: 0 would be another class
        than its name."""
        if not pa.types.is_integer(table.schema.field(label).type):
            return
        self._numbered[label in class_names(table.schema)] = table.name
        if len(self._numbered) > 1:
            raise DataError(
                f"The features of {self._numbered[True]} name the classes of its column {label}, and"
                f" {self._numbered[False]} has numbers without names; write all files with the same features"
                " (`cast` of datasets)."
            )

    def _images(self, path: Path, file: str, wanted: Mapping[str, FileEntry]) -> Iterator[tuple[str, bytes]]:
        row = 0
        with open_arrow_file(path, file) as table:
            image = self._columns(table).image
            for batch in table.batches([image], _BATCH_ROWS):
                images = batch.column(0)
                for position in range(batch.num_rows):
                    name = f"{row:09}"
                    row += 1
                    if name in wanted:
                        yield name, _content(images[position].as_py(), file, name)

    def _columns(self, table: ArrowFile) -> _Columns:
        """Find label and image by the features of `datasets`, or by name and type."""
        names = table.schema.names
        classes = [*class_names(table.schema)]
        label = "label" if names.count("label") == 1 else classes[0] if len(classes) == 1 else None
        images = [field.name for field in table.schema if field.name not in (label, "group") and _is_image(field.type)]
        image = "image" if images.count("image") == 1 else images[0] if len(images) == 1 else None
        if image is None or label is None:
            what = "image, with the bytes of an image" if image is None else "label"
            word = split_word(table.name)
            is_needed = word in ("", "train", "training")
            leave_out = "" if is_needed else f" To leave this split out, add {split_option(word, 'none')}."
            raise DataError(
                f"{table.name} has no column {what}, or several; its columns: {', '.join(names)}. Rename the right one"
                f" to {'image' if image is None else 'label'} (`rename_column` of datasets).{leave_out}"
            )
        has_group = names.count("group") == 1 and label != "group"
        # Unless the groups are used, a column of another type may have another meaning.
        is_used = self._settings.group == COLUMN or (has_group and _is_plain(table.schema.field("group").type))
        return _Columns(image, label, "group" if has_group and is_used else None)


def _is_plain(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return is_text or pa.types.is_integer(kind)


def _is_image(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _is_image(kind.field("bytes").type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _content(value: Any, file: str, name: str) -> bytes:
    if isinstance(value, dict):
        if value.get("bytes") is None and value.get("path"):
            raise DataError(
                f"Row {name} of {file} names the file {value['path']} instead of containing it; write the dataset with"
                " `save_to_disk` or `push_to_hub`, which embed images."
            )
        value = value.get("bytes")
    return value or b""


# Cached results of functions such as `map` and `filter` of `datasets`.
_CACHE = re.compile(r"cache-[0-9a-f]{16}.*\.arrow")


def stray_files(names: Sequence[str], read: Callable[[str], bytes]) -> set[str]:
    """The files among ``names`` that do not belong to a dataset, but may contain its rows."""
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
    """The files of a saved dataset by its state.json, or none if it has another form."""
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
    except (ValueError, RecursionError):
        return None


def require_one_configuration(source: str, files: Collection[str], readme: bytes) -> None:
    """Reject several configurations of one dataset, whose images would be mixed."""
    by_readme = _named_configurations(files, readme)
    configurations = by_readme or _similar_folders(files)
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
    belong = "move README.md away" if configurations is by_readme else "give their files different names"
    raise DataError(
        f"{source} contains several configurations of a dataset: {named(sorted(configurations))}. They are not mixed;"
        f" {remedy}. If they are one dataset, {belong}."
    )


def _named_configurations(files: Collection[str], readme: bytes) -> Mapping[str, frozenset[str]]:
    """Configurations in a README's header. Those with the same files are one."""
    found = re.match(r"(?s)\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", readme.decode(errors="replace"))
    try:
        header: Any = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, ValueError, RecursionError):  # PyYAML passes on that a date does not exist
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
    """``data_files``: text, or lists or mappings of text, for all splits or for each."""
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
    """Folders with a file of the same name of the same split, such as ``en`` and ``fr``."""
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
