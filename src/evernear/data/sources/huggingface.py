"""Hugging Face datasets, stored as Parquet files or as Arrow files from ``save_to_disk``. One
column contains the images."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from evernear.data.sources.arrow_file import ArrowFile, class_names, open_arrow_file
from evernear.data.sources.base import FileEntry
from evernear.data.sources.hub_files import require_one_configuration, stray_files
from evernear.data.sources.packed import Member, PackedFiles, split_word
from evernear.errors import DataError
from evernear.settings.group import COLUMN

_BATCH_ROWS = 32


class _Columns(NamedTuple):
    image: str
    label: str
    group: str | None


class HuggingFace(PackedFiles):
    """A source of rows that contain an image, a label and, in the column ``group``, optionally a
    group. The name or the folder of a file indicates the split of its rows."""

    suffixes = (".parquet", ".arrow")
    kind = "Parquet or Arrow files"

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
            for row, (label, *group) in enumerate(texts):
                yield Member(f"{row:09}", label, group="".join(group))

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
        """Find the label column and the image column by the features that `datasets` writes or, if
        these features are missing, by name and type."""
        names = table.schema.names
        classes = [*class_names(table.schema)]
        label = "label" if names.count("label") == 1 else classes[0] if len(classes) == 1 else None
        images = [field.name for field in table.schema if field.name not in (label, "group") and _is_image(field.type)]
        image = "image" if images.count("image") == 1 else images[0] if len(images) == 1 else None
        if image is None or label is None:
            what = "image, with the bytes of an image" if image is None else "label"
            word = split_word(table.name)
            leave_out = f" To leave this split out, add --set data.split_folders.{word}=none." if word else ""
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
