"""The open-set probe, which measures how well distances separate unseen classes from known ones."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evernear.common.store import Store
from evernear.data.group_numbers import GroupNumbers, group_numbers
from evernear.data.manifest import SPLITS, Split
from evernear.data.shards import Dataset
from evernear.embedding.artifact import load_trained
from evernear.embedding.clock import Clock, OnStep
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.embed import gallery_of
from evernear.embedding.freeze import Pretrained, fit_last_layer, open_pretrained
from evernear.embedding.recipe import PROBE_DRAWS, Recipe, recipe_of_probe
from evernear.embedding.train import train_network
from evernear.evaluation.assess import Added, Distances, Draw, Sample, assess, concatenate
from evernear.evaluation.measure import BATCH_SIZE
from evernear.evaluation.open_set import ADDED_IMAGES, OpenSet
from evernear.evaluation.trained import TrainedRecognizer, open_recognizer, with_gallery
from evernear.index.search import Gallery
from evernear.index.vectors import digests_outside, move_toward, noise_of_means
from evernear.settings import EvaluationSettings, IndexSettings, TrainSettings

ADDED_FROM: tuple[Split, ...] = ("gallery", "train")
FEWEST_KNOWN = 2
"""Minimum number of classes that remain for training. Calibration requires two classes in the
gallery."""
TIME_OF_FLIP = 2.0
"""Time to embed an image together with its mirror image, relative to that of the image alone."""
SCENE = 0.9
"""Two images of a class show one scene if their distance is less than this share of the median. The
nearest of 40 images had 0.65 to 0.7 in groceries, and 0.83 to 0.89 in three sets without scenes."""
FEWEST_HELD_OUT = 2
"""Number of classes to hold out by default with fewer than ten classes. With more, a fifth of
them."""


def probe_open_set(
    dataset: Dataset,
    train_settings: TrainSettings,
    settings: EvaluationSettings,
    index_settings: IndexSettings,
    on_step: OnStep | None = None,
    store: Store | None = None,
    on_draw: Callable[[int, int], None] | None = None,
    clock: Clock | None = None,
    views: int | None = None,
) -> OpenSet:
    """Train without some classes, and measure the distances of their images.

    The candidate was trained on all classes. The probe uses its recipe with fewer epochs, and
    excludes the held-out classes, which ``train_settings.seed`` determines, from training and from
    the gallery. A frozen backbone, whose features are cached in ``store``, is probed in several
    draws with different held-out classes, and `with_more_queries`. The threshold is determined from
    the query and gallery images of the held-out classes and the query images of the others, the
    figures from the test split. If images of unseen classes are not significantly farther from the
    gallery than known images, the release calls no image unknown. Each draw then adds the held-out
    classes to the gallery, as a reindex would, and asks with other images of them.

    ``on_draw`` is called before the first and after each draw with the numbers of completed and of
    all draws. Features of a frozen backbone are read from ``store``. If ``train.minutes`` is set,
    ``clock`` measures the time, and no draw begins that is unlikely to end in it. ``views``: see
    `recipe_of_probe`.
    """
    manifest = dataset.manifest
    counts = [manifest.label_counts(split) for split in SPLITS]
    # every class needs images in each split, whether it is held out or not
    eligible = [label for label in manifest.labels if all(count[label] for count in counts)]
    wanted = max(FEWEST_HELD_OUT, len(eligible) // 5)
    recipe, clock = recipe_of_probe(train_settings, dataset, settings.probe_epochs, views), clock or Clock()
    held_out = choose_held_out(eligible, wanted, PROBE_DRAWS if recipe.keeps_backbone else 1, train_settings.seed)
    if not held_out:
        return OpenSet(held_out=())
    clock.limit(recipe.minutes)
    gallery, query, test = (manifest.count(split) for split in ("gallery", "query", "test"))
    clock.passes_after = 1 + TIME_OF_FLIP * (3 * gallery + 2 * query + test) / gallery
    asked = with_more_queries(dataset) if recipe.keeps_backbone else dataset
    open_without = choose_opener(dataset, asked, recipe, index_settings, on_step, store, clock)
    draws: list[Draw] = []
    groups = group_numbers(asked)
    in_halves = bool(recipe.weights) and groups is None
    if on_draw is not None:
        on_draw(0, len(held_out))
    for labels in held_out:
        draws.append(_measure_draw(open_without(labels), asked, labels, groups, in_halves))
        if on_draw is not None:
            on_draw(len(draws), len(held_out))
        if clock.share * (len(draws) + 1) / len(draws) > 1:
            break
    update = {
        "held_out": tuple(sorted(frozenset[str]().union(*held_out[: len(draws)]))),
        "added_in_halves": in_halves,
    }
    return assess(draws, index_settings, one_scale=recipe.keeps_backbone).model_copy(update=update)


def with_more_queries(dataset: Dataset) -> Dataset:
    """``dataset`` with the gallery split among the queries. Its train images suffice as the gallery
    of a frozen backbone, and a small set of photographs has too few queries: a single one of nine
    images would determine the threshold."""
    counts = dataset.manifest.label_counts("train")
    if not all(counts[label] for label in dataset.labels):
        return dataset
    shards = tuple(
        shard.model_copy(update={"split": "query"}) if shard.split == "gallery" else shard
        for shard in dataset.manifest.shards
    )
    return Dataset(dataset.manifest.model_copy(update={"shards": shards}), dataset.store)


def choose_held_out(labels: Sequence[str], wanted: int, draws: int, seed: int) -> list[frozenset[str]]:
    """Choose ``wanted`` of ``labels`` for each draw, without choosing a label twice. A draw gets
    fewer labels if fewer than `FEWEST_KNOWN` classes would otherwise be left. If the labels are
    used up, the result has fewer draws than ``draws``."""
    wanted = min(wanted, len(labels) - FEWEST_KNOWN)
    if wanted < 1:
        return []
    draws = min(draws, len(labels) // wanted)
    picked = np.random.default_rng(seed).choice(len(labels), (draws, wanted), replace=False)
    return [frozenset(labels[int(number)] for number in row) for row in picked]


def _measure_draw(
    recognizer: TrainedRecognizer,
    dataset: Dataset,
    held_out: frozenset[str],
    groups: GroupNumbers | None,
    in_halves: bool,
) -> Draw:
    """The gallery of ``recognizer`` does not contain ``held_out``. ``in_halves``: see
    `_ask_in_halves`."""
    seen = groups.seen_queries() if groups else frozenset[bytes]()
    of_test, of_query = (_measure_split(recognizer, dataset, split, held_out) for split in ("test", "query"))
    unknown = [of_query.unknown.distances]
    if dataset.count("gallery"):
        unknown.append(_measure_split(recognizer, dataset, "gallery", held_out).unknown.distances)
    queries, outside = of_query.known, digests_outside(of_query.digests, seen)
    if outside.any():
        queries = queries.select(outside)
    ask = _ask_in_halves if in_halves else _ask_added
    others = OtherImages(
        concatenate([of_test.unknown, of_query.unknown]), np.concatenate([of_test.embeddings, of_query.embeddings])
    )
    return Draw(
        of_test.known,
        of_test.unknown,
        queries.distances,
        np.concatenate(unknown),
        ask(recognizer.gallery, _added_vectors(recognizer, dataset, held_out), others)
        if len(others.embeddings)
        else None,
    )


class Asked(NamedTuple):
    """A split's images, and those of held-out classes with their embeddings (N, D)."""

    known: Sample
    digests: NDArray[np.uint8]
    """Of the known images."""
    unknown: Sample
    embeddings: NDArray[np.float32]


