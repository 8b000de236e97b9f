"""Augmentation of a whole batch at once: small random affine maps, and warps on top of them."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

DEGREES = 10.0
SCALE = 0.10
SHEAR = 0.10
SHIFT = 0.07
"""Share of the image's side: two pixels of 28."""
WARP = 0.055
"""Standard deviation of a warp, as a share of the image's side: 1.5 pixels of 28."""
WARP_KNOTS = 4
"""A warp is drawn at so many points a side and is smooth between them."""


def random_affine(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, scale, shear and shift each image of (N, C, H, W) a little, each by its own draw.

    Pixels from outside repeat the border. The numbers are drawn on the CPU, so a GPU sees the same images.

    Returns:
        Float images of the same shape, in the range of the input.
    """
    return _sample(images, _affine_grid(images, generator))


def random_elastic(images: Tensor, generator: torch.Generator) -> Tensor:
    """`random_affine`, and a smooth warp of each image's plane.

    For handwriting, whose strokes bend from hand to hand (Simard, Steinkraus and Platt 2003, "Best Practices for
    Convolutional Neural Networks Applied to Visual Document Analysis"); their Gaussian filter over a full field of
    draws is a bicubic interpolation between a few here, which costs next to nothing.

    Returns:
        Float images of the same shape, in the range of the input.
    """
    count, _, height, width = images.shape
    grid = _affine_grid(images, generator)
    knots = torch.randn(count, 2, WARP_KNOTS, WARP_KNOTS, generator=generator) * 2 * WARP
    warp = F.interpolate(knots.to(images.device), size=(height, width), mode="bicubic", align_corners=True)
    return _sample(images, grid + warp.permute(0, 2, 3, 1))


def _affine_grid(images: Tensor, generator: torch.Generator) -> Tensor:
    """Where each output pixel comes from, (N, H, W, 2); coordinates run over -1..1, a length of 2."""
    count, _, height, width = images.shape
    draws = torch.rand(count, 6, generator=generator) * 2 - 1
    angle, shear = draws[:, 0] * math.radians(DEGREES), draws[:, 1] * SHEAR
    scale_x, scale_y = 1 + draws[:, 2] * SCALE, 1 + draws[:, 3] * SCALE
    shift_x, shift_y = draws[:, 4] * 2 * SHIFT, draws[:, 5] * 2 * SHIFT
    aspect = height / width  # keeps a turn a turn where the image is not square
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([scale_x * cos, scale_x * (shear * cos - sin) * aspect, shift_x], dim=1)
    row_y = torch.stack([scale_y * sin / aspect, scale_y * (shear * sin + cos), shift_y], dim=1)
    maps = torch.stack([row_x, row_y], dim=1).to(images.device)
    return F.affine_grid(maps, list(images.shape), align_corners=False)


def _sample(images: Tensor, grid: Tensor) -> Tensor:
    pixels = images.to(torch.float32)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


AUGMENTATIONS: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "none": lambda images, generator: images,
    "affine": random_affine,
    "elastic": random_elastic,
}
"""By the name that ``train.augment`` calls them."""
