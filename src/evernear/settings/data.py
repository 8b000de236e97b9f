import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from evernear.settings.group import check_group
from evernear.settings.parts_job import Nodes
from evernear.settings.section import Fraction, PixelLimit, Section, absolute

BUILT_IN_SOURCES = ("digits", "mnist")
"""Sources named by a word instead of a location."""
PATH_KINDS = ("folder", "huggingface", "mnist", "table", "webdataset")
"""Kinds whose location is a path. Some also accept the URI of an object."""
MAX_SIZE_PX = 128
"""Largest automatic size, because the compact network divides larger images into patches."""
TABLE_PATH = re.compile(r"(?:(?!\w+:)|s3://).+\.(?:csv|tsv|parquet|pq)", re.IGNORECASE)
"""The location of a table that needs no ``table:`` prefix."""


class DataSettings(Section):
    """The image source, and the division of images into splits and shards."""

    source: str = Field(
        default="digits",
        description="digits | mnist | mnist:DIRECTORY | folder:DIRECTORY | s3://bucket/prefix | table:FILE, a CSV or"
        " Parquet file with the columns path and label, and optionally split and group | webdataset:DIRECTORY of tars"
        " | huggingface:DIRECTORY of Parquet or Arrow files with images; FILE and DIRECTORY may be s3:// URIs",
    )
    dataset: str = Field(default="", description="Name of the dataset in the store. Default: from the source.")
    moved_from: str = Field(
        default="",
        description="The earlier location of the source, as data.source named it, if its images have moved. Images "
        "that are gone since are removed, and new labels count.",
    )
    size_px: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Height and width of resized images. Default: the images' median size, at most 128, or 224 with "
        "train.weights.",
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
    channels: Literal["gray", "color"] | None = Field(
        default=None, description="Color of the dataset. Default: that of most images."
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
    reread: bool = Field(
        default=False,
        description="Read all files again and compare their contents, as --checksum of rsync does, instead of trusting "
        "sizes, times and ETags; for one run: --reread.",
    )
    nodes: Nodes = Field(default=1, description="Nodes that read and decode the files of a bucket, as ``index.nodes``.")

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

    @field_validator("source", "moved_from")
    @classmethod
    def _absolute(cls, source: str) -> str:
        """Make a path absolute, because a run's steps have a different working directory."""
        if source and source not in BUILT_IN_SOURCES and Path(source).is_dir():
            raise ValueError(f"{source!r} is a directory; use folder:{source} for the images in it")
        if TABLE_PATH.fullmatch(source):
            source = f"table:{source}"
        kind, _, path = source.partition(":")
        return f"{kind}:{absolute(path)}" if kind in PATH_KINDS and path and not path.startswith("s3://") else source

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
