import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from evernear.common.text import class_name
from evernear.settings.section import Fraction, PixelLimit, Section, absolute

COLUMN = "column"
"""The source's own grouping: the column or the ``.json`` field ``group``."""
GROUP_FORMS = ("folder", "stem", COLUMN)
"""Values of ``data.group`` that are not regular expressions."""


def check_group(setting: str) -> str:
    """Accept "", one of `GROUP_FORMS`, or a regular expression with a group in parentheses.

    Raises:
        ValueError: ``setting`` is none of these.
    """
    if not setting or setting in GROUP_FORMS:
        return setting
    forms = " or ".join(GROUP_FORMS)
    try:
        pattern = re.compile(setting)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{setting!r} is neither {forms} nor a regular expression ({error})") from None
    if not pattern.groups:
        raise ValueError(
            f"{setting!r} has no parentheses around the part of the name that the images of a group share, as in"
            f" ([^/]+)/[^/]+$; use {forms}, or add them"
        )
    return setting


BUILT_IN_SOURCES = ("digits", "mnist")
"""Sources named by a word instead of a location."""
PATH_KINDS = ("folder", "huggingface", "mnist", "table", "webdataset")
"""Kinds whose location is a path. Some also accept the URI of an object."""
MAX_SIZE_PX = 128
"""Largest automatic size, because the compact network divides larger images into patches."""
LARGEST_SIZE_PX = 1024
TABLE_PATH = re.compile(r"(?:(?!\w+:)|s3://).+\.(?:csv|tsv|parquet|pq)", re.IGNORECASE)
"""The location of a table that needs no ``table:`` prefix."""


def absolute_source(source: str) -> str:
    """Make a path absolute, because a run's steps have a different working directory.

    Raises:
        ValueError: ``source`` is a directory without a kind, or not UTF-8, so that no table could
            name it.
    """
    try:
        source.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8; rename it") from None
    if source and source not in BUILT_IN_SOURCES and Path(source).is_dir():
        raise ValueError(f"{source!r} is a directory; use folder:{source} for the images in it")
    if TABLE_PATH.fullmatch(source):
        source = f"table:{source}"
    kind, _, path = source.partition(":")
    return f"{kind}:{absolute(path)}" if kind in PATH_KINDS and path and not path.startswith("s3://") else source


class DataSettings(Section):
    """The image source, and the division of images into splits and shards."""

    source: str = Field(
        default="digits",
        description="digits | mnist | mnist:DIRECTORY | folder:DIRECTORY | s3://bucket/prefix | table:FILE, a CSV or"
        " Parquet file with the columns path and label, and optionally split and group | webdataset:DIRECTORY of tars"
        " | huggingface:DIRECTORY of Parquet or Arrow files with images; FILE and DIRECTORY may be s3:// URIs",
    )
    dataset: str = Field(default="", description="Name of the dataset in the store. Default: from the source.")
    size_px: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE_PX,
        description="Height and width of resized images. Default: the images' median size, at most 128. Photographs "
        "get pretrained weights by default, and then keep up to 256 pixels of their shorter side.",
    )
    resize: Literal["crop", "letterbox", "stretch"] | None = Field(
        default=None,
        description="How images of another aspect ratio are resized. crop to the center, letterbox with gray bars, or "
        "stretch. Default: crop, or letterbox if more than half of the image would be lost.",
    )
    bit_depth: int | None = Field(
        default=None,
        description="Bits that the values of 16-bit images use: 8, 10, 12, 14 or 16. Larger values are clipped. "
        "Default: from a sample of the first ingest.",
    )
    layout: Literal["classes", "innermost"] | None = Field(
        default=None,
        description="Meaning of the folders of a source. classes: the top-level folders are the classes, whatever "
        "their names. innermost: each innermost folder is a class. Default: splits by their names, and classes in "
        "them or above them.",
    )
    split_folders: dict[str, Literal["train", "test", "gallery", "query", "none"]] = Field(
        default={},
        description="The split of folders and of packed files whose names do not say it. none: leave them out.",
    )
    group: str = Field(
        default="",
        description="Images that belong together, such as frames of one scene, and stand in one split. folder: the"
        " folders below the class. stem: the name before its last number. column: the column group of a table or a"
        " Parquet file, or the field group of a WebDataset's .json. Otherwise a regular expression over the file's name"
        " in the source, whose parentheses enclose the group.",
    )
    test_fraction: Fraction = Field(default=0.10, description="Share of images in the frozen test split.")
    gallery_fraction: Fraction = Field(default=0.10, description="Share of images in the index.")
    query_fraction: Fraction = Field(default=0.05, description="Share of images that calibrate the open-set threshold.")
    max_pixels: PixelLimit = Field(
        default=25_000_000, description="Largest width times height of an image. Larger images are rejected."
    )
    nodes: int = Field(
        default=1, ge=1, description="Nodes that read and decode the files of a bucket, as ``index.nodes``."
    )

    @field_validator("bit_depth")
    @classmethod
    def _known_bit_depth(cls, bit_depth: int | None) -> int | None:
        if bit_depth not in (None, 8, 10, 12, 14, 16):
            raise ValueError("it is 8, 10, 12, 14 or 16, or left out for the bits that the images use")
        return bit_depth

    @field_validator("group")
    @classmethod
    def _usable_group(cls, group: str) -> str:
        return check_group(group)

    @field_validator("source")
    @classmethod
    def _absolute(cls, source: str) -> str:
        return absolute_source(source)

    def location(self) -> str:
        """The path or URI without its kind, or the name of a built-in source."""
        kind, _, path = self.source.partition(":")
        return path if path.startswith("s3://") or (kind in PATH_KINDS and path) else self.source

    @model_validator(mode="after")
    def _has_splits(self) -> Self:
        splits = [folder for folder, split in self.split_folders.items() if split != "none"]
        if self.layout == "classes" and splits:
            raise ValueError(f"layout=classes says that no folder is a split, but split_folders names {splits[0]!r}")
        return self


ClassName = Annotated[str, AfterValidator(class_name)]


class ClassSettings(Section):
    """Champion classes that were removed or renamed on purpose. Entries for other classes are
    ignored."""

    retired: tuple[ClassName, ...] = Field(
        default=(), description="Classes that new releases no longer need to recognize."
    )
    renamed: dict[ClassName, ClassName] = Field(default={}, description="New name of each renamed class.")

    @field_validator("renamed")
    @classmethod
    def _without_spellings(cls, renamed: dict[str, str]) -> dict[str, str]:
        """Drop entries whose names are spellings of one class (`evernear.common.text`)."""
        return {old: new for old, new in renamed.items() if old != new}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if both := sorted({*self.retired} & {*self.renamed, *self.renamed.values()}):
            raise ValueError(f"{both[0]!r} is both retired and renamed")
        if chained := sorted({*self.renamed} & {*self.renamed.values()}):
            raise ValueError(f"{chained[0]!r} is both the old and the new name of a class")
        return self

    def current(self, label: str) -> str | None:
        """The current name of a champion class in any spelling, or None if it was retired."""
        name = class_name(label)
        return None if name in self.retired else self.renamed.get(name, name)

    def current_labels(self, labels: Iterable[str]) -> tuple[str, ...]:
        """Without retired classes and duplicates."""
        return tuple(dict.fromkeys(name for name in map(self.current, labels) if name is not None))

    @property
    def former_names(self) -> tuple[str, ...]:
        return (*self.retired, *self.renamed)
