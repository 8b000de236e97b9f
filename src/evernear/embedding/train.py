"""Train the embedding network. The functions are in call order, from `train_network`.

The same seed, data, settings and machine give bit-for-bit the same weights, whether training is
uninterrupted or killed and resumed. The randomness of an epoch depends on (seed, epoch) alone, and
the number of threads fixes the order of floating-point additions.

Several processes train like one. Each step uses the same images, augmentation, batch normalization
statistics and sample of classes. Only the order of additions differs: the losses of the first
epochs agree within a relative 1e-5 in float32 (1e-6 measured on digits, and 2e-2 in bfloat16), and
rounding errors grow with the steps. The exceptions are dropout, excluded labels (the open-set
probe), and batches that exceed a process's memory and are normalized in micro-batches
(`choose_micro_batches`).
"""

import itertools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evernear.common.output import quantity
from evernear.common.store import Store, open_store
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.embedding import distributed
from evernear.embedding.artifact import HISTORY_FILE, Epoch, TrainedNetwork, TrainingResult, save_trained
from evernear.embedding.augmentation import Draws, Flip, augment, random_flips
from evernear.embedding.clock import Clock, OnStep, Steps
from evernear.embedding.data_loader import OnImages
from evernear.embedding.distributed import GlobalBatchNorm
from evernear.embedding.freeze import freeze
from evernear.embedding.monitor import (
    choose_flips,
    collapse_warnings,
    measure_flips,
    measure_gallery,
    recognizes_all,
)
from evernear.embedding.optimizer import choose_device
from evernear.embedding.recipe import Recipe, learning_rate, margin, size_factor, with_defaults
from evernear.embedding.training_setup import Training, load_checkpoint, prepare_training, save_checkpoint
from evernear.errors import TrainingError
from evernear.settings import TrainSettings

OnEpoch = Callable[[Epoch], None]


def train_network(
    dataset: Dataset,
    settings: TrainSettings | Recipe,
    out_dir: Path,
    store: Store | None = None,
    exclude_labels: frozenset[str] = frozenset(),
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    on_images: OnImages | None = None,
    clock: Clock | None = None,
) -> TrainingResult:
    """Train on the train split without ``exclude_labels``, and write the network to ``out_dir``.

    The gallery split is the validation set, which decides which epoch's weights are saved and
    whether an epoch is the last. With a ``store``, checkpoints are saved there. ``on_epoch`` is
    called once an epoch's checkpoint is saved, ``on_step`` after each step, and ``on_images`` as
    the features of a frozen backbone are computed. A frozen network has no steps, and a head no
    epochs.

    ``recipe.minutes`` limits the time that ``clock`` measures. The schedules follow the larger of
    the share of the steps and that of the time, so a slow machine takes fewer steps in an epoch.

    Raises:
        TrainingError: there are fewer than two labels, the loss is not finite, a checkpoint is
            unreadable, a process died, or multi-node training is not finished.
    """
    recipe, clock = with_defaults(settings, dataset), clock or Clock()
    clock.limit(recipe.minutes)
    if recipe.keeps_backbone:
        return freeze(dataset, recipe, out_dir, store, exclude_labels, on_images, on_step, clock)
    if recipe.nodes > 1:
        return write_result_of_nodes(dataset, recipe, out_dir, store, exclude_labels)
    if recipe.processes > 1:

        def on_message(message: Epoch | Steps) -> None:
            if isinstance(message, Steps):
                if on_step is not None:
                    on_step(message)
            elif on_epoch is not None:
                on_epoch(message)

        train_in_processes(dataset, recipe, out_dir, store, on_message, exclude_labels)
        return TrainingResult.load(out_dir / HISTORY_FILE)
    return train_in_this_process(dataset, recipe, out_dir, store, exclude_labels, on_epoch, on_step, clock)


def train_in_processes(
    dataset: Dataset,
    recipe: Recipe,
    out_dir: Path,
    store: Store | None,
    on_message: Callable[[Epoch | Steps], None],
    exclude_labels: frozenset[str] = frozenset(),
    node: distributed.Node = distributed.ONE_NODE,
) -> None:
    """Run `train_in_this_process` in ``recipe.processes`` processes. Rank 0 writes the files."""
    function = partial(_train_rank, dataset.manifest, recipe, out_dir, store.uri if store else None, exclude_labels)
    backend = "nccl" if torch.cuda.device_count() >= recipe.processes else "gloo"
    distributed.run_processes(function, recipe.processes, backend, on_message, node)