def _measure_split(
    recognizer: TrainedRecognizer,
    dataset: Dataset,
    split: Split,
    held_out: Iterable[str],
) -> Asked:
    """Nearest-neighbor distances of a split's images."""
    held_out_indices = [dataset.labels.index(label) for label in held_out]
    gallery = recognizer.gallery
    parts: list[Asked] = []
    shards = ((dataset.shard_blocks(shard, BATCH_SIZE), shard.count) for shard in dataset.shards(split))
    for block, embeddings in recognizer.embed(shards):
        distances = gallery.classify(gallery.search(embeddings, 1)).distances
        of_groups = (block.groups,) if dataset.manifest.groups else ()
        images = Sample(distances, (block.labels.astype(np.int32), *of_groups))
        unknown = np.isin(block.labels, held_out_indices)
        parts.append(
            Asked(images.select(~unknown), block.digests[~unknown], images.select(unknown), embeddings[unknown])
        )
    known, digests, unseen, embedded = zip(*parts, strict=True)
    return Asked(concatenate(known), np.concatenate(digests), concatenate(unseen), np.concatenate(embedded))


class AddedVectors(NamedTuple):
    """Vectors (N, D) and labels (N,) that join a gallery."""

    vectors: NDArray[np.float32]
    labels: NDArray[np.int32]


