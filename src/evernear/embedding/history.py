"""The curves of a training."""

from pydantic import BaseModel, ConfigDict

HISTORY_FILE = "history.json"


class Epoch(BaseModel):
    """One point of the curves; the gallery split is never trained on."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    learning_rate: float
    train_loss: float
    gallery_loss: float
    gallery_accuracy: float
    gallery_accuracy_error: float
    """Standard error of ``gallery_accuracy``: how much of it is the luck of which images stand in the gallery."""
    duration_s: float


class TrainingResult(BaseModel):
    """What a training came to; `HISTORY_FILE` holds the same."""

    model_config = ConfigDict(frozen=True)

    key: str
    kept_epoch: int
    stopped_early: bool
    resumed_after_epoch: int
    epochs: tuple[Epoch, ...]
