"""A snapshot of a dataset as files that other tools open: Parquet, WebDataset, or folders of PNG files."""

from typing import Literal

Format = Literal["parquet", "webdataset", "folder"]
