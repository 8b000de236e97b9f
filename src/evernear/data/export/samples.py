"""Convert snapshot images to lossless PNG files, with names that preserve the order of
the images."""

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evernear.data.export.groups import SnapshotGroups
from evernear.data.manifest import Split
from evernear.data.preprocess import Pixels, pixels_digest
from evernear.data.shards import Block
from evernear.data.sources.names import exported_stem


@dataclass(frozen=True)
class Samples:
    """Consecutive images of a split. ``stems`` are unique in the split. ``embeddings``
    is a float32 array of shape (N, D). ``groups`` is None if the export has no
    groups."""

    split: Split
    stems: list[str]
    images: list[bytes]
    """PNG files."""
    labels: list[str]
    numbers: list[int]
    """The label numbers in the manifest."""
    digests: list[str]
    embeddings: NDArray[np.float32] | None
    groups: list[str] | None = None
    """The group of each image, or an empty string for an image without a group."""

    def __len__(self) -> int:
        return len(self.stems)


def samples_of(
    block: Block,
    embeddings: NDArray[np.float32] | None,
    split: Split,
    first: int,
    labels: tuple[str, ...],
    groups: SnapshotGroups | None,
) -> Samples:
    """Convert a block to samples. ``first`` is the position of the block's first image
    in the split."""
    digests = [digest.tobytes() for digest in block.digests]
    numbers = block.labels.tolist()
    return Samples(
        split=split,
        stems=[exported_stem(position, digest.hex()) for position, digest in enumerate(digests, first)],
        images=[_png(pixels, digest) for pixels, digest in zip(block.images, digests, strict=True)],
        labels=[labels[number] for number in numbers],
        numbers=numbers,
        digests=[digest.hex() for digest in digests],
        embeddings=embeddings,
        groups=groups.of(digests) if groups else None,
    )


def _png(pixels: Pixels, digest: bytes) -> bytes:
    """Encode an image of shape (H, W, C) as a PNG file. The file is gray if the
    original image was gray, so that the digest remains ``digest``."""
    height_px, width_px, channels = pixels.shape
    gray = pixels[..., 0]
    if channels > 1 and not (
        (pixels == gray[..., None]).all() and pixels_digest("L", width_px, height_px, gray.tobytes()) == digest
    ):
        gray = pixels
    buffer = BytesIO()
    Image.fromarray(gray).save(buffer, "PNG")
    return buffer.getvalue()
