"""Augmentation of a whole batch at once: small random maps, affine or elastic."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

DEGREES = 10.0
SCALE = 0.10
SHEAR = 0.10
SHIFT = 0.07
"""Share of the image's side: two pixels of 28."""
BEND = 0.03
"""The same, of each control point of an elastic map."""
CONTROL_POINTS = 4
"""On a side."""


def random_affine(images: Tensor, generator: torch.Generator, elastic: bool = False) -> Tensor:
    """Turn, scale, shear and shift each image of (N, C, H, W) a little, each by its own draw.

    ``elastic`` also bends it: displacements of a coarse grid of points, bicubic between them (Ronneberger et al.
    2015, section 3.1, arXiv:1505.04597; for digits Simard et al. 2003, "Best Practices for Convolutional Neural
    Networks Applied to Visual Document Analysis").

    Pixels from outside repeat the border. The numbers are drawn on the CPU, so a GPU sees the same images.

    Returns:
        Float images of the same shape, in the range of the input.
    """
    count, _, height, width = images.shape
    draws = torch.rand(count, 6, generator=generator) * 2 - 1
    angle, shear = draws[:, 0] * math.radians(DEGREES), draws[:, 1] * SHEAR
    scale_x, scale_y = 1 + draws[:, 2] * SCALE, 1 + draws[:, 3] * SCALE
    # Coordinates run over -1..1, a length of 2; the aspect keeps a turn a turn where the image is not square.
    shift_x, shift_y = draws[:, 4] * 2 * SHIFT, draws[:, 5] * 2 * SHIFT
    aspect = height / width
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([scale_x * cos, scale_x * (shear * cos - sin) * aspect, shift_x], dim=1)
    row_y = torch.stack([scale_y * sin / aspect, scale_y * (shear * sin + cos), shift_y], dim=1)
    maps = torch.stack([row_x, row_y], dim=1).to(images.device)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    if elastic:
        points = torch.rand(count, 2, CONTROL_POINTS, CONTROL_POINTS, generator=generator) * 2 - 1
        bent = F.interpolate(points * 2 * BEND, (height, width), mode="bicubic", align_corners=True)
        grid = grid + bent.permute(0, 2, 3, 1).to(images.device)
    pixels = images.to(torch.float32)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
