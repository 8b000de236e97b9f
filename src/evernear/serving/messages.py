"""What is said over the wire. A client needs no more than this: neither torch nor FAISS."""

from pydantic import BaseModel, ConfigDict


class Neighbor(BaseModel):
    """A gallery image near the query."""

    model_config = ConfigDict(frozen=True)

    label: str
    dist: float


class Prediction(BaseModel):
    """The answer for one image.

    ``dist`` is the L2 distance of unit vectors (0..2) to the nearest gallery image; beyond the release's
    threshold the image is ``unknown`` and ``pred`` only a guess. ``neighbors`` are sorted by distance.
    """

    model_config = ConfigDict(frozen=True)

    pred: str
    dist: float
    unknown: bool
    neighbors: tuple[Neighbor, ...]
    version: str


class Refusal(BaseModel):
    """Why one request gets no prediction; the shape of TorchServe's own errors."""

    model_config = ConfigDict(frozen=True)

    code: int = 400
    type: str = "BadImage"
    message: str
