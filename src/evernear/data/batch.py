"""Batches of images that are passed from a source to a shard."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from evernear.data.decoding import ImageForm
from evernear.data.manifest import Split
from evernear.data.preprocess import Pixels, pixels_digest, to_array
from evernear.data.sources import ArrayBlock

_MAX_IMAGES = 500
_MAX_BYTES = 16 * 2**20


def images_at_once(form: ImageForm) -> int:
    return max(1, min(_MAX_IMAGES, _MAX_BYTES // math.prod(form.shape)))


@dataclass(frozen=True)
class Batch:
    """Images that are ready for a shard: ``pixels`` is a uint8 array of shape (N, H, W, C), in
    which each image has the dataset's shape."""

    names: Sequence[str]
    labels: Sequence[str]
    explicit_splits: Sequence[Split | None]
    digests: Sequence[bytes]
    widths_px: Sequence[int]
    heights_px: Sequence[int]
    flaws: Sequence[int]
    pixels: Pixels
    former_splits: Mapping[str, Split] = field(default_factory=dict[str, Split])
    """Maps file names to former splits, for unchanged files that are decoded again."""

    @classmethod
    def of_arrays(cls, block: ArrayBlock, form: ImageForm) -> "Batch":
        """Make a batch of images that a source provides as decoded arrays. Pillow is only used to
        resize the images."""
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
            widths_px=[width] * count,
            heights_px=[height] * count,
            flaws=(flat.min(axis=1) == flat.max(axis=1)).astype(int).tolist(),
            pixels=pixels,
        )
