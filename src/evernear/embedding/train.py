"""Train the embedding network: a loop to be read from top to bottom.

The same seed, data, settings and machine give the same weights, bit for bit, in one go or killed and resumed:
the randomness of an epoch comes from (seed, epoch, process) alone, and the number of threads fixes the order
in which numbers are added.
"""

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evernear.data.shards import Dataset
from evernear.disk import write_atomically
from evernear.embedding.augment import random_affine
from evernear.embedding.checkpoint import Checkpoints, checkpoint_key
from evernear.embedding.history import HISTORY_FILE, Epoch, TrainingResult
from evernear.embedding.images import TrainingImages
from evernear.embedding.launch import launch
from evernear.embedding.learner import (
    Learner,
    choose_device,
    choose_optimizer,
    choose_precision,
    cross_entropy,
    learning_rate,
    validate,
)
from evernear.embedding.network import Architecture, choose_patch
from evernear.embedding.state import TrainingState
from evernear.embedding.trained import save_trained
from evernear.errors import TrainingError
from evernear.settings import TrainSettings
from evernear.store import Store


def train(
    dataset: Dataset,
    settings: TrainSettings,
    out_dir: Path,
    store: Store | None = None,
    exclude_labels: frozenset[str] = frozenset(),
    on_epoch: Callable[[Epoch], None] | None = None,
) -> TrainingResult:
    """Train on the train split without ``exclude_labels``; write weights, description and history to
    ``out_dir``.

    Accuracy on the gallery split decides which epoch's weights are kept and when to stop early; the test split
    is not touched. ``on_epoch`` is called after each epoch, its checkpoint
    safe.

    Raises:
        TrainingError: fewer than two labels to train on, a loss that is not finite, an unreadable checkpoint,
            or a training process that died.
    """
    if settings.processes > 1 and not dist.is_initialized():
        return launch(dataset, settings, out_dir, store, exclude_labels, on_epoch)

    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = choose_device(settings, rank)
    precision = choose_precision(settings, device)
    images = TrainingImages(dataset, exclude_labels)
    batch_size = max(2, min(settings.batch_size, images.count) // world_size)
    steps = max(images.count // (batch_size * world_size), math.ceil(settings.min_steps / settings.epochs))

    torch.manual_seed(settings.seed)
    architecture = describe(dataset, settings)
    learner = Learner(architecture, images.classes, settings, precision).to(device)
    forward = DistributedDataParallel(learner) if world_size > 1 else learner
    optimizer = choose_optimizer(learner, settings)
    scaler = torch.GradScaler(device.type, enabled=precision == torch.float16)

    key = checkpoint_key(dataset.digest, settings, exclude_labels)
    checkpoints = Checkpoints(store, key)
    state = TrainingState(learner, optimizer, scaler)
    state.restore(checkpoints.load())
    resumed_after_epoch = len(state.history)

    while not state.is_finished(settings):
        epoch, started_s = len(state.history), time.monotonic()
        seed = int(np.random.SeedSequence([settings.seed, epoch, rank]).generate_state(1)[0])
        torch.manual_seed(seed)
        randomness = torch.Generator().manual_seed(seed)
        losses, rate = torch.zeros((), device=device), 0.0

        learner.train()
        batches = images.batches(batch_size, settings.seed, epoch, rank, world_size)
        for step, (pixels, classes) in enumerate(itertools.islice(batches, steps)):
            rate = learning_rate(settings, (epoch * steps + step) / (settings.epochs * steps))
            for group in optimizer.param_groups:
                group["lr"] = rate
            pixels, classes = pixels.to(device), classes.to(device)
            if settings.augment != "none":
                pixels = random_affine(pixels, randomness, elastic=settings.augment == "elastic")
            loss = cross_entropy(forward(pixels, classes), classes, settings.label_smoothing)
            optimizer.zero_grad()
            scaler.scale(loss * settings.members).backward()  # the sum: each learns as it would alone
            scaler.step(optimizer)
            scaler.update()
            losses += loss.detach()

        point = first_process_says(
            Epoch(
                epoch=epoch + 1,
                learning_rate=rate,
                train_loss=float(losses) / steps,
                **validate(learner, images, device),
                duration_s=time.monotonic() - started_s,
            )
        )
        if not math.isfinite(point.train_loss + point.gallery_loss):
            raise TrainingError(
                f"The loss is not a finite number after epoch {point.epoch}; "
                f"lower train.learning_rate (it is {settings.learning_rate:g})."
            )
        state.record(point)
        if rank == 0 and point.epoch % settings.checkpoint_every_epochs == 0:
            checkpoints.save(state.to_resume())
        if rank == 0 and on_epoch is not None:
            on_epoch(point)

    result = TrainingResult(
        key=key,
        kept_epoch=state.kept_epoch,
        stopped_early=len(state.history) < settings.epochs,
        resumed_after_epoch=resumed_after_epoch,
        epochs=tuple(state.history),
    )
    if rank == 0:
        checkpoints.save(state.at_the_end())
        save_trained(out_dir, state.kept_weights, architecture, settings, dataset.digest, exclude_labels)
        write_atomically(out_dir / HISTORY_FILE, result.model_dump_json(indent=2))
    return result


def describe(dataset: Dataset, settings: TrainSettings) -> Architecture:
    """The network for ``dataset``; a channel without any contrast is not stretched to have some."""
    mean, std = dataset.mean_std("train")
    return Architecture(
        shape=dataset.shape,
        mean=mean,
        std=tuple(max(deviation, 1 / 255) for deviation in std),
        patch_px=settings.patch_px or choose_patch(*dataset.shape[:2]),
        width=settings.width,
        embedding_dim=settings.embedding_dim,
        members=settings.members,
    )


def first_process_says(point: Epoch) -> Epoch:
    """The first process's view, in every process: all have to agree on when to stop."""
    if not dist.is_initialized():
        return point
    said = [point]
    dist.broadcast_object_list(said)
    return said[0]
