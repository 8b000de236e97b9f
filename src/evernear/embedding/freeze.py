"""The initial network of a training run, and the frozen network, which is not trained at all."""

from pathlib import Path
from typing import Any

import torch

from evernear.common.store import Store, open_store
from evernear.data.shards import Dataset
from evernear.embedding.architecture import Architecture
from evernear.embedding.artifact import HISTORY_FILE, TrainedNetwork, TrainingResult, save_trained
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.image_vectors import OnImages
from evernear.embedding.network import MEMBERS, EmbeddingNetwork, build_network, choose_patch
from evernear.settings import TrainSettings


def choose_architecture(dataset: Dataset, settings: TrainSettings) -> Architecture:
    """The architecture for ``dataset``, with the preprocessing of pretrained weights if ``train.weights`` is set.

    The standard deviation has a lower bound, for channels without contrast.

    Raises:
        TrainingError: ``train.backbone`` is unknown or does not fit the other settings.
    """
    options = _timm_options(dataset, settings)
    if "mean" not in options:
        mean, std = dataset.mean_std("train")
        options |= {"mean": mean, "std": tuple(max(deviation, 1 / 255) for deviation in std)}
    values: dict[str, Any] = {
        "shape": dataset.shape,
        "patch_px": settings.patch_px or choose_patch(*dataset.shape[:2]),
        "width": settings.width,
        "embedding_dim": settings.embedding_dim,
        "members": settings.members,
    }
    return Architecture(**values | options)


def _timm_options(dataset: Dataset, settings: TrainSettings) -> dict[str, Any]:
    if not settings.weights and not settings.frozen and settings.backbone in ("auto", *MEMBERS):
        return {} if settings.backbone == "auto" else {"backbone": settings.backbone}
    from evernear.embedding.backbone import (  # timm takes seconds to import
        choose_backbone,
        choose_input,
        feature_dim,
        pretrained_mean_std,
    )

    name = choose_backbone(settings)
    options: dict[str, Any] = {"backbone": name, "input": choose_input(name, dataset.shape, settings)}
    if settings.weights:
        options["mean"], options["std"] = pretrained_mean_std(name, dataset.shape[2])
    if settings.frozen:
        options |= {"frozen": True, "embedding_dim": feature_dim(name)}
    return options


def initialize(
    network: EmbeddingNetwork, architecture: Architecture, settings: TrainSettings, dataset: Dataset
) -> str | None:
    """Load the pretrained weights of ``settings`` into ``network``; return the sha256 of their file.

    The store of ``dataset`` may have a copy of the weights; see `evernear.embedding.weights`.

    Raises:
        TrainingError: the weights cannot be read or belong to another architecture.
        StoreError: the weights cannot be fetched.
    """
    if not settings.weights:
        return None
    from evernear.embedding.backbone import load_weights
    from evernear.embedding.weights import read_weights

    store = open_store(dataset.manifest.store_uri) if dataset.manifest.store_uri else None
    weights = read_weights(settings.weights, architecture.backbone, store)
    load_weights(network, architecture, weights)
    return weights.sha256


def freeze(
    dataset: Dataset,
    settings: TrainSettings,
    out_dir: Path,
    store: Store | None = None,
    exclude_labels: frozenset[str] = frozenset(),
    on_images: OnImages | None = None,
) -> TrainingResult:
    """Write a network with a frozen backbone to ``out_dir``, in the form of a trained one.

    The whitening of its features is fitted to the train split. With a ``store``, the features of all splits are
    computed and cached there, so that later steps only read them.

    Raises:
        TrainingError: as `choose_architecture` and `initialize`; or there are too few images.
        StoreError: the weights cannot be fetched or ``out_dir`` cannot be written.
    """
    from evernear.embedding.backbone import whiten
    from evernear.embedding.features import FrozenFeatures

    images = TrainingImages(dataset, exclude_labels)
    torch.manual_seed(settings.seed)
    architecture = choose_architecture(dataset, settings)
    network = build_network(architecture)
    pretrained_sha256 = initialize(network, architecture, settings, dataset)
    features = FrozenFeatures(network, architecture, store, on_images)
    whiten(network, features.batches(dataset, "train", images), images.classes)
    features.compute(dataset, ("gallery", "query", "test"))
    trained = TrainedNetwork(
        architecture=architecture,
        dataset_digest=dataset.digest,
        exclude_labels=tuple(sorted(exclude_labels)),
        settings=settings,
        pretrained_sha256=pretrained_sha256,
    )
    save_trained(out_dir, network.state_dict(), trained)
    result = TrainingResult(
        key="",
        best_epoch=0,
        stopped_early=False,
        resumed_after_epoch=0,
        epochs=(),
        chance_accuracy=images.chance_accuracy,
    )
    result.save(out_dir / HISTORY_FILE)
    return result
