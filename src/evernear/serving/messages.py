"""What is said over the wire. A client needs no more than this: neither torch nor FAISS."""

from datetime import datetime

from evernear.frozen import Frozen


class Neighbor(Frozen, extra="ignore"):
    """A gallery image near the query."""

    label: str
    dist: float


class Prediction(Frozen, extra="ignore"):
    """The answer for one image.

    ``dist`` is the L2 distance of unit vectors (0..2) to the nearest gallery image; beyond the release's
    threshold the image is ``unknown`` and ``pred`` only a guess. ``neighbors`` are sorted by distance.
    """

    pred: str
    dist: float
    unknown: bool
    neighbors: tuple[Neighbor, ...]
    version: str


class Refusal(Frozen, extra="ignore"):
    """Why one request gets no prediction; the shape of TorchServe's own errors."""

    code: int = 400
    type: str = "BadImage"
    message: str


class Metadata(Frozen, extra="ignore"):
    """What the release that serves takes and gives.

    Images are PNG or JPEG of at most ``max_pixels``, and are brought to ``height_px`` x ``width_px`` with
    ``channels`` (1: grey, 3: RGB) before the network sees them. Beyond ``threshold`` (L2 of unit vectors, 0..2)
    an image is unknown. ``metrics`` are those that the release was let through with.
    """

    model: str
    version: str
    created: datetime
    height_px: int
    width_px: int
    channels: int
    max_pixels: int
    labels: tuple[str, ...]
    embedding_dim: int
    threshold: float
    metrics: dict[str, float]
