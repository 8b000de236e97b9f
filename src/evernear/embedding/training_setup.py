"""Initialize the network of a training run, its optimizer and its state."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evernear.common.frozen import FORMAT, require_stamp, stamp
from evernear.common.step_results import code_digest
from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding import CODE, distributed
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.artifact import Epoch, from_bytes, to_bytes
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.freeze import choose_architecture, initialize
from evernear.embedding.loss import loss_sha256
from evernear.embedding.network import Architecture, build_network
from evernear.embedding.optimizer import choose_average, choose_micro_batches, choose_optimizer, choose_precision
from evernear.embedding.recipe import Recipe, ema_decay, steps_per_epoch
from evernear.errors import TrainingError
from evernear.settings.train import TrainingChoices

LIBRARIES = ("numpy", "timm", "torch")
"""Libraries whose versions affect the weights."""


class TrainingState:
    """Everything that changes during training.

    The best weights follow the one-standard-error rule (Breiman et al. 1984, "Classification and
    Regression Trees", section 3.4.3), applied to epochs: the latest whose gallery accuracy is
    within one standard error of the highest. On a small gallery, the highest is partly luck, and a
    schedule that ends at a learning rate of zero makes later weights better. Accuracy decides
    rather than loss, which can rise with the network's confidence in a few wrong answers while
    their number still falls (Guo et al. 2017, "On Calibration of Modern Neural Networks", section
    3, arXiv:1706.04599).
    """

    def __init__(
        self,
        module: TrainingModule,
        optimizer: torch.optim.Optimizer,
        scaler: torch.GradScaler,
        average: AveragedModel | None = None,
    ) -> None:
        self.history: list[Epoch] = []
        self.best_epoch = 0
        self.best_weights: dict[str, Tensor] = {}
        self._module, self._optimizer, self._scaler, self._average = module, optimizer, scaler, average

    @property
    def result(self) -> TrainingModule:
        """The module to measure and save: the averaged one if weights are averaged."""
        return self._module if self._average is None else cast(TrainingModule, self._average.module)

    def count_step(self) -> None:
        if self._average is not None:
            self._average.update_parameters(self._module)

    def average_over(self, decay: float) -> None:
        if self._average is not None:
            self._average.multi_avg_fn = get_ema_multi_avg_fn(decay)

    @property
    def is_finished(self) -> bool:
        return bool(self.history) and self.history[-1].progress >= 1

    def record(self, metrics: Epoch) -> None:
        """Add a finished epoch, and copy its weights if they are the best so far."""
        self.history.append(metrics)
        highest = max(self.history, key=lambda epoch: epoch.gallery_accuracy)
        if metrics.gallery_accuracy >= highest.gallery_accuracy - highest.gallery_accuracy_error:
            self.best_epoch = metrics.epoch
            weights = self.result.network.state_dict()
            self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}

    def final_checkpoint(self) -> dict[str, Any]:
        history = [metrics.model_dump() for metrics in self.history]
        return {"history": history, "best_epoch": self.best_epoch, "best_weights": self.best_weights}

    def resume_state(self) -> dict[str, Any]:
        """The part of a checkpoint that only unfinished training needs."""
        return {
            "module": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "average": self._average.state_dict() if self._average is not None else {},
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        self.history = [Epoch(**metrics) for metrics in checkpoint["history"]]
        self.best_epoch, self.best_weights = checkpoint["best_epoch"], checkpoint["best_weights"]
        if "optimizer" in checkpoint:
            self._module.load_state_dict(checkpoint["module"])
            self._optimizer.load_state_dict(checkpoint["optimizer"])
            self._scaler.load_state_dict(checkpoint["scaler"])
            if self._average is not None:
                self._average.load_state_dict(checkpoint["average"])


def checkpoint_key(
    dataset_digest: str,
    settings: TrainingChoices,
    exclude_labels: frozenset[str],
    pretrained_sha256: str | None = None,
) -> str:
    """A hash of everything that determines the weights: data, settings, initial weights, excluded
    labels, and code, also of the loss."""
    inputs = {
        "format": FORMAT,
        "dataset": dataset_digest,
        "settings": settings.model_dump(mode="json"),
        "exclude_labels": sorted(exclude_labels),
        "pretrained": pretrained_sha256,
        "code": code_digest(CODE, LIBRARIES),
        "loss": loss_sha256(settings.loss),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def load_checkpoint(store: Store | None, key: str, state: TrainingState) -> None:
    name = f"checkpoints/{key}/state.pt"
    stored = store.find(name) if store else None
    if stored is None or store is None:
        return
    try:
        checkpoint = from_bytes(stored[0])
    except Exception as error:  # torch.load raises many types: RuntimeError, UnpicklingError, EOFError ...
        raise TrainingError(f"The checkpoint {store.uri}/{name} cannot be read; delete it and run again.") from error
    require_stamp(checkpoint, f"{store.uri}/{name}")
    state.restore(checkpoint)


def save_checkpoint(store: Store | None, key: str, checkpoint: dict[str, Any]) -> None:
    """Replace the checkpoint atomically."""
    if store is not None:
        store.put(f"checkpoints/{key}/state.pt", to_bytes(stamp() | checkpoint))


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
    start: bool = True,
) -> Training:
    """Without ``start``, the last layer of a pretrained network is random, which suffices if
    training continues from a checkpoint."""
    _, world_size = distributed.rank_and_world_size()
    images = TrainingImages(dataset, exclude_labels)
    batch_size = max(2, min(recipe.batch_size, images.count) // world_size)

    torch.manual_seed(recipe.seed)
    architecture = choose_architecture(dataset, recipe)
    network = build_network(architecture)
    precision = choose_precision(device, network, recipe.precision)
    module = TrainingModule(
        architecture, images.classes, recipe.scale, recipe.label_smoothing, precision, network, recipe.loss
    )
    pretrained_sha256 = initialize(network, architecture, recipe, dataset)
    if architecture.pretrained and start:
        from evernear.embedding.head import start_at_head  # timm takes seconds to import

        start_at_head(module, architecture, images, recipe)
    if recipe.trained_layers == "last":
        from evernear.embedding.timm_member import freeze_first_stages

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
