"""Training images that join the gallery; see docs/decisions/0002-splits-and-gallery.md."""

from collections.abc import Collection

from evernear.data.manifest import Manifest

MIN_GALLERY_IMAGES = 10
"""A class with fewer images in the gallery is filled up to this number with train images."""


def joining_gallery(manifest: Manifest, untrained: Collection[str] = ()) -> dict[str, int]:
    """The number of train images of each label that join the gallery, as many as there are.

    ``untrained`` are classes that the network was not trained on: all their train images join.
    """
    gallery = manifest.label_counts("gallery")
    return {
        label: count if label in untrained else min(count, max(0, MIN_GALLERY_IMAGES - gallery[label]))
        for label, count in manifest.label_counts("train").items()
    }
