"""What changes while a network is trained: enough to go on after a kill, and the best weights so far."""

import torch
from torch import Tensor

from evernear.embedding.checkpoint import State
from evernear.embedding.history import Epoch
from evernear.embedding.learner import Learner
from evernear.settings import TrainSettings


class TrainingState:
    """The moving parts of a training after a number of whole epochs.

    Which weights are kept follows the one-standard-error rule (Breiman et al. 1984, "Classification and
    Regression Trees", section 3.4.3), turned to epochs: the latest ones whose accuracy on the gallery is not
    below the highest by more than its standard error. On a small gallery the highest is luck, and a schedule
    that ends at a rate of zero makes later weights the better ones. Accuracy and not loss, which rises with
    the network's confidence in its few wrong answers while these still get fewer (Guo et al. 2017, "On
    Calibration of Modern Neural Networks", section 3, arXiv:1706.04599).
    """

    def __init__(self, learner: Learner, optimizer: torch.optim.Optimizer, scaler: torch.GradScaler) -> None:
        self.history: list[Epoch] = []
        self.kept_epoch = 0
        self.kept_weights: dict[str, Tensor] = {}
        self._learner = learner
        self._optimizer = optimizer
        self._scaler = scaler

    def is_finished(self, settings: TrainSettings) -> bool:
        """Whether all epochs are done, or none of the last ``patience_epochs`` was worth keeping."""
        done = len(self.history)
        return done >= settings.epochs or done - self.kept_epoch >= settings.patience_epochs

    def record(self, point: Epoch) -> None:
        """Take in an epoch that has just ended, and keep its weights unless it recognises the gallery worse."""
        self.history.append(point)
        best = max(self.history, key=lambda epoch: epoch.gallery_accuracy)
        if point.gallery_accuracy >= best.gallery_accuracy - best.gallery_accuracy_error:
            self.kept_epoch = point.epoch
            weights = self._learner.network.state_dict()
            self.kept_weights = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}

    def at_the_end(self) -> State:
        """The state of a training that is over: weights and curves, no optimizer."""
        history = [point.model_dump() for point in self.history]
        return {"history": history, "kept_epoch": self.kept_epoch, "kept_weights": self.kept_weights}

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
        self.kept_epoch, self.kept_weights = state["kept_epoch"], state["kept_weights"]
        if "optimizer" in state:
            self._learner.load_state_dict(state["learner"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._scaler.load_state_dict(state["scaler"])