def _added_vectors(recognizer: TrainedRecognizer, dataset: Dataset, held_out: Iterable[str]) -> AddedVectors:
    """`ADDED_IMAGES` of each held-out class, from the gallery split and, if these are too few, from
    the train split, which is read only as far as necessary."""
    counts = [dataset.manifest.label_counts(split) for split in ADDED_FROM]
    wanted = {
        dataset.labels.index(label): min(ADDED_IMAGES, sum(count[label] for count in counts)) for label in held_out
    }
    vectors: dict[int, list[NDArray[np.float32]]] = {label: [] for label in wanted}
    shards = (
        (dataset.shard_blocks(shard, BATCH_SIZE), shard.count)
        for split in ADDED_FROM
        for shard in dataset.shards(split)
    )
    for block, embeddings in recognizer.embed(shards):
        for label, rows in vectors.items():
            rows.extend(embeddings[block.labels == label][: wanted[label] - len(rows)])
        if all(len(rows) == wanted[label] for label, rows in vectors.items()):
            break
    labels = [np.full(len(rows), label, np.int32) for label, rows in vectors.items()]
    return AddedVectors(np.concatenate([np.stack(rows) for rows in vectors.values()]), np.concatenate(labels))


class OtherImages(NamedTuple):
    """Images of held-out classes that do not join the gallery, with their embeddings (N, D)."""

    sample: Sample
    embeddings: NDArray[np.float32]


def _ask_added(gallery: Gallery, added: AddedVectors, others: OtherImages) -> Added:
    """Ask the gallery with the vectors ``added`` to it."""
    labels, distances = _answers_with(gallery, added, others.embeddings)
    return Added(others.sample._replace(distances=distances), labels == others.sample.clusterings[0])


def _ask_in_halves(gallery: Gallery, added: AddedVectors, others: OtherImages) -> Added:
    """Add one half of the images of each class, and ask with the other, which shows other scenes.

    Photographs of a class are often taken on one day, in one place. Random splits then ask with
    images of the same scenes as those in the gallery, of which the networks recognized 95%, but 74%
    of the photographs from other shops (docs/decisions/0008-unknown-images.md).
    """
    parts: list[Added] = []
    for label in np.unique(added.labels):
        of_class = added.vectors[added.labels == label], others.embeddings[others.sample.clusterings[0] == label]
        vectors = np.concatenate([each[:ADDED_IMAGES] for each in of_class])
        side = half_of_scenes(vectors)
        for half in (side, ~side):
            joining = AddedVectors(vectors[half], np.full(half.sum(), label, np.int32))
            labels, distances = _answers_with(gallery, joining, vectors[~half])
            parts.append(Added(Sample(distances, (np.full(len(labels), label, np.int32),)), labels == label))
    samples, right = zip(*parts, strict=True)
    return Added(concatenate(samples), np.concatenate(right))


