"""Ask the live release about images that may be in its gallery."""

from collections import Counter
from typing import NamedTuple

from evernear.data.image_file import inspect
from evernear.data.preprocess import decode_inspected
from evernear.index.description import DISTANCE_TOLERANCE
from evernear.release.manifest import ReleaseManifest
from evernear.serving.gallery_images import GalleryImages
from evernear.serving.responses import Neighbor, Prediction
from evernear.settings.section import MAX_PIXELS


class AnswerOfOthers(NamedTuple):
    """The label that the other gallery images give to an image, and whether it is unknown."""

    label: str
    unknown: bool


def answer_of_others(
    prediction: Prediction, image: bytes, gallery: GalleryImages, release: ReleaseManifest
) -> AnswerOfOthers | None:
    """Leave ``image`` out of its own neighbors, because a gallery recognizes each of its own
    images. None if the prediction lists no other neighbor (``index.k=1``).

    The other neighbors vote. If the release labels by centroids, which the neighbors of the
    prediction contradict, the label of the prediction is kept.

    Raises:
        DataError: the image is broken.
        IntegrityError: the release's gallery is damaged.
    """
    nearest = prediction.neighbors[0].dist if prediction.neighbors else 0.0
    itself = decode_inspected(inspect(image, MAX_PIXELS), release.preprocessing.bit_depth).digest().hex()
    others = [
        near
        for near in prediction.neighbors
        if near.dist > nearest + DISTANCE_TOLERANCE or not _shows(near, itself, release.version, gallery)
    ]
    if not others:
        return None
    label = _vote(others) if _vote(prediction.neighbors) == prediction.pred else prediction.pred
    return AnswerOfOthers(label, others[0].dist > release.threshold)


def _shows(near: Neighbor, digest: str, version: str, gallery: GalleryImages) -> bool:
    found = gallery.find(version, near.row)
    return found is not None and found.digest == digest


def _vote(neighbors: tuple[Neighbor, ...] | list[Neighbor]) -> str:
    """The most common label. The nearest neighbor wins a tie."""
    return Counter(near.label for near in neighbors).most_common(1)[0][0]
