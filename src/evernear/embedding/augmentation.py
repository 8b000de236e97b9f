"""Random augmentation of whole batches: small affine and elastic deformations, and flips."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

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


Flip = Literal["horizontal", "vertical"]

DEGREES = 10.0
SCALE = 0.10
SHEAR = 0.10
SHIFT = 0.07
"""Largest shift as a fraction of the image's side, about 2 of 28 pixels."""
SHIFT_PER_32_PX = 2
"""Largest shift of `random_shift`, in pixels per 32 pixels of the image's side."""
MAX_DISPLACEMENT = 0.03
"""Largest displacement of a control point of an elastic deformation, as a fraction of the side."""
CONTROL_POINTS = 4
"""Control points along each side of the image."""


class Draws(NamedTuple):
    """Random numbers for each image, drawn on the CPU so that a GPU computes the same images.

    With ``batch_size``, the images are the part of a batch that starts at index ``first``. Numbers
    are drawn for the whole batch, so an image gets the same ones in any process.
    """

    generator: torch.Generator
    batch_size: int | None = None
    first: int = 0

    def uniform(self, count: int, *shape: int) -> Tensor:
        """In [0, 1), of shape (count, *shape)."""
        return self._slice(torch.rand(self.batch_size or count, *shape, generator=self.generator), count)

    def integers(self, high: int, count: int, *shape: int) -> Tensor:
        """In [0, ``high``), of shape (count, *shape)."""
        return self._slice(torch.randint(0, high, (self.batch_size or count, *shape), generator=self.generator), count)

    def _slice(self, numbers: Tensor, count: int) -> Tensor:
        return numbers[self.first : self.first + count]


def augment(images: Tensor, kind: str, draws: Draws) -> Tensor:
    """Augment each of ``images`` (N, C, H, W). ``kind`` is a value of ``train.augment``."""
    if kind == "none":
        return images
    if kind == "shift":
        return random_shift(images, draws)
    if kind == "photograph":
        return augment_photographs(images, draws.integers(2**31, len(images)).tolist(), mirror=False, erase=True)
    return random_affine(images, draws, elastic=kind == "elastic")


def random_shift(images: Tensor, draws: Draws) -> Tensor:
    """Shift each of ``images`` (N, C, H, W) by up to `SHIFT_PER_32_PX` whole pixels per 32 of its
    side.

    The border is filled with the image's reflection. Nothing is interpolated, because the blur of
    `random_affine` reduces accuracy on small photographs. This is the translation of airbench94
    (Jordan 2024, arXiv:2404.00498, section 3.5).
    """
    count, _, height, width = images.shape
    max_y, max_x = (max(1, round(side * SHIFT_PER_32_PX / 32)) for side in (height, width))
    padded = F.pad(images.to(torch.float32), (max_x, max_x, max_y, max_y), mode="reflect")
    top = draws.integers(2 * max_y + 1, count, 1, 1)
    left = draws.integers(2 * max_x + 1, count, 1, 1)
    rows = (top + torch.arange(height).reshape(1, -1, 1)).to(images.device)
    columns = (left + torch.arange(width).reshape(1, 1, -1)).to(images.device)
    indices = torch.arange(count, device=images.device).reshape(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[indices, rows, columns].permute(0, 3, 1, 2)


def random_affine(images: Tensor, draws: Draws, elastic: bool = False) -> Tensor:
    """Rotate, scale, shear and shift each of ``images`` (N, C, H, W) at random.

    With ``elastic``, also displace a coarse grid of control points, and interpolate between them
    with cubic splines (Ronneberger et al. 2015, section 3.1, arXiv:1505.04597; for digits, Simard
    et al. 2003, "Best Practices for Convolutional Neural Networks Applied to Visual Document
    Analysis"). Pixels outside the image repeat its border. The result is float, in the input's
    shape and value range.
    """
    count, _, height, width = images.shape
    amounts = draws.uniform(count, 6) * 2 - 1
    angle, shear = amounts[:, 0] * math.radians(DEGREES), amounts[:, 1] * SHEAR
    scale_x, scale_y = 1 + amounts[:, 2] * SCALE, 1 + amounts[:, 3] * SCALE
    # Coordinates range from -1 to 1, a length of 2. The aspect ratio keeps rotations rigid in
    # oblong images.
    shift_x, shift_y = amounts[:, 4] * 2 * SHIFT, amounts[:, 5] * 2 * SHIFT
    aspect = height / width
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([scale_x * cos, scale_x * (shear * cos - sin) * aspect, shift_x], dim=1)
    row_y = torch.stack([scale_y * sin / aspect, scale_y * (shear * sin + cos), shift_y], dim=1)
    theta = torch.stack([row_x, row_y], dim=1).to(images.device)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    if elastic:
        points = draws.uniform(count, 2, CONTROL_POINTS, CONTROL_POINTS) * 2 - 1
        displacement = F.interpolate(points * 2 * MAX_DISPLACEMENT, (height, width), mode="bicubic", align_corners=True)
        grid = grid + displacement.permute(0, 2, 3, 1).to(images.device)
    pixels = images.to(torch.float32)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def flip(images: Tensor, direction: Flip) -> Tensor:
    return images.flip(-1 if direction == "horizontal" else -2)


def random_flips(images: Tensor, directions: Sequence[Flip], draws: Draws) -> Tensor:
    """Mirror each of ``images`` (N, C, H, W) in each of ``directions`` with probability 0.5."""
    for direction in directions:
        mirrored = draws.uniform(len(images), 1, 1, 1) < 0.5
        images = torch.where(mirrored.to(images.device), flip(images, direction), images)
    return images