def _train_rank(
    manifest: Manifest,
    recipe: Recipe,
    out_dir: Path,
    store_uri: str | None,
    exclude_labels: frozenset[str],
    send: Callable[[Epoch | Steps], None],
) -> None:
    dataset = Dataset(manifest, open_store(manifest.store_uri))
    store = open_store(store_uri) if store_uri is not None else None
    train_in_this_process(dataset, recipe, out_dir, store, exclude_labels, on_epoch=send, on_step=send)


def write_result_of_nodes(
    dataset: Dataset, recipe: Recipe, out_dir: Path, store: Store | None, exclude_labels: frozenset[str]
) -> TrainingResult:
    """Write multi-node training's result (`evernear.embedding.node`) from its last checkpoint."""
    training = prepare_training(dataset, recipe, exclude_labels, torch.device("cpu"), start=False)
    load_checkpoint(store, training.key, training.state)
    if not training.state.is_finished:
        raise TrainingError(
            f"Training on {recipe.nodes} nodes is not finished: {len(training.state.history)} of "
            f"{quantity(training.recipe.epochs, 'epoch')} are done. "
            "Only the train step of a pipeline starts it (train.nodes)."
        )
    return write_result(training, out_dir, store, resumed_after_epoch=0)


def train_in_this_process(
    dataset: Dataset,
    recipe: Recipe,
    out_dir: Path,
    store: Store | None,
    exclude_labels: frozenset[str],
    on_epoch: OnEpoch | None,
    on_step: OnStep | None,
    clock: Clock | None = None,
) -> TrainingResult:
    """Train in this process, which may be one rank of a process group. Every rank returns the
    result. Only rank 0 writes files and checkpoints, and calls ``on_epoch`` and ``on_step``."""
    rank, _ = distributed.rank_and_world_size()
    device = choose_device(rank % recipe.processes)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the device for `distributed.broadcast_from_rank_0`
    clock = clock or Clock()
    training = prepare_training(dataset, recipe, exclude_labels, device)
    state = training.state
    load_checkpoint(store, training.key, state)
    resumed_after_epoch = len(state.history)
    clock.resume(state.history[-1].used_s if state.history else 0.0)
    while not state.is_finished:
        metrics = train_epoch(training, on_step if rank == 0 else None, clock)
        state.record(metrics)
        if rank == 0:
            save_checkpoint(store, training.key, state.final_checkpoint() | state.resume_state())
        if rank == 0 and on_epoch is not None:
            on_epoch(metrics)
    return write_result(training, out_dir, store, resumed_after_epoch)


def train_epoch(training: Training, on_step: OnStep | None, clock: Clock) -> Epoch:
    """Train one epoch, and measure the network on the gallery split. The epoch ends early if its
    share of the time has passed, and is the last if the gallery can show no improvement."""
    recipe, steps, images = training.recipe, training.steps_per_epoch, training.images
    epoch, started_s = len(training.state.history), time.monotonic()
    rank, world_size = distributed.rank_and_world_size()
    seed = int(np.random.SeedSequence([recipe.seed, epoch, 0]).generate_state(1)[0])
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    flips = choose_flips(training.state.history)
    begin, total = max(epoch / recipe.epochs, clock.share), recipe.epochs * steps
    is_last = epoch + 1 == recipe.epochs or recognizes_all(training.state.history)
    end = 1.0 if is_last else begin + (1 - begin) / (recipe.epochs - epoch)

    training.module.train()
    if recipe.minutes and epoch:
        training.adapt_decay(begin)
    if recipe.weights:
        from evernear.embedding.timm_member import prepare_epoch  # timm takes seconds to import

        prepare_epoch(training.module, size_factor(recipe, begin), training.architecture.pretrained)
    done = 0
    losses, rate = torch.zeros((), device=training.device), 0.0
    batches = (
        images.batches(training.batch_size, recipe.seed, epoch, rank, world_size)
        if training.module.has_class_weights
        else images.paired_batches(training.batch_size, recipe.seed, epoch)
    )
    for step, (pixels, classes) in enumerate(itertools.islice(batches, steps)):
        progress = max(begin + (end - begin) * step / steps, clock.share)
        if step and progress >= end:
            break
        rate = learning_rate(recipe, progress)
        for group in training.optimizer.param_groups:
            group["lr"] = rate * group["rate_factor"]
        losses += train_step(training, pixels, classes, margin(recipe, progress), flips, generator)
        done = step + 1
        if on_step is not None:
            of_time = int(steps * (clock.share - begin) / (end - begin)) if begin < 1 else steps
            on_step(Steps(epoch * steps + min(steps, max(done, of_time)), total, steps))

    validation_s = clock.used_s
    measured = measure_gallery(training.state.result, images.gallery(rank, world_size), training.device)
    clock.reserve(clock.used_s - validation_s)
    metrics = Epoch(
        epoch=epoch + 1,
        learning_rate=rate,
        train_loss=float(distributed.all_reduce_sum(losses)) / (done * world_size),
        **measured,
        duration_s=time.monotonic() - started_s,
        steps=done,
    )
    if not any(earlier.flip_tests for earlier in training.state.history):
        tests = measure_flips(training.state.result, images, training.device, metrics)
        metrics = metrics.model_copy(update={"flip_tests": tests})
    metrics = metrics.model_copy(update={"progress": max(end, clock.share), "used_s": clock.used_s})
    metrics = distributed.broadcast_from_rank_0(metrics)  # all processes must agree on when to stop
    if not math.isfinite(metrics.train_loss + metrics.gallery_loss):
        raise TrainingError(
            f"The loss is not a finite number after epoch {metrics.epoch}; "
            f"lower train.learning_rate (it is {recipe.learning_rate:g})."
        )
    return metrics


