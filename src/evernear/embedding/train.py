"""Train the embedding network: read `train` from top to bottom; the functions below it are in the order of its calls.

The same seed, data, settings and machine give bit-for-bit the same weights, whether training is uninterrupted or killed
and resumed. The randomness of an epoch depends on (seed, epoch) alone, and the number of threads fixes the order of
floating-point additions.

Several processes train like one: each step uses the same images with the same augmentation, the same batch
normalization statistics and the same sample of classes. Only the order of additions differs. The losses of the first
epochs agree within a relative 1e-5 in float32 (1e-6 measured on digits, and 2e-2 in bfloat16); rounding errors grow
with the number of steps. The exceptions are dropout, excluded labels (the open-set probe), and batches that exceed the
memory of a process and are normalized in micro-batches (`choose_micro_batches`).

A checkpoint is the object ``checkpoints/<key>/state.pt`` in the store. Its key is a hash of everything that determines
the weights, so training resumes only from a checkpoint with the same inputs and code. The last checkpoint has no
optimizer state. It remains in the store so that a pipeline that fails in a later step does not train again.
``checkpoints/`` may be deleted at any time.
"""

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from evernear.code_digest import code_digest
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.embedding import distributed
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.artifact import (
    HISTORY_FILE,
    Epoch,
    FlipTest,
    TrainedNetwork,
    TrainingResult,
    from_bytes,
    save_trained,
    to_bytes,
)
from evernear.embedding.augmentation import Draws, Flip, augment, flip, random_flips
from evernear.embedding.batch_norm import GlobalBatchNorm
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.freeze import choose_architecture, freeze, initialize
from evernear.embedding.memory import training_batch_size
from evernear.embedding.muon import Muon
from evernear.embedding.network import MEMBERS, Architecture
from evernear.errors import TrainingError
from evernear.output import quantity
from evernear.settings import TrainSettings
from evernear.store import Store, open_store

WARM_UP = 0.2
"""Fraction of all steps in which the learning rate rises to its peak."""
MARGIN_WARM_UP = 0.5
"""Fraction of all steps in which the margin rises from 0 to `TrainSettings.margin`.

With the full margin from the first step, training on images harder than digits stays at chance. The annealing of
SphereFace (Liu et al. 2017, arXiv:1704.08063) begins without a margin for the same reason.
"""
TOTAL_DECAY = 1.8
"""Default of learning rate x weight decay x steps for Muon and AdamW on color images.

With decoupled weight decay, weights are a moving average of the updates, whose length is then the same fraction of
every training run (Wang and Aitchison 2024, "How to set AdamW's weight decay as you scale model and dataset size",
arXiv:2405.13698). Measured in docs/decisions/0035-training-on-any-images.md.
"""
PRETRAINED_RATE_FACTOR = 0.1
"""Learning rate of a pretrained backbone, relative to that of the new layers."""
FLIP_TOLERANCE = 0.1
"""Largest loss of accuracy under a harmless flip, as a fraction of the accuracy above chance."""
FLIP_TEST_MIN_ERRORS = 8
"""Standard errors above chance at which the accuracy is high enough to compare flips."""
CHECKPOINT_FORMAT = 4
IGNORED_IN_KEY = {"parity_tolerance", "checkpoint_every_epochs", "test_time_flip"}
"""Settings that do not affect the weights."""
LIBRARIES = ("numpy", "timm", "torch")
"""Libraries whose versions affect the weights."""
OnEpoch = Callable[[Epoch], None]


class Steps(NamedTuple):
    """Training steps, counted over all epochs. Early stopping may end training before ``total``."""

    done: int
    total: int
    per_epoch: int


OnStep = Callable[[Steps], None]


