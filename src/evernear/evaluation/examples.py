"""Images and figures of one evaluation for the run page, bounded in number and bytes.
`evernear.evaluation.example_collector` collects them. They are recorded with the run, so the page
needs neither the dataset nor the network later."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evernear.common.frozen import Frozen
from evernear.evaluation.image_sheet import Sheet
from evernear.evaluation.live_accuracy import LiveAccuracy
from evernear.index.description import MAX_DISTANCE

if TYPE_CHECKING:  # reading examples must not import torch or FAISS
    pass

BINS = 50


class NeighborImage(Frozen):
    """``tile`` is the image's number in the sheet."""

    label: str
    distance: float
    tile: int


class Mistake(Frozen):
    label: str
    predicted: str
    unknown: bool
    """Whether the query was called unknown, so that a client would not have seen the wrong
    label."""
    distance: float
    tile: int
    neighbors: tuple[NeighborImage, ...]


class MapPoint(Frozen):
    """A query on the map of embeddings. Its image is the tile with the same number in
    ``map_images``."""

    x: float
    y: float
    label: str
    predicted: str
    unknown: bool


class Sample(Frozen):
    """Images of one class, as their numbers in the sheet."""

    label: str
    tiles: tuple[int, ...]


class IndexFigures(Frozen):
    """The index, and the median times of one query on the evaluation machine."""

    factory: str
    search: str
    reason: str = ""
    size: int
    dim: int
    k: int
    label_by: str
    embed_ms: float
    search_ms: float


class LiveDistances(Frozen):
    """Nearest-neighbor distances of logged live queries, with the champion's network and
    threshold."""

    release: str
    queries: int
    unknown: int
    threshold: float
    histogram: tuple[int, ...]


class Examples(Frozen):
    """Histograms have `BINS` equal bins from 0 to `MAX_DISTANCE`."""

    remedy = "run the evaluate step again"

    mistakes: tuple[Mistake, ...]
    """Wrong predictions: first those that were not called unknown, then the others, each sorted by
    distance, with the most confident first."""
    map: tuple[MapPoint, ...]
    """A random sample of the test split, placed by t-SNE (van der Maaten and Hinton 2008, JMLR
    9:2579)."""
    distances_right: tuple[int, ...]
    distances_wrong: tuple[int, ...]
    samples: tuple[Sample, ...]
    new_images: tuple[Sample, ...]
    images_before: dict[str, int] | None
    """Number of images of each class in the champion's dataset, or None without a champion or if
    the dataset is unavailable."""
    index: IndexFigures
    images: Sheet
    map_images: Sheet
    live: LiveDistances | None = None
    live_accuracy: tuple[LiveAccuracy, ...] = ()
    """The champion's accuracy on labeled live queries by week, newest first. Empty without
    labels."""


def histogram(distances: NDArray[np.float32]) -> NDArray[np.int64]:
    """Counts (`BINS`,) of distances."""
    return np.histogram(distances, bins=BINS, range=(0.0, MAX_DISTANCE))[0]
