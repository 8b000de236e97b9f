"""What a release answered on its query split when it was archived: live queries are compared with that.

Embeddings are kept as 16 random projections: distances between points survive that well enough to see a shift
(Johnson and Lindenstrauss), an image does not. The projection is part of the release, so that server and watcher use
one and the same, whatever their numpy.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from evernear.errors import IntegrityError

SIZE = 1000
"""Queries that a reference keeps at most, evenly over the split: 80 kB."""
PROJECTED_DIM = 16
_SEED = 0
_NAMES = ("projection", "coordinates", "distances", "unknown")

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class DriftBaseline:
    """The projection (D, 16), and of N queries the projected embeddings (N, 16), distances (N,) and verdicts (N,)."""

    projection: Floats
    coordinates: Floats
    distances: Floats
    unknown: NDArray[np.bool_]

    def to_bytes(self) -> bytes:
        """As it lies in a release: ``.npz``, without pickle."""
        buffer = io.BytesIO()
        np.savez(buffer, **{name: getattr(self, name) for name in _NAMES})
        return buffer.getvalue()

    @staticmethod
    def parse(data: bytes, place: str) -> "DriftBaseline":
        """What `to_bytes` wrote.

        Raises:
            IntegrityError: ``data``, which came from ``place``, is something else.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                projection, coordinates, distances, unknown = (arrays[name] for name in _NAMES)
        except (ValueError, KeyError, OSError, EOFError, TypeError, BadZipFile) as error:
            raise IntegrityError(f"{place} is no reference of a release ({error}).") from None
        count, dim = len(distances), projection.shape[-1]
        shapes = (projection.ndim, coordinates.shape, distances.shape, unknown.shape)
        kinds = (projection.dtype, coordinates.dtype, distances.dtype, unknown.dtype)
        if shapes != (2, (count, dim), (count,), (count,)) or kinds != (*(np.dtype(np.float32),) * 3, np.dtype(bool)):
            raise IntegrityError(f"{place} is no reference of a release: its arrays do not fit each other.")
        return DriftBaseline(projection, coordinates, distances, unknown)


def random_projection(dim: int) -> Floats:
    """Of ``dim`` coordinates to 16, distances kept on average."""
    drawn = np.random.default_rng(_SEED).standard_normal((dim, PROJECTED_DIM))
    return (drawn / np.sqrt(PROJECTED_DIM)).astype(np.float32)


def evenly(total: int, count: int = SIZE) -> Iterator[int]:
    """At most ``count`` of the numbers below ``total``, evenly spaced."""
    chosen = min(total, count)
    return (number * total // chosen for number in range(chosen))
