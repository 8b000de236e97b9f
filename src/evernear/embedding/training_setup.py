"""Initialize the network of a training run, its optimizer and its state."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding import distributed
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.architecture import Architecture
from evernear.embedding.checkpoint import TrainingState, checkpoint_key
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.freeze import choose_architecture, initialize
from evernear.embedding.image_vectors import OnImages
from evernear.embedding.network import build_network
from evernear.embedding.recipe import (
    Recipe,
    choose_average,
    choose_micro_batches,
    choose_optimizer,
    choose_precision,
    ema_decay,
    recipe_of_head,
    steps_per_epoch,
)


@dataclass(frozen=True)
class Training:
    recipe: Recipe
    dataset_digest: str
    exclude_labels: frozenset[str]
    images: TrainingImages
    device: torch.device
    architecture: Architecture
    pretrained_sha256: str | None
    module: TrainingModule
    forward: nn.Module
    """``module``, or its wrapper that averages the gradients of all processes."""
    optimizer: torch.optim.Optimizer
    scaler: torch.GradScaler
    batch_size: int
    """Images per step in this process."""
    micro_batches: int
    steps_per_epoch: int
    state: TrainingState
    """Includes the weights' running average if the recipe averages them."""
    key: str
    """Key of the checkpoint."""

    def adapt_decay(self, progress: float) -> None:
        """Adapt weight decay and average to the number of steps that the time allows, at
        ``progress`` after at least one epoch."""
        planned = self.recipe.epochs * self.steps_per_epoch
        expected = sum(epoch.steps for epoch in self.state.history) / progress
        if self.recipe.ema_decay:
            self.state.average_over(ema_decay(expected))
        for group in self.optimizer.param_groups if self.recipe.decays_by_steps else ():
            if group["weight_decay"]:
                group["weight_decay"] = self.recipe.weight_decay * planned / expected


def prepare_training(
    dataset: Dataset,
    recipe: Recipe,
    exclude_labels: frozenset[str],
    device: torch.device,
    store: Store | None = None,
    on_images: OnImages | None = None,
    start: bool = True,
) -> Training:
    """Without ``start``, the last layer of a pretrained network is random, which suffices if
    training continues from a checkpoint."""
    _, world_size = distributed.rank_and_world_size()
    precision = choose_precision(device, recipe.precision)
    images = TrainingImages(dataset, exclude_labels)
    batch_size = max(2, min(recipe.batch_size, images.count) // world_size)

    torch.manual_seed(recipe.seed)
    architecture = choose_architecture(dataset, recipe)
    network = build_network(architecture)
    module = TrainingModule(architecture, images.classes, recipe.scale, recipe.label_smoothing, precision, network)
    pretrained_sha256 = initialize(network, architecture, recipe, dataset)
    if architecture.pretrained and start:
        from evernear.embedding.features import FrozenFeatures  # timm takes seconds to import
        from evernear.embedding.head import start_at_head, train_head

        features = FrozenFeatures(network, architecture, store, on_images)
        of_head = recipe_of_head(recipe, architecture.embedding_dim, dataset)
        start_at_head(module, train_head(features, architecture, dataset, images, of_head))
    if recipe.trained_layers == "last":
        from evernear.embedding.stages import freeze_first_stages

        freeze_first_stages(module)
    module = module.to(device)
    forward = DistributedDataParallel(module) if world_size > 1 else module
    micro_batches = choose_micro_batches(module, architecture, batch_size, device)
    optimizer = choose_optimizer(module, recipe, precision)
    scaler = torch.GradScaler(device.type, enabled=precision == torch.float16)
    return Training(
        recipe=recipe,
        dataset_digest=dataset.digest,
        exclude_labels=exclude_labels,
        images=images,
        device=device,
        architecture=architecture,
        pretrained_sha256=pretrained_sha256,
        module=module,
        forward=forward,
        optimizer=optimizer,
        scaler=scaler,
        batch_size=batch_size,
        micro_batches=micro_batches,
        steps_per_epoch=steps_per_epoch(recipe, images.count, batch_size * world_size),
        state=TrainingState(module, optimizer, scaler, choose_average(module, recipe)),
        key=checkpoint_key(dataset.digest, recipe, exclude_labels, pretrained_sha256),
    )
