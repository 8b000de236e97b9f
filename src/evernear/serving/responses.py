"""The bodies of all responses. Clients can import this module without torch, FAISS or NumPy."""

from collections.abc import Mapping
from datetime import datetime
from operator import not_
from typing import TYPE_CHECKING, Any

from pydantic import Field

from evernear.common.frozen import Frozen

if TYPE_CHECKING:
    from evernear.release.manifest import ReleaseManifest


EMBEDDING_FIELD = "evernear-embedding"
"""The HTTP header or gRPC input that requests the embedding of the image."""


PIXELS_FIELD = "evernear-pixels"
"""The gRPC input with the prepared pixels of 1 to `MESSAGE_MAX_IMAGES` images, instead of an
image file. The response is a list of predictions."""
PREPROCESSING_FIELD = "evernear-preprocessing"
"""The preprocessing that the pixels have, in JSON."""
MESSAGE_MAX_IMAGES = 32


class Neighbor(Frozen, extra="ignore"):
    """A gallery image near the query.

    ``row`` is the row number in the release's gallery, from which `evernear.serving.gallery_images`
    finds the image.
    """

    label: str
    dist: float
    row: int


class Prediction(Frozen, extra="ignore"):
    """The prediction for one image.

    ``dist`` is the distance (0 to 2) to the nearest gallery image, whose label is ``pred``. If
    ``dist`` exceeds the release's threshold, the image is ``unknown``, and ``pred`` is only a
    guess. ``neighbors`` are sorted by distance.
    """

    pred: str
    dist: float
    unknown: bool
    neighbors: tuple[Neighbor, ...]
    version: str
    id: str = Field(default="", exclude_if=not_)
    """The request's id in the query log, to import the true label. Only from TorchServe."""
    embedding: str = Field(default="", exclude_if=not_)
    """The embedding of the image (`evernear.serving.query_log_files`) if requested."""

    def answer(self) -> str:
        return answer(self.pred, self.unknown)


def answer(pred: str, unknown: bool) -> str:
    """A prediction in words, the same in all commands and pages."""
    return f"unknown, nearest {pred}" if unknown else pred


def nearest(answer: Mapping[str, Any]) -> str:
    """The first neighbors of a `Prediction` in JSON, for a table."""
    return " ".join(f"{each['label']}:{each['dist']:.2f}" for each in answer["neighbors"][:3])


class Rejection(Frozen, extra="ignore"):
    """The reason why a request was rejected, in TorchServe's error format."""

    code: int = 400
    type: str = "BadImage"
    message: str
    version: str = Field(default="", exclude_if=not_)
    """The release that answers, if the pixels have another one's preprocessing."""


class Metadata(Frozen, extra="ignore"):
    """The public description of a release.

    Images are PNG, JPEG, WebP or HEIC files with at most ``max_pixels`` pixels. Images are resized
    to ``height_px`` x ``width_px`` pixels and converted to ``channels`` channels (1: grayscale, 3:
    RGB). An image is unknown if its distance exceeds ``threshold`` (0 to 2). ``metrics`` contains
    the metrics that the gate measured.
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

    @staticmethod
    def of(manifest: "ReleaseManifest", model: str) -> "Metadata":
        """``model`` is the model name that clients use."""
        fields = manifest.preprocessing.model_dump() | manifest.model_dump() | {"model": model}
        return Metadata.model_validate(fields)