def train_step(
    training: Training,
    pixels: Tensor,
    classes: Tensor,
    margin_rad: float,
    flips: tuple[Flip, ...],
    generator: torch.Generator,
) -> Tensor:
    """Update the weights with ``pixels`` (N, C, H, W) and ``classes`` (N,), and return the loss."""
    recipe, device, scaler = training.recipe, training.device, training.scaler
    rank, world_size = distributed.rank_and_world_size()
    training.optimizer.zero_grad()
    batch_classes = distributed.all_gather(classes.to(device))
    first, rng_state = rank * len(pixels), generator.get_state()
    total = torch.zeros((), device=device)
    splits = (pixels.tensor_split(training.micro_batches), classes.tensor_split(training.micro_batches))
    for inputs, targets in zip(*splits, strict=True):
        inputs, targets = inputs.to(device), targets.to(device)
        draws = Draws(generator.set_state(rng_state), len(pixels) * world_size, first)
        inputs = random_flips(augment(inputs, recipe.augment, draws), flips, draws)
        with GlobalBatchNorm() if world_size > 1 else nullcontext():
            loss = training.forward(inputs, targets, margin_rad, batch_classes)
        loss = loss * (len(inputs) / len(pixels))
        scaler.scale(loss * recipe.members).backward()  # summed, so that each member learns as it would alone
        total += loss.detach()
        first += len(inputs)
    scaler.step(training.optimizer)
    scaler.update()
    training.state.count_step()
    return total


def write_result(training: Training, out_dir: Path, store: Store | None, resumed_after_epoch: int) -> TrainingResult:
    """Rank 0 writes the result to ``out_dir``, and the last checkpoint to ``store``."""
    recipe, state = training.recipe, training.state
    result = TrainingResult(
        key=training.key,
        best_epoch=state.best_epoch,
        resumed_after_epoch=resumed_after_epoch,
        epochs=tuple(state.history),
        chance_accuracy=training.images.chance_accuracy,
        by_neighbors=not training.module.has_class_weights,
        planned_steps=recipe.epochs * training.steps_per_epoch,
        warnings=collapse_warnings(state.history, state.best_epoch, recipe),
    )
    rank, _ = distributed.rank_and_world_size()
    if rank != 0:
        return result
    save_checkpoint(store, training.key, state.final_checkpoint())
    test_time_flip = "horizontal" in choose_flips(state.history)
    trained = TrainedNetwork(
        architecture=training.architecture.model_copy(update={"test_time_flip": test_time_flip}),
        dataset_digest=training.dataset_digest,
        exclude_labels=tuple(sorted(training.exclude_labels)),
        recipe=recipe,
        warnings=result.warnings,
        pretrained_sha256=training.pretrained_sha256,
    )
    save_trained(out_dir, state.best_weights, trained)
    result.save(out_dir / HISTORY_FILE)
    return result
