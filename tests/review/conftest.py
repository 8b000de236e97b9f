"""A store, and a source with one image of each of two classes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for number, label in enumerate(["cat", "dog"]):
        (tmp_path / "source" / label).mkdir(parents=True)
        Image.fromarray(np.full((8, 8), 100 + number, np.uint8)).save(tmp_path / "source" / label / "a.png")
    return tmp_path / "source"
