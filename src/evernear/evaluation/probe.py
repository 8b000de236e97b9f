"""Unknown images: how well are classes told apart that the network has never seen?"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from evernear.data.shards import Dataset
from evernear.embedding.embed import Embeddings, embed
from evernear.embedding.export import export
from evernear.embedding.train import train
from evernear.evaluation.recogniser import Recogniser
from evernear.evaluation.statistics import Auroc, Roc, Share, auroc, roc, share
from evernear.index.build import build
from evernear.settings import EvaluationSettings, IndexSettings, TrainSettings

FEWEST_KNOWN = 2
"""Classes that must be left to train on."""


class OpenSet(BaseModel):
    """What a probe found; all but ``held_out`` is None where too few classes leave nothing to hold out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    held_out: tuple[str, ...]
    auroc: Auroc | None = None
    roc: Roc | None = None
    threshold: float | None = None
    """Calibrated as a release's is, on the query split without the classes held out."""
    false_accepts: Share | None = None
    """Test images of the classes held out that lie within the threshold."""
    false_rejects: Share | None = None
    """Test images of the other classes that lie beyond it."""


def probe(
    dataset: Dataset,
    train_settings: TrainSettings,
    settings: EvaluationSettings,
    index_settings: IndexSettings,
) -> OpenSet:
    """Train by the same recipe for ``settings.probe_epochs`` without some classes, then show it all test
    images.

    The candidate itself cannot be asked, for it was trained on every class there is. The classes held out are
    drawn by ``train_settings.seed``, and are in neither training, gallery nor calibration. The network found
    here is thrown away: the figures are about the recipe.
    """
    test_counts = dataset.manifest.label_counts("test")
    held_out = choose_held_out(test_counts, settings.held_out_classes, train_settings.seed)
    if not held_out:
        return OpenSet(held_out=())
    recipe = train_settings.model_copy(update={"epochs": settings.probe_epochs})
    with TemporaryDirectory(prefix="evernear-probe-") as scratch:
        trained, network, embeddings, index = (Path(scratch) / step for step in ("train", "export", "embed", "index"))
        train(dataset, recipe, trained, exclude_labels=held_out)
        export(trained, dataset, network, recipe.parity_tolerance)
        embed(network, dataset, embeddings, batch_size=settings.batch_size)
        build(Embeddings.open(embeddings), dataset.labels, index_settings, index, held_out)
        recogniser = Recogniser.open(network, index)
        known, unknown = _distances(recogniser, dataset, held_out, settings.batch_size)
    threshold = recogniser.gallery.threshold
    return OpenSet(
        held_out=tuple(sorted(held_out)),
        auroc=auroc(known, unknown, settings.confidence),
        roc=roc(known, unknown),
        threshold=threshold,
        false_accepts=share(int((unknown <= threshold).sum()), len(unknown), settings.confidence),
        false_rejects=share(int((known > threshold).sum()), len(known), settings.confidence),
    )


def choose_held_out(test_counts: dict[str, int], wanted: int, seed: int) -> frozenset[str]:
    """``wanted`` of the labels with test images; fewer, if below `FEWEST_KNOWN` would be left to learn."""
    labels = [label for label, count in test_counts.items() if count]
    wanted = min(wanted, len(labels) - FEWEST_KNOWN)
    if wanted < 1:
        return frozenset()
    picked = np.random.default_rng(seed).choice(len(labels), wanted, replace=False)
    return frozenset(labels[number] for number in picked)


def _distances(
    recogniser: Recogniser, dataset: Dataset, held_out: Iterable[str], batch_size: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Distances to the nearest neighbour of test images of known classes and of those held out."""
    numbers = [dataset.labels.index(label) for label in held_out]
    known, unknown = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for block in dataset.blocks("test", batch_size):
        embeddings = recogniser.embed(block.images)
        gallery = recogniser.gallery
        distances = gallery.answer(embeddings, gallery.search(embeddings, gallery.description.k)).distances
        strange = np.isin(block.labels, numbers)
        known.append(distances[~strange])
        unknown.append(distances[strange])
    return np.concatenate(known), np.concatenate(unknown)
