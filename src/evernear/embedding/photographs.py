"""Random augmentation of photographs, determined by image and seed.

Each image is cropped, and changed in color or shape by one random operation of random strength, the
"wide" variant of TrivialAugment, which needs no tuning (Müller and Hutter 2021, arXiv:2103.10158).
It may also be mirrored, or partly erased (Zhong et al. 2017, "Random Erasing Data Augmentation",
arXiv:1708.04896).
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evernear.common.step_results import code_digest
from evernear.data.shards import Block
from evernear.embedding import CODE
from evernear.embedding.data_loader import to_tensor

AREAS = (0.35, 1.0)
"""Smallest and largest area of a crop, as fractions of the image's area."""
ERASED_SHARE = 0.25
"""Share of the images in which a rectangle of 2% to 33% of the area is erased."""
ERASED_VALUE = 120
"""About the mean pixel value of photographs."""
LIBRARIES = ("torch", "torchvision")
"""Libraries whose versions affect the images."""


def augment_photographs(images: Tensor, seeds: list[int], mirror: bool, erase: bool = False) -> Tensor:
    """Augment uint8 ``images`` (N, C, H, W), each with its seed.

    With ``mirror``, about half are mirrored. With ``erase``, about a quarter lose a rectangle.
    torchvision draws from the global random number generator, so only one thread may call this.
    """
    augmented = torch.empty_like(images, device="cpu")
    transform = _transform(*images.shape[-2:], mirror, erase)
    with torch.random.fork_rng(devices=[]):
        for row, (image, seed) in enumerate(zip(images.cpu(), seeds, strict=True)):
            # `torch.manual_seed` also seeds the GPUs, which takes a millisecond even without one.
            torch.default_generator.manual_seed(seed)
            augmented[row] = transform(image)
    return augmented.to(images.device)


def augment_block(block: Block, view: int, mirror: bool) -> NDArray[np.uint8]:
    """The augmented images (N, H, W, C), the same for a given image and ``view``."""
    seeds = [int.from_bytes(digest[:8].tobytes(), "little", signed=True) ^ view for digest in block.digests]
    return augment_photographs(to_tensor(block.images), seeds, mirror).permute(0, 2, 3, 1).numpy()


def view_name(view: int, mirror: bool) -> str:
    """The name under which ``view`` is cached, which changes with the augmentation code."""
    return f"{code_digest(CODE, LIBRARIES)[:12]}-{'mirrored-' if mirror else ''}{view}"


@cache
def _transform(height: int, width: int, mirror: bool, erase: bool) -> nn.Module:
    from torchvision.transforms import InterpolationMode, v2  # takes seconds to import

    aspect = width / height
    return v2.Compose(
        [
            v2.RandomResizedCrop((height, width), AREAS, (aspect * 3 / 4, aspect * 4 / 3), antialias=True),
            v2.RandomHorizontalFlip(0.5 if mirror else 0.0),
            v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR),
            v2.RandomErasing(ERASED_SHARE if erase else 0.0, value=ERASED_VALUE),
        ]
    )