def train(
    dataset: Dataset,
    settings: TrainSettings,
    out_dir: Path,
    store: Store | None = None,
    exclude_labels: frozenset[str] = frozenset(),
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
) -> TrainingResult:
    """Train on the train split without ``exclude_labels``; write weights, description and history to ``out_dir``.

    The gallery split is the validation set: it decides which epoch's weights are saved and when to stop early. The test
    split is not read. With a ``store``, checkpoints are saved there. ``on_epoch`` is called after each epoch, once its
    checkpoint is saved, and ``on_step`` after each step.

    Multi-node training runs in `evernear.embedding.node`. Outside the nodes, this function writes its result from the
    last checkpoint.

    Raises:
        TrainingError: fewer than two labels to train on, a loss that is not finite, an unreadable checkpoint, a
            training process that died, or multi-node training that is not finished.
        StoreError: a checkpoint or a file in ``out_dir`` cannot be written.
    """
    if settings.frozen:
        return freeze(dataset, settings, out_dir, exclude_labels)
    trained_by_nodes = settings.nodes > 1 and not dist.is_initialized()
    if settings.processes > 1 and not trained_by_nodes and not dist.is_initialized():

        def on_message(message: Epoch | Steps) -> None:
            if isinstance(message, Steps):
                if on_step is not None:
                    on_step(message)
            elif on_epoch is not None:
                on_epoch(message)

        train_in_processes(dataset, settings, out_dir, store, on_message, exclude_labels)
        return TrainingResult.load(out_dir / HISTORY_FILE)

    rank, world_size = distributed.rank_and_world_size()
    device = torch.device("cpu") if trained_by_nodes else choose_device(settings, rank % settings.processes)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the device for `distributed.broadcast_from_rank_0`
    settings = with_defaults(settings, dataset)
    precision = choose_precision(settings, device)
    images = TrainingImages(dataset, exclude_labels)
    batch_size = max(2, min(settings.batch_size, images.count) // world_size)
    steps = steps_per_epoch(settings, images.count, batch_size * world_size)

    torch.manual_seed(settings.seed)
    architecture = choose_architecture(dataset, settings)
    module = TrainingModule(architecture, images.classes, settings, precision)
    pretrained_sha256 = initialize(module.network, architecture, settings)
    module = module.to(device)
    forward = DistributedDataParallel(module) if world_size > 1 else module
    micro_batches = choose_micro_batches(module, architecture, batch_size, device)
    optimizer = choose_optimizer(module, settings, precision)
    scaler = torch.GradScaler(device.type, enabled=precision == torch.float16)

    key = checkpoint_key(dataset.digest, settings, exclude_labels, pretrained_sha256)
    state = TrainingState(module, optimizer, scaler)
    load_checkpoint(store, key, state)
    resumed_after_epoch = 0 if trained_by_nodes else len(state.history)
    if trained_by_nodes and not state.is_finished(settings):
        raise TrainingError(
            f"Training on {settings.nodes} nodes is not finished: {len(state.history)} of "
            f"{quantity(settings.epochs, 'epoch')} are done. Only the train step of a pipeline starts it (train.nodes)."
        )

    while not state.is_finished(settings):
        epoch, started_s = len(state.history), time.monotonic()
        seed = int(np.random.SeedSequence([settings.seed, epoch, 0]).generate_state(1)[0])
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        losses, rate = torch.zeros((), device=device), 0.0
        flips = choose_flips(settings, state.history)

        module.train()
        batches = images.batches(batch_size, settings.seed, epoch, rank, world_size)
        for step, (pixels, classes) in enumerate(itertools.islice(batches, steps)):
            progress = (epoch * steps + step) / (settings.epochs * steps)
            rate = learning_rate(settings, progress)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["rate_factor"]
            margin = settings.margin * min(progress / MARGIN_WARM_UP, 1.0)
            optimizer.zero_grad()
            batch_classes = distributed.all_gather(classes.to(device))
            first, rng_state = rank * batch_size, generator.get_state()
            splits = (pixels.tensor_split(micro_batches), classes.tensor_split(micro_batches))
            for inputs, targets in zip(*splits, strict=True):
                inputs, targets = inputs.to(device), targets.to(device)
                draws = Draws(generator.set_state(rng_state), batch_size * world_size, first)
                inputs = random_flips(augment(inputs, settings.augment, draws), flips, draws)
                with GlobalBatchNorm():
                    loss = forward(inputs, targets, margin, batch_classes)
                loss = loss * (len(inputs) / len(pixels))
                scaler.scale(loss * settings.members).backward()  # the sum: each member learns as it would alone
                losses += loss.detach()
                first += len(inputs)
            scaler.step(optimizer)
            scaler.update()
            if rank == 0 and on_step is not None:
                on_step(Steps(epoch * steps + step + 1, settings.epochs * steps, steps))

        metrics = Epoch(
            epoch=epoch + 1,
            learning_rate=rate,
            train_loss=float(distributed.all_reduce_sum(losses)) / (steps * world_size),
            **validate(module, images.gallery(rank, world_size), device),
            duration_s=time.monotonic() - started_s,
        )
        if settings.flip == "auto" and not any(earlier.flip_tests for earlier in state.history):
            metrics = metrics.model_copy(update={"flip_tests": measure_flips(module, images, device, metrics)})
        metrics = distributed.broadcast_from_rank_0(metrics)  # all processes must agree on when to stop
        if not math.isfinite(metrics.train_loss + metrics.gallery_loss):
            raise TrainingError(
                f"The loss is not a finite number after epoch {metrics.epoch}; "
                f"lower train.learning_rate (it is {settings.learning_rate:g})."
            )
        state.record(metrics)
        if rank == 0 and metrics.epoch % settings.checkpoint_every_epochs == 0:
            save_checkpoint(store, key, state.final_checkpoint() | state.resume_state())
        if rank == 0 and on_epoch is not None:
            on_epoch(metrics)

    result = TrainingResult(
        key=key,
        best_epoch=state.best_epoch,
        stopped_early=len(state.history) < settings.epochs,
        resumed_after_epoch=resumed_after_epoch,
        epochs=tuple(state.history),
        chance_accuracy=images.chance_accuracy,
        warnings=collapse_warnings(state.history, state.best_epoch, settings),
    )
    if rank == 0:
        save_checkpoint(store, key, state.final_checkpoint())
        flips = choose_flips(settings, state.history)
        trained = TrainedNetwork(
            architecture=architecture.model_copy(
                update={"test_time_flip": settings.test_time_flip and "horizontal" in flips}
            ),
            dataset_digest=dataset.digest,
            exclude_labels=tuple(sorted(exclude_labels)),
            settings=settings,
            warnings=result.warnings,
            pretrained_sha256=pretrained_sha256,
        )
        save_trained(out_dir, state.best_weights, trained)
        result.save(out_dir / HISTORY_FILE)
    return result


def train_in_processes(
    dataset: Dataset,
    settings: TrainSettings,
    out_dir: Path,
    store: Store | None,
    on_message: Callable[[Epoch | Steps], None],
    exclude_labels: frozenset[str] = frozenset(),
    node: distributed.Node = distributed.ONE_NODE,
) -> None:
    """Run `train` in ``settings.processes`` processes of this ``node``; rank 0 writes the files."""
    function = partial(
        _train_in_process, dataset.manifest, settings, out_dir, store.uri if store else None, exclude_labels
    )
    gpus = torch.cuda.device_count() if settings.device != "cpu" else 0
    backend = "nccl" if gpus >= settings.processes else "gloo"
    distributed.run(function, settings.processes, backend, on_message, node)


def _train_in_process(
    manifest: Manifest,
    settings: TrainSettings,
    out_dir: Path,
    store_uri: str | None,
    exclude_labels: frozenset[str],
    send: Callable[[Epoch | Steps], None],
) -> None:
    dataset = Dataset(manifest, open_store(manifest.store_uri))
    store = open_store(store_uri) if store_uri is not None else None
    train(dataset, settings, out_dir, store, exclude_labels, on_epoch=send, on_step=send)


def with_defaults(settings: TrainSettings, dataset: Dataset) -> TrainSettings:
    """``settings`` with the values that depend on the images filled in.

    Gray images are mostly drawings and scans. Color photographs vary more, and need a larger network, more steps and
    more regularization.
    """
    color = dataset.shape[2] == 3
    optimizer = settings.optimizer
    if optimizer == "auto":
        is_compact = settings.backbone in ("auto", *MEMBERS) and not settings.weights
        optimizer = "muon" if color and is_compact else "adamw"
    epochs, min_steps, width = (12, 300, 16) if not color else (10, 400, 48) if optimizer == "muon" else (24, 600, 32)
    label_smoothing = 0.1 if color and not settings.scale else 0.0
    filled = settings.model_copy(
        update={
            "optimizer": optimizer,
            "epochs": settings.epochs or epochs,
            "min_steps": settings.min_steps if settings.min_steps >= 0 else min_steps,
            "width": settings.width or width,
            "augment": settings.augment if settings.augment != "auto" else "shift" if color else "affine",
            "label_smoothing": settings.label_smoothing if settings.label_smoothing >= 0 else label_smoothing,
        }
    )
    if filled.weight_decay >= 0:
        return filled
    if color and filled.optimizer != "sgd":
        images = dataset.manifest.count("train")
        steps = filled.epochs * steps_per_epoch(filled, images, min(filled.batch_size, images))
        return filled.model_copy(update={"weight_decay": TOTAL_DECAY / (filled.learning_rate * steps)})
    return filled.model_copy(update={"weight_decay": 0.01})


def steps_per_epoch(settings: TrainSettings, images: int, batch_size: int) -> int:
    """The steps that cover ``images`` once, or more if ``train.min_steps`` requires them."""
    return max(images // batch_size, math.ceil(settings.min_steps / settings.epochs))


def choose_device(settings: TrainSettings, rank: int) -> torch.device:
    """The GPU of the node's process ``rank`` if there is one and the settings allow it, otherwise the CPU.

    Raises:
        TrainingError: ``train.device`` is ``cuda`` and there are not enough GPUs.
    """
    gpus = torch.cuda.device_count() if settings.device != "cpu" else 0
    if settings.device == "cuda" and rank >= gpus:
        raise TrainingError(
            f"train.device is cuda, but process {rank + 1} of {settings.processes} finds only {quantity(gpus, 'GPU')}; "
            "lower train.processes or set train.device=auto."
        )
    return torch.device("cuda", rank) if rank < gpus else torch.device("cpu")


def choose_precision(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """The data type of the network's activations; ``auto`` selects half precision if the device computes in it."""
    if settings.precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.precision]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    cpu = torch.cpu.get_capabilities()
    return torch.bfloat16 if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else torch.float32


def choose_micro_batches(
    module: TrainingModule, architecture: Architecture, batch_size: int, device: torch.device
) -> int:
    """Number of micro-batches in a batch, so that memory is bounded; their gradients are accumulated.

    A micro-batch has at least two images, because batch normalization needs a variance.
    """
    height, width, channels = architecture.shape
    image = torch.zeros((1, channels, height, width), dtype=torch.uint8, device=device)
    count = math.ceil(batch_size / training_batch_size(module.network, image, device))
    return max(1, min(count, batch_size // 2))


def choose_optimizer(module: TrainingModule, settings: TrainSettings, precision: torch.dtype) -> torch.optim.Optimizer:
    """Muon, AdamW or SGD with Nesterov momentum, without weight decay for normalization layers and biases.

    Muon updates the weights of convolutions and linear layers, except depthwise convolutions, which have one input.

    The learning rate of a group is that of the schedule times its ``rate_factor``.
    """
    backbone_factor = settings.backbone_learning_rate_factor or (PRETRAINED_RATE_FACTOR if settings.weights else 1.0)
    groups: dict[tuple[bool, bool, bool], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        decayed = parameter.ndim > 1
        orthogonal = decayed and min(parameter.shape[:2]) > 1 and not name.startswith("heads.")
        groups.setdefault((".backbone." in name, decayed, orthogonal), []).append(parameter)
    options = [
        {
            "params": parameters,
            "weight_decay": settings.weight_decay if decayed else 0.0,
            "rate_factor": backbone_factor if in_backbone else 1.0,
            "orthogonal": orthogonal,
        }
        for (in_backbone, decayed, orthogonal), parameters in groups.items()
    ]
    rate, momentum = settings.learning_rate, settings.momentum
    if settings.optimizer == "muon":
        return Muon(options, rate, momentum, precision)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(options, lr=rate, momentum=momentum, nesterov=momentum > 0, fused=True)
    return torch.optim.AdamW(options, lr=rate, fused=True)


class TrainingState:
    """Everything that changes during training.

    The best weights follow the one-standard-error rule (Breiman et al. 1984, "Classification and Regression Trees",
    section 3.4.3), applied to epochs: the latest weights whose gallery accuracy is within one standard error of the
    highest. On a small gallery the highest accuracy is partly luck, and a schedule that ends at a rate of zero makes
    later weights the better ones. The criterion is accuracy and not loss: the loss rises with the network's confidence
    in its few wrong answers while their number still falls (Guo et al. 2017, "On Calibration of Modern Neural
    Networks", section 3, arXiv:1706.04599).
    """

    def __init__(self, module: TrainingModule, optimizer: torch.optim.Optimizer, scaler: torch.GradScaler) -> None:
        self.history: list[Epoch] = []
        self.best_epoch = 0
        self.best_weights: dict[str, Tensor] = {}
        self._module, self._optimizer, self._scaler = module, optimizer, scaler

    def is_finished(self, settings: TrainSettings) -> bool:
        """Whether all epochs are done, or the last ``patience_epochs`` brought no improvement."""
        completed = len(self.history)
        return completed >= settings.epochs or completed - self.best_epoch >= settings.patience_epochs

    def record(self, metrics: Epoch) -> None:
        """Add a finished epoch, and copy its weights if they are the best."""
        self.history.append(metrics)
        highest = max(self.history, key=lambda epoch: epoch.gallery_accuracy)
        if metrics.gallery_accuracy >= highest.gallery_accuracy - highest.gallery_accuracy_error:
            self.best_epoch = metrics.epoch
            weights = self._module.network.state_dict()
            self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}

    def final_checkpoint(self) -> dict[str, Any]:
        """The content of the last checkpoint."""
        history = [metrics.model_dump() for metrics in self.history]
        return {"history": history, "best_epoch": self.best_epoch, "best_weights": self.best_weights}

    def resume_state(self) -> dict[str, Any]:
        """The part of a checkpoint that only unfinished training needs."""
        return {
            "module": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state of ``checkpoint``."""
        self.history = [Epoch(**metrics) for metrics in checkpoint["history"]]
        self.best_epoch, self.best_weights = checkpoint["best_epoch"], checkpoint["best_weights"]
        if "optimizer" in checkpoint:
            self._module.load_state_dict(checkpoint["module"])
            self._optimizer.load_state_dict(checkpoint["optimizer"])
            self._scaler.load_state_dict(checkpoint["scaler"])


def checkpoint_key(
    dataset_digest: str,
    settings: TrainSettings,
    exclude_labels: frozenset[str],
    pretrained_sha256: str | None = None,
) -> str:
    """A hash of everything that determines the weights: data, settings, initial weights, excluded labels, code."""
    inputs = {
        "format": CHECKPOINT_FORMAT,
        "dataset": dataset_digest,
        "settings": settings.model_dump(mode="json", exclude=IGNORED_IN_KEY),
        "exclude_labels": sorted(exclude_labels),
        "pretrained": pretrained_sha256,
        "code": code_digest("evernear.embedding.train", LIBRARIES),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def load_checkpoint(store: Store | None, key: str, state: TrainingState) -> None:
    """Restore ``state`` from the last checkpoint, if one exists.

    Raises:
        TrainingError: the object is not a checkpoint.
    """
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


def learning_rate(settings: TrainSettings, progress: float) -> float:
    """The learning rate at ``progress`` (0..1) of all steps.

    Triangular and cosine schedules rise linearly over `WARM_UP` and fall to 0. The triangle is one cycle of Smith 2017,
    "Cyclical Learning Rates", arXiv:1506.01186; the cosine is Loshchilov and Hutter 2017, arXiv:1608.03983.
    """
    if settings.schedule == "constant":
        return settings.learning_rate
    if progress < WARM_UP:
        return settings.learning_rate * max(progress / WARM_UP, 0.01)
    remaining = (1 - progress) / (1 - WARM_UP)
    factor = remaining if settings.schedule == "triangular" else (1 - math.cos(math.pi * remaining)) / 2
    return settings.learning_rate * factor


class GalleryMetrics(TypedDict):
    """Metrics of `Epoch` that `validate` measures."""

    gallery_loss: float
    gallery_accuracy: float
    gallery_accuracy_error: float


@torch.no_grad()
def validate(module: TrainingModule, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> GalleryMetrics:
    """Cross-entropy and accuracy of the heads' mean logits on batches of the gallery split, without the margin.

    The ``batches`` of all processes together are the split. The standard error of the accuracy is that of a proportion
    with half an image added on either side (the prior of Jeffreys), so that it is not zero if all predictions are
    correct.
    """
    module.eval()
    count, correct, total_loss = 0, 0, 0.0
    for pixels, classes in batches:
        classes = classes.to(device)
        logits = module.logits(pixels.to(device))
        total_loss += F.cross_entropy(logits, classes, reduction="none").double().sum().item()
        correct += int((logits.argmax(dim=1) == classes).sum())
        count += len(classes)
    sums = distributed.all_reduce_sum(torch.tensor([total_loss, correct, count], dtype=torch.float64, device=device))
    total_loss, correct, count = sums.tolist()
    proportion = (correct + 0.5) / (count + 1)
    return {
        "gallery_loss": total_loss / count,
        "gallery_accuracy": correct / count,
        "gallery_accuracy_error": math.sqrt(proportion * (1 - proportion) / (count + 1)),
    }


def choose_flips(settings: TrainSettings, history: Sequence[Epoch]) -> tuple[Flip, ...]:
    """The flips that augment the next epoch: those of the settings, or those that `measure_flips` found harmless."""
    if settings.flip == "both":
        return "horizontal", "vertical"
    if settings.flip in ("horizontal", "vertical"):
        return (settings.flip,)
    return tuple(test.direction for epoch in history for test in epoch.flip_tests if test.harmless)


def measure_flips(
    module: TrainingModule, images: TrainingImages, device: torch.device, metrics: Epoch
) -> tuple[FlipTest, ...]:
    """Compare the accuracy on the mirrored gallery with that on the gallery, of a network trained without flips.

    Where the mirror image of a class is as likely as the image itself, as of a photographed dog, the network recognizes
    both equally well. A mirrored digit is a different symbol, and the network fails on it. A flip is harmless if the
    accuracy above chance falls by less than `FLIP_TOLERANCE` plus two standard errors.

    Returns:
        Nothing while the accuracy is less than `FLIP_TEST_MIN_ERRORS` standard errors above chance, too low to compare.
    """
    above_chance, error = metrics.gallery_accuracy - images.chance_accuracy, metrics.gallery_accuracy_error
    if above_chance < FLIP_TEST_MIN_ERRORS * error:
        return ()
    min_accuracy = metrics.gallery_accuracy - FLIP_TOLERANCE * above_chance - 2 * error

    def measure(direction: Flip) -> FlipTest:
        mirrored = (
            (flip(pixels, direction), classes) for pixels, classes in images.gallery(*distributed.rank_and_world_size())
        )
        accuracy = validate(module, mirrored, device)["gallery_accuracy"]
        return FlipTest(direction=direction, gallery_accuracy=accuracy, harmless=accuracy >= min_accuracy)

    return measure("horizontal"), measure("vertical")


def collapse_warnings(history: Sequence[Epoch], best_epoch: int, settings: TrainSettings) -> tuple[str, ...]:
    """A warning if the gallery accuracy fell after the best epoch by more than four standard errors."""
    best, last = history[best_epoch - 1], history[-1]
    error = math.hypot(best.gallery_accuracy_error, last.gallery_accuracy_error)
    if best.gallery_accuracy - last.gallery_accuracy <= 4 * error:
        return ()
    return (
        f"Training collapsed after epoch {best_epoch}: the gallery accuracy fell from {best.gallery_accuracy:.1%} to "
        f"{last.gallery_accuracy:.1%}. The weights of epoch {best_epoch} were saved; lower train.learning_rate (it is "
        f"{settings.learning_rate:g}).",
    )


def require_learned(result: TrainingResult, settings: TrainSettings) -> None:
    """Check that the best epoch is better than chance.

    Raises:
        TrainingError: its gallery accuracy is at most one standard error above `TrainingResult.chance_accuracy`.
    """
    best = result.best
    if best.gallery_accuracy <= result.chance_accuracy + best.gallery_accuracy_error:
        raise TrainingError(
            f"The network learned nothing: its best gallery accuracy in {quantity(len(result.epochs), 'epoch')} is "
            f"{best.gallery_accuracy:.1%}, and always predicting the most frequent class gives "
            f"{result.chance_accuracy:.1%}. Lower train.learning_rate (it is {settings.learning_rate:g}), train more "
            f"epochs (train.epochs is {settings.epochs}), or check the labels."
        )
