"""Create a training run's initial network, or a network whose backbone is not trained."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from evernear.common.store import Store, open_store
from evernear.data.manifest import Split
from evernear.data.shards import Dataset
from evernear.embedding.artifact import HISTORY_FILE, TrainedNetwork, TrainingResult, save_trained
from evernear.embedding.clock import Clock, OnStep
from evernear.embedding.data_loader import OnImages, TrainingImages
from evernear.embedding.network import MEMBERS, Architecture, EmbeddingNetwork, build_network, choose_patch
from evernear.embedding.recipe import Recipe

if TYPE_CHECKING:  # timm takes seconds to import
    from evernear.embedding.features import FrozenFeatures
    from evernear.embedding.head import Head
    from evernear.embedding.timm_member import TimmMember


def choose_architecture(dataset: Dataset, recipe: Recipe) -> Architecture:
    """With ``train.weights``, the architecture includes the weights' preprocessing. Each channel's
    standard deviation has a lower bound, because the channel may have no contrast."""
    options = _timm_options(dataset, recipe)
    if "mean" not in options:
        mean, std = dataset.mean_std("train")
        options |= {"mean": mean, "std": tuple(max(deviation, 1 / 255) for deviation in std)}
    values: dict[str, Any] = {
        "shape": dataset.shape,
        "patch_px": recipe.patch_px or choose_patch(*dataset.shape[:2]),
        "width": recipe.width,
        "embedding_dim": _embedding_dim(recipe),
        "members": recipe.members,
    }
    return Architecture(**values | options)


def _embedding_dim(recipe: Recipe) -> int:
    default = 256 if recipe.weights else 128
    return recipe.embedding_dim or math.ceil(default / recipe.members) * recipe.members


def _timm_options(dataset: Dataset, recipe: Recipe) -> dict[str, Any]:
    if not recipe.weights and not recipe.frozen and recipe.backbone in (None, *MEMBERS):
        return {"backbone": recipe.backbone} if recipe.backbone else {}
    from evernear.embedding.backbone import (  # timm takes seconds to import
        choose_backbone,
        choose_input,
        features_of,
        pretrained_mean_std,
    )

    name = choose_backbone(recipe)
    options: dict[str, Any] = {"backbone": name, "input": choose_input(name, dataset.shape, recipe)}
    if recipe.weights:
        features = features_of(name)
        options["mean"], options["std"] = pretrained_mean_std(name, dataset.shape[2])
        options["frozen"] = recipe.keeps_backbone
        options["pretrained"] = not recipe.keeps_backbone and recipe.members == 1
        if options["frozen"] or options["pretrained"]:
            options["embedding_dim"] = features if recipe.frozen else min(_embedding_dim(recipe), features)
    return options


def initialize(network: EmbeddingNetwork, architecture: Architecture, recipe: Recipe, dataset: Dataset) -> str | None:
    """Load the pretrained weights of ``recipe``, and return the sha256 of their file."""
    if not recipe.weights:
        return None
    from evernear.embedding.backbone import load_weights, read_weights

    store = open_store(dataset.manifest.store_uri) if dataset.manifest.store_uri else None
    weights = read_weights(recipe.weights, architecture.backbone, store)
    load_weights(network, architecture, weights)
    return weights.sha256


class Pretrained(NamedTuple):
    """Its backbone does not change, and its last layer is not fitted yet."""

    network: EmbeddingNetwork
    architecture: Architecture
    features: "FrozenFeatures"
    weights_sha256: str | None

    @property
    def member(self) -> "TimmMember":
        return cast("TimmMember", self.network.members[0])


def open_pretrained(
    dataset: Dataset, recipe: Recipe, store: Store | None = None, on_images: OnImages | None = None
) -> Pretrained:
    """Load the pretrained network of ``recipe``. Its features are cached in ``store``."""
    from evernear.embedding.features import FrozenFeatures

    torch.manual_seed(recipe.seed)
    architecture = choose_architecture(dataset, recipe)
    network = build_network(architecture)
    weights_sha256 = initialize(network, architecture, recipe, dataset)
    return Pretrained(network, architecture, FrozenFeatures(network, architecture, store, on_images), weights_sha256)


def fit_last_layer(
    pretrained: Pretrained,
    dataset: Dataset,
    images: TrainingImages,
    recipe: Recipe,
    on_step: OnStep | None = None,
    clock: Clock | None = None,
) -> "Head | None":
    """Fit the last layer to the train split: a head or, with ``recipe.frozen``, a whitening map."""
    from evernear.embedding.head import train_head, whitening_for

    features = pretrained.features
    if recipe.frozen:
        pretrained.member.standardize = whitening_for(features, dataset, images)
        return None
    head = train_head(features, pretrained.architecture, dataset, images, recipe, on_step, clock)
    pretrained.member.standardize = head.map
    return head


def freeze(
    dataset: Dataset,
    recipe: Recipe,
    out_dir: Path,
    store: Store | None = None,
    exclude_labels: frozenset[str] = frozenset(),
    on_images: OnImages | None = None,
    on_step: OnStep | None = None,
    clock: Clock | None = None,
) -> TrainingResult:
    """Write a network with a frozen backbone to ``out_dir``, in the format of a trained network.

    With ``store``, the features of all splits are cached there, so that later steps only read them.
    """
    from evernear.embedding.timm_member import whitening_of

    images, clock = TrainingImages(dataset, exclude_labels), clock or Clock()
    others: list[Split] = ["gallery", "query", "test"]
    clock.passes_after = sum(map(dataset.count, others)) / dataset.count("train")
    pretrained = open_pretrained(dataset, recipe, store, clock.required(dataset.count("train"), on_images))
    head = fit_last_layer(pretrained, dataset, images, recipe, on_step, clock)
    pretrained.features.compute(dataset, others)
    embedding_dim = whitening_of(pretrained.network).matrix.shape[1]
    trained = TrainedNetwork(
        architecture=pretrained.architecture.model_copy(update={"embedding_dim": embedding_dim}),
        dataset_digest=dataset.digest,
        exclude_labels=tuple(sorted(exclude_labels)),
        recipe=recipe,
        pretrained_sha256=pretrained.weights_sha256,
    )
    save_trained(out_dir, pretrained.network.state_dict(), trained)
    result = TrainingResult(
        key="",
        best_epoch=0,
        resumed_after_epoch=0,
        epochs=(),
        chance_accuracy=images.chance_accuracy,
        views=head.views if head else 0,
        warnings=head.warnings if head else (),
    )
    result.save(out_dir / HISTORY_FILE)
    return result
