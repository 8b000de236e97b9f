"""Choose between a pretrained network as it is, a head on it and the fine-tuned network, by the
query images."""

import math
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from evernear.common.store import Store
from evernear.data.shards import Dataset
from evernear.embedding.artifact import HISTORY_FILE, Epoch, TrainingResult, load_trained
from evernear.embedding.candidate import Candidate, CandidateName
from evernear.embedding.clock import Clock, OnStep
from evernear.embedding.data_loader import OnImages
from evernear.embedding.monitor import too_few_steps
from evernear.embedding.recipe import HEAD, Recipe
from evernear.embedding.train import OnEpoch, train_network
from evernear.evaluation.measure import BATCH_SIZE
from evernear.evaluation.trained import open_recognizer
from evernear.settings import IndexSettings
from evernear.settings.train import ARCFACE

MIN_GAIN_ERRORS = 1.645
"""Standard errors by which a network must be better: a one-sided test at the 5% level."""


def train_and_choose(
    dataset: Dataset,
    recipe: Recipe,
    settings: IndexSettings,
    out_dir: Path,
    store: Store | None = None,
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    on_images: OnImages | None = None,
    clock: Clock | None = None,
) -> TrainingResult:
    """Train each of `candidates`, and write to ``out_dir`` the one that the query images prefer.

    Each recognizes the query images as it would be deployed. A head or the fine-tuned network is
    released if it names significantly more of them right than the one before it (McNemar 1947,
    "Note on the sampling error of the difference between correlated proportions or percentages"):
    with few images, a difference of a few is luck, and a network that was trained on some classes
    recognizes fewer images of a class that is added later
    (docs/decisions/0030-pretrained-weights.md). A fine-tuning for which the time is too short ends
    early, and is no candidate.
    """

    def record(epoch: Epoch) -> None:
        if on_epoch is not None:
            on_epoch(epoch)
        if sentence := too_few_steps(epoch, recipe):
            raise TimeoutError(sentence)

    train = partial(train_network, dataset, store=store, on_epoch=record, on_step=on_step)
    if not recipe.weights or recipe.frozen:
        return train(recipe, out_dir, on_images=on_images, clock=clock)
    recipes = candidates(recipe)
    results = dict[CandidateName, TrainingResult]()
    right = dict[CandidateName, NDArray[np.bool_]]()
    warnings = dict[str, None]()
    with TemporaryDirectory(prefix="evernear-train-") as scratch:
        # The first takes as long as the time allows, and the others one pass over the images.
        for name, each in reversed(list(recipes.items())):
            directory, is_longest = Path(scratch) / name, each is recipe
            count = None if name == "pretrained" else on_images  # it reads the features of the head
            try:
                results[name] = train(each, directory, on_images=count, clock=clock if is_longest else None)
            except TimeoutError as error:
                warnings[str(error)] = None
                continue
            right[name] = named_right(directory, dataset, settings, store)
        answers = dict(reversed(right.items()))  # in the order of the recipes
        preferred = prefer(answers)
        shutil.copytree(Path(scratch) / preferred, out_dir, dirs_exist_ok=True)
    compared = tuple(
        Candidate(name=name, right=int(each.sum()), asked=len(each), chosen=name == preferred)
        for name, each in answers.items()
    )
    warnings |= dict.fromkeys(warning for each in results.values() for warning in each.warnings)
    result = results[preferred].model_copy(update={"candidates": compared, "warnings": tuple(warnings)})
    result.save(out_dir / HISTORY_FILE)
    return result


def candidates(recipe: Recipe) -> Mapping[CandidateName, Recipe]:
    """The recipes to try, the least trained first. Beside fine-tuning, a head gets no augmented
    views, which would take as long."""
    if recipe.keeps_backbone:
        return {"pretrained": recipe.model_copy(update={"frozen": True}), "head": recipe}
    of_head = {"layers": "head", "loss": ARCFACE, "views": 0, "minutes": None, "members": 1}
    head = recipe.model_copy(update=HEAD | of_head)
    return {"pretrained": head.model_copy(update={"frozen": True}), "head": head, "fine-tuned": recipe}


def prefer(right: Mapping[CandidateName, NDArray[np.bool_]]) -> CandidateName:
    """Go through the candidates in their order, and move on to one that is significantly better.
    ``right`` says which of the same images each names right."""
    preferred, *others = right
    for name in others:
        gained = int((right[name] & ~right[preferred]).sum())
        lost = int((right[preferred] & ~right[name]).sum())
        if gained - lost > MIN_GAIN_ERRORS * math.sqrt(gained + lost):
            preferred = name
    return preferred


def named_right(
    trained_dir: Path, dataset: Dataset, settings: IndexSettings, store: Store | None = None
) -> NDArray[np.bool_]:
    """Whether the network in ``trained_dir`` names each query image (N,) right, as deployed."""
    described, network = load_trained(trained_dir)
    recognizer = open_recognizer(described, network, dataset, settings, store)
    shards = ((dataset.shard_blocks(shard, BATCH_SIZE), shard.count) for shard in dataset.shards("query"))
    parts = [np.empty(0, np.bool_)]
    for block, embeddings in recognizer.embed(shards):
        neighbors = recognizer.gallery.search(embeddings, 1)
        parts.append(recognizer.gallery.classify(neighbors).labels == block.labels)
    return np.concatenate(parts)
