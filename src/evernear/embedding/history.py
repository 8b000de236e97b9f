"""The curves of a training."""

from evernear.frozen import Frozen

HISTORY_FILE = "history.json"


class Epoch(Frozen):
    """One point of the curves; the gallery split is never trained on."""

    epoch: int
    learning_rate: float
    train_loss: float
    gallery_loss: float
    gallery_accuracy: float
    gallery_accuracy_error: float
    """Standard error of ``gallery_accuracy``: how much of it is the luck of which images stand in the gallery."""
    duration_s: float


class TrainingResult(Frozen):
    """What a training came to; `HISTORY_FILE` holds the same."""

    key: str
    kept_epoch: int
    stopped_early: bool
    resumed_after_epoch: int
    epochs: tuple[Epoch, ...]
