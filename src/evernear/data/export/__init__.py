"""Export a dataset snapshot to files that other tools can open: Parquet, WebDataset, or
folders of PNG files."""

from typing import Literal

Format = Literal["parquet", "webdataset", "folder"]
