"""The hash of pretrained weights, if possible without torch, which takes seconds to load."""

from pathlib import Path

from evernear.common.disk import sha256_file
from evernear.common.store import Store
from evernear.settings.train import TrainingChoices, weight_package


def weights_sha256(settings: TrainingChoices, store: Store) -> str | None:
    """The sha256 of the file that ``train.weights`` names, or None without weights."""
    if not settings.weights:
        return None
    if package := weight_package(settings.weights):
        return package.sha256
    if (path := Path(settings.weights)).is_file():
        return sha256_file(path)
    from evernear.embedding.backbone import choose_backbone  # timm takes seconds to import
    from evernear.embedding.weights import read_weights

    return read_weights(settings.weights, choose_backbone(settings), store).sha256
