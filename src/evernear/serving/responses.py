"""The bodies of all responses. Clients parse them,
so this module imports neither torch, FAISS nor NumPy.
"""

from datetime import datetime
from operator import not_
from typing import TYPE_CHECKING

from pydantic import Field

from evernear.common.frozen import Frozen

if TYPE_CHECKING:
    from evernear.release.manifest import ReleaseManifest


NO_ROW = -1
EMBEDDING_FIELD = "evernear-embedding"
"""The HTTP header or gRPC input with which a client requests the embedding of its
image.
"""


class Neighbor(Frozen, extra="ignore"):
    """A gallery image near the query.

    ``row`` is the row in the release's gallery, which leads to the image
    (`evernear.serving.gallery_images`). In responses of servers from an earlier
    version, the row is absent and -1 here.
    """

    label: str
    dist: float
    row: int = Field(default=NO_ROW, exclude_if=lambda row: row == NO_ROW)


class Prediction(Frozen, extra="ignore"):
    """The prediction for one image.

    ``dist`` is the L2 distance of unit vectors (0..2) to the nearest gallery image.
    Beyond the release's threshold, the image is ``unknown``, and ``pred`` is only a
    guess. ``neighbors`` are sorted by distance.
    """

    pred: str
    dist: float
    unknown: bool
    neighbors: tuple[Neighbor, ...]
    version: str
    id: str = Field(default="", exclude_if=not_)
    """The request's id in the query log, to import its true label later.
    Absent without TorchServe.
    """
    embedding: str = Field(default="", exclude_if=not_)
    """The embedding of the image (`evernear.serving.embedding_codec`),
    if the request asks for it.
    """


class Rejection(Frozen, extra="ignore"):
    """The reason why a request gets no prediction,
    in the format of TorchServe's errors.
    """

    code: int = 400
    type: str = "BadImage"
    message: str


class Metadata(Frozen, extra="ignore"):
    """The public description of a release.

    Images are PNG, JPEG or WebP files of at most ``max_pixels``. They are resized to
    ``height_px`` x ``width_px`` and converted to ``channels`` (1: gray, 3: RGB). Beyond
    ``threshold`` (L2 of unit vectors, 0..2), an image is unknown. ``metrics`` contains
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
        """Select the public fields of a manifest.
        ``model`` is the name that clients use.
        """
        fields = manifest.preprocessing.model_dump() | manifest.model_dump() | {"model": model}
        return Metadata.model_validate(fields)
