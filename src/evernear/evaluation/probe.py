"""The open-set probe: how well distances separate classes that the network has never seen."""

import math
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from evernear.common.store import Store
from evernear.data.manifest import SPLITS, Split
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.recipe import with_defaults
from evernear.embedding.train import OnStep, train_network
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.statistics import auroc, false_accepts_at, proportion, roc
from evernear.index.build import build_index
from evernear.index.calibrate import threshold_at, threshold_rejecting
from evernear.index.description import MAX_DISTANCE
from evernear.settings import EvaluationSettings, IndexSettings, TrainSettings

Distances = NDArray[np.float32]
PROBE_SHARE = 0.25
"""Epochs of the probe as a share of the training's epochs."""
PROBE_SHARE_WITH_MUON = 0.6
"""Training with Muon is short. After three of ten epochs on CIFAR-10, unseen classes are not yet as well separated."""
FEWEST_KNOWN = 2
"""Minimum number of classes to train on; calibration needs two in the gallery."""


def probe_open_set(
    dataset: Dataset,
    train_settings: TrainSettings,
    settings: EvaluationSettings,
    index_settings: IndexSettings,
    on_step: OnStep | None = None,
    store: Store | None = None,
) -> OpenSet:
    """Train with the same recipe, but for fewer epochs, without some classes, and measure their distances.

    The candidate cannot be probed, because it was trained on every class. ``train_settings.seed`` chooses the held-out
    classes, which are excluded from training and gallery. Their query and gallery images, and the query images of the
    other classes, determine the share of known images to reject. The test split determines the figures. The network is
    discarded afterwards: the result describes the recipe. If unseen classes are not significantly farther away than
    known ones, the release calls no image unknown. ``on_step`` is called after each training step. Features of a frozen
    backbone come from ``store``.
    """
    manifest = dataset.manifest
    counts = [manifest.label_counts(split) for split in SPLITS]
    # Every class needs images in each split, whether it is held out or not.
    eligible = [label for label in manifest.labels if all(count[label] for count in counts)]
    held_out = choose_held_out(eligible, settings.held_out_classes, train_settings.seed)
    if not held_out:
        return OpenSet(held_out=())
    recipe = probe_recipe(dataset, train_settings, settings)
    recognizer = _recognizer_without(held_out, dataset, recipe, index_settings, settings.batch_size, on_step, store)
    splits: tuple[Split, ...] = ("query", "gallery", "test")
    distances = {split: _distances(recognizer, dataset, split, held_out, settings.batch_size) for split in splits}
    unseen = np.concatenate([distances[split][1] for split in ("query", "gallery")])
    return assess(*distances["test"], distances["query"][0], unseen, index_settings, settings.confidence).model_copy(
        update={"held_out": tuple(sorted(held_out))}
    )


def probe_recipe(dataset: Dataset, train_settings: TrainSettings, settings: EvaluationSettings) -> TrainSettings:
    """``train_settings`` for ``settings.probe_epochs``, or for a share of their epochs if that is 0."""
    recipe = with_defaults(train_settings, dataset)
    epochs = math.ceil(recipe.epochs * (PROBE_SHARE_WITH_MUON if recipe.optimizer == "muon" else PROBE_SHARE))
    return train_settings.model_copy(update={"epochs": settings.probe_epochs or epochs})


def assess(
    known: Distances,
    unknown: Distances,
    known_for_calibration: Distances,
    unknown_for_calibration: Distances,
    settings: IndexSettings,
    confidence: float,
) -> OpenSet:
    """Choose the share of known images to reject, and measure its effect on distances ``known`` and ``unknown``."""
    area = auroc(known, unknown, confidence)
    accepting_threshold = threshold_at(unknown_for_calibration, settings.false_accept_rate)
    required = float((known_for_calibration > accepting_threshold).mean())
    measured = OpenSet(
        held_out=(),
        auroc=area,
        false_accepts_at_95=false_accepts_at(known, unknown, 0.95, confidence),
        roc=roc(known, unknown),
        required_reject_rate=required,
        stated_false_accept_rate=settings.false_accept_rate,
        stated_false_reject_rate=settings.false_reject_rate,
    )
    if measured.separates:
        reject_rate = min(required, settings.false_reject_rate)
        threshold = threshold_rejecting(known_for_calibration, reject_rate)
        choice = {"reject_rate": reject_rate}
    else:
        threshold = MAX_DISTANCE
        choice = {"threshold": MAX_DISTANCE}
    return measured.model_copy(
        update={
            **choice,
            "false_accepts": proportion(int((unknown <= threshold).sum()), len(unknown), confidence),
            "false_rejects": proportion(int((known > threshold).sum()), len(known), confidence),
        }
    )


def choose_held_out(labels: list[str], wanted: int, seed: int) -> frozenset[str]:
    """Choose ``wanted`` of ``labels``; fewer if that would leave less than `FEWEST_KNOWN`."""
    wanted = min(wanted, len(labels) - FEWEST_KNOWN)
    if wanted < 1:
        return frozenset()
    picked = np.random.default_rng(seed).choice(len(labels), wanted, replace=False)
    return frozenset(labels[number] for number in picked)


def _recognizer_without(
    held_out: frozenset[str],
    dataset: Dataset,
    recipe: TrainSettings,
    index_settings: IndexSettings,
    batch_size: int,
    on_step: OnStep | None,
    store: Store | None,
) -> Recognizer:
    cache = store if recipe.frozen else None  # a trained network is discarded, and so are its embeddings
    with TemporaryDirectory(prefix="evernear-probe-") as scratch:
        trained, network, embeddings, index = (Path(scratch) / step for step in ("train", "export", "embed", "index"))
        train_network(dataset, recipe, trained, cache, exclude_labels=held_out, on_step=on_step)
        export_network(trained, dataset, network, recipe.parity_tolerance, cache)
        embed_dataset(network, dataset, embeddings, batch_size=batch_size, store=cache)
        build_index(Embeddings.open(embeddings), dataset.labels, index_settings.temporary, index, held_out)
        return Recognizer.open(network, index, store=cache)


def _distances(
    recognizer: Recognizer, dataset: Dataset, split: Split, held_out: Iterable[str], batch_size: int
) -> tuple[Distances, Distances]:
    """Nearest-neighbor distances of a split's images: first of known classes, then of held-out classes."""
    held_out_indices = [dataset.labels.index(label) for label in held_out]
    known, unknown = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for block, embeddings in recognizer.embed_split(dataset, split, batch_size):
        gallery = recognizer.gallery
        distances = gallery.classify(embeddings, gallery.search(embeddings, gallery.description.k)).distances
        is_held_out = np.isin(block.labels, held_out_indices)
        known.append(distances[~is_held_out])
        unknown.append(distances[is_held_out])
    return np.concatenate(known), np.concatenate(unknown)