def half_of_scenes(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """A mask (N,) of half of the ``vectors`` (N, D), N >= 2, that divides at most one scene.

    A scene is a cluster (average linkage) within `SCENE` times the median distance. Images without
    scenes are divided at random.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    distances, rng = pdist(vectors), np.random.default_rng(0)
    scenes = fcluster(linkage(distances, "average"), SCENE * np.median(distances), "distance") - 1
    ranks = rng.permutation(int(scenes.max()) + 1)[scenes]
    half = np.zeros(len(vectors), np.bool_)
    half[np.lexsort((rng.permutation(len(vectors)), ranks))[: len(vectors) // 2]] = True
    return half


def _answers_with(
    gallery: Gallery, added: AddedVectors, queries: NDArray[np.float32]
) -> tuple[NDArray[np.int32], Distances]:
    """The label of each of ``queries`` (N, D), and its distance to the nearest vector, with the
    vectors ``added`` to the gallery."""
    vectors, toward_mean = np.empty_like(added.vectors), gallery.description.toward_mean
    for label in np.unique(added.labels):
        of_class = added.vectors[added.labels == label]
        mean = of_class.mean(axis=0, keepdims=True)
        noise = noise_of_means(mean, np.array([len(of_class)]))
        vectors[added.labels == label] = move_toward(of_class, mean, noise, toward_mean)
    found = gallery.search(queries, 1)
    to_added = np.sqrt(2 - 2 * np.minimum(queries @ vectors.T, 1))
    distances = np.concatenate([found.distances, to_added], axis=1)
    labels = np.concatenate([found.labels, np.broadcast_to(added.labels, to_added.shape)], axis=1)
    nearest, rows = distances.argmin(axis=1), np.arange(len(queries))
    return labels[rows, nearest], distances[rows, nearest].astype(np.float32)


def choose_opener(
    dataset: Dataset,
    asked: Dataset,
    recipe: Recipe,
    settings: IndexSettings,
    on_step: OnStep | None,
    store: Store | None,
    clock: Clock,
) -> Callable[[frozenset[str]], TrainedRecognizer]:
    """Return a function that takes a set of labels and makes a recognizer without them. A frozen
    backbone gets the gallery of ``asked`` (`with_more_queries`)."""
    if not recipe.keeps_backbone:
        return partial(_open_trained, dataset, recipe, settings, on_step, store, clock)
    pretrained = open_pretrained(dataset, recipe, store)
    pretrained.features.compute(dataset, SPLITS)
    return partial(_open_head, dataset, asked, recipe, settings, on_step, pretrained, clock)


def _open_trained(
    dataset: Dataset,
    recipe: Recipe,
    settings: IndexSettings,
    on_step: OnStep | None,
    store: Store | None,
    clock: Clock,
    held_out: frozenset[str],
) -> TrainedRecognizer:
    with TemporaryDirectory(prefix="evernear-probe-") as scratch:
        train_network(dataset, recipe, Path(scratch), store, held_out, on_step=on_step, clock=clock)
        described, network = load_trained(Path(scratch))
    return open_recognizer(described, network, dataset, settings)


def _open_head(
    dataset: Dataset,
    asked: Dataset,
    recipe: Recipe,
    settings: IndexSettings,
    on_step: OnStep | None,
    pretrained: Pretrained,
    clock: Clock,
    held_out: frozenset[str],
) -> TrainedRecognizer:
    """Fit the last layer of a pretrained network."""
    from evernear.embedding.features import FrozenHead, HeadEmbedder  # timm takes seconds to import

    images = TrainingImages(dataset, held_out)
    fit_last_layer(pretrained, dataset, images, recipe, on_step, clock)
    head = FrozenHead(pretrained.network).eval()
    embed, dim = HeadEmbedder(pretrained.features, head).embed, head.standardize.matrix.shape[1]
    joining = gallery_of(dataset.manifest, frozen=True, pretrained_sha256=None)
    return with_gallery(embed, dim, pretrained.features.identity, joining, asked, settings, held_out)
