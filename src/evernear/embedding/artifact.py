"""A trained network on disk: weights, architecture and training history."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evernear.common.disk import sha256_bytes, write_atomically
from evernear.common.frozen import Frozen
from evernear.common.output import quantity, warned
from evernear.embedding import DESCRIPTION_FILE
from evernear.embedding.augmentation import Flip
from evernear.embedding.candidate import Candidate
from evernear.embedding.network import Architecture, EmbeddingNetwork, build_network
from evernear.embedding.recipe import Recipe
from evernear.errors import IntegrityError

WEIGHTS_FILE = "weights.pt"
HISTORY_FILE = "history.json"


class FlipTest(Frozen):
    """Whether mirrored images look like images of their class
    (`evernear.embedding.monitor.measure_flips`)."""

    direction: Flip
    gallery_accuracy: float
    """Accuracy on the mirrored gallery."""
    harmless: bool


class Epoch(Frozen):
    """Metrics of one epoch. The gallery split is the validation set."""

    epoch: int
    learning_rate: float
    train_loss: float
    gallery_loss: float
    gallery_accuracy: float
    gallery_accuracy_error: float
    """Standard error of ``gallery_accuracy``."""
    duration_s: float
    flip_tests: tuple[FlipTest, ...] = ()
    """Run once, after the first epoch whose accuracy is clearly above chance."""
    steps: int = 0
    progress: float = 0.0
    """The larger of the shares of the training's steps and time at the end of the epoch."""
    used_s: float = 0.0
    """Time at the end of the epoch since the training began, including earlier attempts."""


class TrainingResult(Frozen):
    remedy = "run the train step again"

    key: str
    """See `evernear.embedding.training_setup.checkpoint_key`."""
    best_epoch: int
    """The epoch whose weights were saved, or 0 for a frozen network, which has no epochs."""
    resumed_after_epoch: int
    epochs: tuple[Epoch, ...]
    chance_accuracy: float
    """Gallery accuracy of always predicting the most frequent class."""
    by_neighbors: bool = False
    """Whether the nearest neighbor measured the gallery, because the loss has no class weights."""
    planned_steps: int = 0
    warnings: tuple[str, ...] = ()
    views: int = 0
    """Augmented views of each image on which a head was trained."""
    candidates: tuple[Candidate, ...] = ()
    """The networks of which one was chosen. The others of these fields describe that one."""

    @property
    def best(self) -> Epoch:
        return self.epochs[self.best_epoch - 1]

    def history(self) -> list[dict[str, Any]]:
        """As JSON, for the run's record and its curves."""
        return [
            epoch.model_dump(mode="json", exclude={"flip_tests", "steps", "progress", "used_s"})
            for epoch in self.epochs
        ]

    @property
    def resumption(self) -> str:
        """The end of a sentence about the epochs that an earlier run had trained, or empty."""
        if not self.resumed_after_epoch:
            return ""
        if self.resumed_after_epoch == len(self.epochs):
            return ", nothing trained: an earlier run finished this training with the same images, settings and code"
        return f", resumed after epoch {self.resumed_after_epoch}"

    def summary(self) -> str:
        """The chosen network and its best epoch, with warnings. Skipped steps are counted."""
        return "; ".join([*self._chosen(), *self._trained()]) + warned(self.warnings)

    def _chosen(self) -> Iterator[str]:
        for each in self.candidates:
            if each.chosen:
                first, *others = self.candidates
                compared = "".join(f", {other.title} {other.share}" for other in others)
                asked = quantity(each.asked, "query image")
                yield f"chosen is {each.title}: of {asked}, {first.title} names {first.share} right{compared}"

    def _trained(self) -> Iterator[str]:
        if not self.epochs:
            if not self.candidates:
                yield "no training: the backbone is frozen"
            return
        steps = sum(epoch.steps for epoch in self.epochs)
        of_steps = f", {steps:,} of {self.planned_steps:,} steps" if steps < self.planned_steps else ""
        measured = "gallery accuracy of nearest neighbors" if self.by_neighbors else "gallery accuracy"
        accuracy = f"{measured} {self.best.gallery_accuracy:.2%}"
        flips = f"; {self.flips}" if self.flips else ""
        yield f"best epoch {self.best_epoch}{of_steps}, {accuracy}{self.resumption}{flips}"

    @property
    def flips(self) -> str:
        """The measured flips and whether they were used, or empty."""
        return ", ".join(
            f"{test.direction} flips {'used' if test.harmless else 'not used'} "
            f"(accuracy {test.gallery_accuracy:.1%} instead of {epoch.gallery_accuracy:.1%})"
            for epoch in self.epochs
            for test in epoch.flip_tests
        )


class TrainedNetwork(Frozen):
    remedy = "run the train step again"

    architecture: Architecture
    dataset_digest: str
    exclude_labels: tuple[str, ...]
    recipe: Recipe
    weights_sha256: str = ""
    """Set by `save_trained`."""
    warnings: tuple[str, ...] = ()
    """As in `TrainingResult`."""
    pretrained_sha256: str | None = None
    """sha256 of the pretrained weights file that training started from."""


def save_trained(directory: Path, weights: dict[str, Tensor], description: TrainedNetwork) -> None:
    """Write the weights, then their description, each atomically."""
    data = to_bytes(weights)
    write_atomically(directory / WEIGHTS_FILE, data)
    description.model_copy(update={"weights_sha256": sha256_bytes(data)}).save(directory / DESCRIPTION_FILE)


def load_trained(directory: Path) -> tuple[TrainedNetwork, EmbeddingNetwork]:
    """Load what `save_trained` wrote, on the CPU and in eval mode, after checking its hash."""
    trained = TrainedNetwork.load(directory / DESCRIPTION_FILE)
    path = directory / WEIGHTS_FILE
    data = path.read_bytes() if path.is_file() else b""
    if sha256_bytes(data) != trained.weights_sha256:
        raise IntegrityError(f"{path} is missing or does not match {DESCRIPTION_FILE}; {trained.remedy}.")
    network = build_network(trained.architecture)
    network.load_state_dict(from_bytes(data))
    network.eval()
    return trained, network


def to_bytes(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """Only tensors and plain values are read, onto the CPU. Pickled code is rejected."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
