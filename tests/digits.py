"""scikit-learn's digits from its file: the import of scikit-learn takes each process seconds."""

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@cache
def load_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The images, shape (1797, 8, 8), from 0 to 16, and their digits."""
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations
    with gzip.open(Path(spec.submodule_search_locations[0]) / "datasets/data/digits.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
