"""Random augmentation of photographs: a crop, a mirror image and an operation on color or shape.

Large crops and one random operation with a random strength are the augmentation of TrivialAugment (Müller and Hutter
2021, arXiv:2103.10158), in its "wide" variant, which needs no tuning. An image and a seed determine the result.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evernear.common.code_digest import code_digest
from evernear.data.shards import Block
from evernear.embedding.data_loader import to_tensor

AREAS = (0.35, 1.0)
"""Areas of the crops, as fractions of the image's."""
LIBRARIES = ("torch", "torchvision")
"""Libraries whose versions affect the images."""


def augment_photographs(images: Tensor, seeds: list[int], mirror: bool) -> Tensor:
    """Augment images (N, C, H, W) of uint8, each by its seed. With ``mirror``, about every second one is mirrored.

    torchvision draws from the global random number generator, so only one thread may call this.
    """
    augmented = torch.empty_like(images, device="cpu")
    transform = _transform(*images.shape[-2:], mirror)
    with torch.random.fork_rng(devices=[]):
        for row, (image, seed) in enumerate(zip(images.cpu(), seeds, strict=True)):
            torch.manual_seed(seed)
            augmented[row] = transform(image)
    return augmented.to(images.device)


def augment_block(block: Block, view: int, mirror: bool) -> NDArray[np.uint8]:
    """The augmented ``view`` of the images (N, H, W, C) of ``block``: an image always gets the same one."""
    seeds = [int.from_bytes(digest[:8].tobytes(), "little", signed=True) ^ view for digest in block.digests]
    return augment_photographs(to_tensor(block.images), seeds, mirror).permute(0, 2, 3, 1).numpy()


def view_name(view: int, mirror: bool) -> str:
    """The name of the augmented ``view``, under which its features are cached: another augmentation has another one."""
    return f"{code_digest(__name__, LIBRARIES)[:12]}-{'mirrored-' if mirror else ''}{view}"


@cache
def _transform(height: int, width: int, mirror: bool) -> nn.Module:
    from torchvision.transforms import InterpolationMode, v2  # takes seconds to import

    aspect = width / height
    return v2.Compose(
        [
            v2.RandomResizedCrop((height, width), AREAS, (aspect * 3 / 4, aspect * 4 / 3), antialias=True),
            v2.RandomHorizontalFlip(0.5 if mirror else 0.0),
            v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR),
        ]
    )
