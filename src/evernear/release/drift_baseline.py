"""The drift reference of a release: predictions for images that it was not built from, made when it
was archived.

The images come from the query split and, if it has fewer than `SIZE`, from the test split, which is
in neither the training split nor the gallery. Gallery images cannot be used, because some are also
training images.

Embeddings are stored as 16 random projections, which preserve distances well enough to detect a
shift (Johnson and Lindenstrauss), but images cannot be reconstructed from them. The projection is
part of the release, so that the server and the watcher use the same one with any NumPy version.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from evernear.errors import IntegrityError

SIZE = 1000
"""Maximum number of images in a baseline, evenly spaced in each split. It then takes 80 kB without
the predicted classes."""
PROJECTED_DIM = 16
_SEED = 0
_NAMES = ("projection", "coordinates", "distances", "unknown", "labels")

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class DriftBaseline:
    """A random projection (D, 16), and the projected embeddings (N, 16), distances, unknown flags
    and predicted classes of N images."""

    projection: Floats
    coordinates: Floats
    distances: Floats
    unknown: NDArray[np.bool_]
    labels: NDArray[np.str_]

    def to_bytes(self) -> bytes:
        """``.npz`` without pickle."""
        buffer = io.BytesIO()
        np.savez(buffer, **{name: getattr(self, name) for name in _NAMES})
        return buffer.getvalue()

    @staticmethod
    def parse(data: bytes, source: str) -> "DriftBaseline":
        """Parse the output of `to_bytes`. Errors name ``source``."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                projection, coordinates, distances, unknown, labels = (arrays[name] for name in _NAMES)
        except (ValueError, KeyError, OSError, EOFError, TypeError, BadZipFile) as error:
            raise IntegrityError(f"{source} is not a drift baseline ({error}).") from None
        count, dim = len(distances), projection.shape[-1]
        shapes = (projection.ndim, coordinates.shape, distances.shape, unknown.shape)
        kinds = (projection.dtype, coordinates.dtype, distances.dtype, unknown.dtype)
        if shapes != (2, (count, dim), (count,), (count,)) or kinds != (*(np.dtype(np.float32),) * 3, np.dtype(bool)):
            raise IntegrityError(f"{source} is not a drift baseline: the shapes or types of its arrays do not match.")
        if labels.shape != (count,) or labels.dtype.kind != "U":
            raise IntegrityError(f"{source} is not a drift baseline: its classes do not match its distances.")
        return DriftBaseline(projection, coordinates, distances, unknown, labels)


def random_projection(dim: int) -> Floats:
    """From ``dim`` to 16 dimensions. On average, the projection preserves distances."""
    drawn = np.random.default_rng(_SEED).standard_normal((dim, PROJECTED_DIM))
    return (drawn / np.sqrt(PROJECTED_DIM)).astype(np.float32)


def evenly(total: int, size: int = SIZE) -> Iterator[int]:
    """Yield up to ``size`` evenly spaced integers between 0 and ``total`` (exclusive)."""
    chosen = min(total, size)
    return (number * total // chosen for number in range(chosen))
