"""The state of a training run, and its checkpoint in the store, ``checkpoints/<key>/state.pt``.

The key is a hash of everything that determines the weights, so training resumes only with the same
inputs and code. The last checkpoint has no optimizer state. It remains in the store, so a pipeline
that failed in a later step does not train again. ``checkpoints/`` may be deleted at any time.
"""

import hashlib
import json
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evernear.common.step_results import code_digest
from evernear.common.store import Store
from evernear.embedding import CODE
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.artifact import Epoch, from_bytes, to_bytes
from evernear.embedding.recipe import Recipe
from evernear.errors import TrainingError
from evernear.settings.train import TrainingChoices

CHECKPOINT_FORMAT = 5
PATIENCE_EPOCHS = 5
"""Epochs without improvement in gallery accuracy, beyond noise, before training stops early."""
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

    def is_finished(self, recipe: Recipe) -> bool:
        """Whether all epochs or the time have passed, or without a limit of the time,
        `PATIENCE_EPOCHS` without improvement."""
        completed = len(self.history)
        if recipe.minutes:
            return completed > 0 and self.history[-1].progress >= 1
        return completed >= recipe.epochs or completed - self.best_epoch >= PATIENCE_EPOCHS

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
    labels and code."""
    inputs = {
        "format": CHECKPOINT_FORMAT,
        "dataset": dataset_digest,
        "settings": settings.model_dump(mode="json"),
        "exclude_labels": sorted(exclude_labels),
        "pretrained": pretrained_sha256,
        "code": code_digest(CODE, LIBRARIES),
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
    state.restore(checkpoint)


def save_checkpoint(store: Store | None, key: str, checkpoint: dict[str, Any]) -> None:
    """Replace the checkpoint atomically."""
    if store is not None:
        store.put(f"checkpoints/{key}/state.pt", to_bytes(checkpoint))
