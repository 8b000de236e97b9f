"""What changes while a network is trained: enough to go on after a kill, and the best weights so far."""

import torch
from torch import Tensor

from evernear.embedding.checkpoint import State
from evernear.embedding.history import Epoch
from evernear.embedding.learner import Learner
from evernear.settings import TrainSettings


class TrainingState:
    """The moving parts of a training after a number of whole epochs."""

    def __init__(self, learner: Learner, optimizer: torch.optim.Optimizer, scaler: torch.GradScaler) -> None:
        self.history: list[Epoch] = []
        self.best_epoch = 0
        self.best_weights: dict[str, Tensor] = {}
        self._learner = learner
        self._optimizer = optimizer
        self._scaler = scaler

    def is_finished(self, settings: TrainSettings) -> bool:
        """Whether all epochs are done, or the loss has not fallen for ``patience_epochs``."""
        done = len(self.history)
        return done >= settings.epochs or done - self.best_epoch >= settings.patience_epochs

    def record(self, point: Epoch) -> None:
        """Take in an epoch that has just ended; its weights are kept when its gallery loss is the lowest."""
        best_loss = self.history[self.best_epoch - 1].gallery_loss if self.history else float("inf")
        self.history.append(point)
        if point.gallery_loss < best_loss:
            self.best_epoch = point.epoch
            weights = self._learner.network.state_dict()
            self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}

    def at_the_end(self) -> State:
        """The state of a training that is over: weights and curves, no optimizer."""
        history = [point.model_dump() for point in self.history]
        return {"history": history, "best_epoch": self.best_epoch, "best_weights": self.best_weights}

    def to_resume(self) -> State:
        """The state of a training that goes on."""
        return self.at_the_end() | {
            "learner": self._learner.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def restore(self, state: State | None) -> None:
        """Go back to ``state``, which `to_resume` or `at_the_end` gave; None is the beginning."""
        if state is None:
            return
        self.history = [Epoch(**point) for point in state["history"]]
        self.best_epoch, self.best_weights = state["best_epoch"], state["best_weights"]
        if "optimizer" in state:
            self._learner.load_state_dict(state["learner"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._scaler.load_state_dict(state["scaler"])
