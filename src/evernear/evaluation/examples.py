"""Images and figures of one evaluation for the run page, bounded in number and bytes.
`evernear.evaluation.example_collector` collects them. They are recorded with the run, so the page
needs neither the dataset nor the network later."""

import base64
import io
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import AwareDatetime, Field

from evernear.common.frozen import Document, Frozen
from evernear.data.preprocess import Pixels
from evernear.evaluation.live_accuracy import LiveAccuracy
from evernear.index.description import MAX_DISTANCE
from evernear.settings import ClassSettings

SHEET_COLUMNS = 20
TILE_PX = 96
"""Longest side of an image on the page. Larger images are reduced."""
LOSSLESS_BELOW_PX = 32
"""Shorter side of a tile below which the sheet is compressed without loss, because lossy WebP would
blur small neighboring tiles."""
BINS = 50


class Sheet(Frozen):
    """Images of one size, tiled in rows of `SHEET_COLUMNS`."""

    count: int
    width_px: int
    height_px: int
    webp: str
    """Base64."""


class Tiles:
    """Collects images with the dataset's shape, reduced so that the longer side is at most
    ``limit_px``."""

    def __init__(self, shape: tuple[int, int, int], limit_px: int) -> None:
        height, width, _ = shape
        scale = min(1.0, limit_px / max(height, width))
        self._width, self._height = max(1, round(width * scale)), max(1, round(height * scale))
        self._images: list[Image.Image] = []

    def add(self, image: Pixels) -> int:
        """Add an image (H, W, C) and return its number."""
        picture = Image.fromarray(np.squeeze(image, axis=2) if image.shape[2] == 1 else image).convert("RGB")
        self._images.append(picture.resize((self._width, self._height), Image.Resampling.LANCZOS))
        return len(self._images) - 1

    def sheet(self) -> Sheet:
        rows = -(-len(self._images) // SHEET_COLUMNS) or 1
        whole = Image.new("RGB", (SHEET_COLUMNS * self._width, rows * self._height))
        for number, image in enumerate(self._images):
            row, column = divmod(number, SHEET_COLUMNS)
            whole.paste(image, (column * self._width, row * self._height))
        buffer = io.BytesIO()
        lossless = min(self._width, self._height) < LOSSLESS_BELOW_PX
        whole.save(buffer, "WEBP", quality=80, lossless=lossless, method=4)
        return Sheet(
            count=len(self._images),
            width_px=self._width,
            height_px=self._height,
            webp=base64.b64encode(buffer.getvalue()).decode(),
        )


class NeighborImage(Frozen):
    """``tile`` is the image's number in the sheet."""

    label: str
    distance: float
    tile: int


class Mistake(Frozen):
    """A query that is not named right."""

    label: str
    predicted: str
    unknown: bool
    """Whether the query was called unknown, even though ``predicted`` may be its label."""
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


class Examples(Document):
    """Histograms have `BINS` equal bins from 0 to `MAX_DISTANCE`."""

    remedy = "run the evaluate step again"

    mistakes: tuple[Mistake, ...]
    """First the images named wrong, then those called unknown, each sorted by distance, with the
    most confident first."""
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
    """The champion's answers to labeled live queries by week, newest first. Empty without
    labels."""


def histogram(distances: NDArray[np.float32]) -> NDArray[np.int64]:
    """Counts (`BINS`,) of distances."""
    return np.histogram(distances, bins=BINS, range=(0.0, MAX_DISTANCE))[0]


SHOWN = 24


class Answer(NamedTuple):
    pred: str
    dist: float
    unknown: bool


class Replay(Frozen):
    queries: int = Field(default=0, ge=0)
    newest: AwareDatetime | None = None
    oldest: AwareDatetime | None = None
    left_out: Mapping[str, int] = {}
    """Keyed by reason."""
    changed: int = Field(default=0, ge=0)
    new_class: int = Field(default=0, ge=0)
    """Number of changed answers with a class that the champion does not know."""
    retired: int = Field(default=0, ge=0)
    """Number of changed answers to queries that the champion recognizes as a retired class."""
    now_recognized: int = Field(default=0, ge=0)
    now_unknown: int = Field(default=0, ge=0)


class ChangedAnswer(Frozen):
    """``tile`` is the query's number in the sheet."""

    before: str
    before_unknown: bool
    before_distance: float
    after: str
    after_unknown: bool
    after_distance: float
    tile: int


class ReplayExamples(Document):
    remedy = "run the evaluate step again"

    answers: tuple[ChangedAnswer, ...]
    """Sorted by the distance that the champion measured. Changes at the smallest distances are the
    least expected."""
    images: Sheet


class Replayed(NamedTuple):
    """One query, with the image as the candidate receives it, (H, W, C)."""

    image: Pixels
    before: Answer
    after: Answer

    def is_changed(self, classes: ClassSettings) -> bool:
        """Whether clients would receive a different answer. A class that was renamed on purpose is
        the same answer."""
        if self.before.unknown or self.after.unknown:
            return self.before.unknown != self.after.unknown
        return classes.current(self.before.pred) != self.after.pred


def count_changes(queries: Sequence[Replayed], classes: ClassSettings, known_before: Collection[str]) -> Replay:
    """``known_before`` contains the current names of the classes that the champion knows."""
    changed = [query for query in queries if query.is_changed(classes)]
    return Replay(
        queries=len(queries),
        changed=len(changed),
        new_class=sum(not query.after.unknown and query.after.pred not in known_before for query in changed),
        retired=sum(not query.before.unknown and classes.current(query.before.pred) is None for query in changed),
        now_recognized=sum(query.before.unknown for query in changed),
        now_unknown=sum(query.after.unknown for query in changed),
    )


def changed_answers(queries: Sequence[Replayed], classes: ClassSettings, shape: tuple[int, int, int]) -> ReplayExamples:
    changed = [query for query in queries if query.is_changed(classes)]
    changed.sort(key=lambda query: (query.before.unknown, query.before.dist))
    tiles = Tiles(shape, TILE_PX)
    answers = tuple(
        ChangedAnswer(
            before=before.pred,
            before_unknown=before.unknown,
            before_distance=before.dist,
            after=after.pred,
            after_unknown=after.unknown,
            after_distance=after.dist,
            tile=tiles.add(image),
        )
        for image, before, after in changed[:SHOWN]
    )
    return ReplayExamples(answers=answers, images=tiles.sheet())
