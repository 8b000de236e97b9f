"""Batches of images that are passed from a source to a shard."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from evernear.data.decoding import DecodedImage, ImageForm
from evernear.data.manifest import Split
from evernear.data.preprocess import Flaw, Pixels, pixels_digest, to_array
from evernear.data.sources import ArrayBlock

_MAX_IMAGES = 256
_MAX_BYTES = 16 * 2**20


def images_at_once(form: ImageForm) -> int:
    """The number of images in a batch. Batches of larger images have fewer images."""
    return max(1, min(_MAX_IMAGES, _MAX_BYTES // math.prod(form.shape)))


@dataclass(frozen=True)
class Batch:
    """Images that are ready for a shard: ``pixels`` is a uint8 array of shape (N, H, W,
    C), in which each image has the dataset's shape.
    """

    names: list[str]
    labels: list[str]
    explicit_splits: list[Split | None]
    digests: list[bytes]
    sizes: list[tuple[int, int]]
    flaws: list[Flaw]
    pixels: Pixels
    former_splits: Mapping[str, Split] = field(default_factory=dict[str, Split])
    """Maps file names to former splits, for unchanged files that are decoded again."""

    @classmethod
    def of_arrays(cls, block: ArrayBlock, form: ImageForm) -> "Batch":
        """Make a batch of images that a source provides as decoded arrays. Pillow is
        only used to resize the images.
        """
        shape, resize = form.shape, form.resize
        count, height, width = block.images.shape
        flat = block.images.reshape(count, -1)
        if (height, width) == shape[:2]:
            pixels = np.repeat(block.images[..., None], shape[2], axis=3)
        else:
            pixels = np.stack([to_array(Image.fromarray(image), *shape, resize) for image in block.images])
        return cls(
            names=block.names,
            labels=block.labels,
            explicit_splits=[block.explicit_split] * count,
            digests=[pixels_digest("L", width, height, row.tobytes()) for row in flat],
            sizes=[(width, height)] * count,
            flaws=[Flaw(int(constant)) for constant in flat.min(axis=1) == flat.max(axis=1)],
            pixels=pixels,
        )

    @classmethod
    def of_files(cls, images: list[DecodedImage], former_splits: Mapping[str, Split]) -> "Batch":
        """Make a batch of images that were decoded from image files."""
        return cls(
            names=[image.entry.name for image in images],
            labels=[image.entry.label for image in images],
            explicit_splits=[image.entry.explicit_split for image in images],
            digests=[image.digest for image in images],
            sizes=[image.size for image in images],
            flaws=[image.flaws for image in images],
            pixels=np.stack([image.pixels for image in images]),
            former_splits=former_splits,
        )
