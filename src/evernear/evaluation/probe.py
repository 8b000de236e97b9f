"""The open-set probe, which measures how well distances separate unseen classes from known ones."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

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
from evernear.evaluation.measure import BATCH_SIZE
from evernear.evaluation.open_set import ADDED_IMAGES, OpenSet
from evernear.evaluation.statistics import (
    CONFIDENCE,
    Auroc,
    Clusters,
    Interval,
    Placements,
    Proportion,
    auroc_interval,
    effective_images,
    effective_totals,
    expected_share,
    false_accepts_at,
    place,
    proportion,
    roc,
    spread_of_mean,
    sum_of_spreads,
)
from evernear.evaluation.trained import TrainedRecognizer, open_recognizer, with_gallery
from evernear.index.calibrate import threshold_at, threshold_of, unit_of
from evernear.index.description import MAX_DISTANCE
from evernear.index.search import Gallery
from evernear.index.vectors import digests_outside, move_toward, noise_of_means
from evernear.settings import EvaluationSettings, IndexSettings, TrainSettings

Distances = NDArray[np.float32]
ADDED_FROM: tuple[Split, ...] = ("gallery", "train")
FEWEST_KNOWN = 2
"""Minimum number of classes that remain for training. Calibration requires two classes in the
gallery."""
TIME_OF_FLIP = 2.0
"""Time to embed an image together with its mirror image, relative to that of the image alone."""
MOST_ACCEPTED = 0.9
"""Share of images of unseen classes above which a threshold is no use."""
SCENE = 0.9
"""Two images of a class show one scene if their distance is less than this share of the median. The
nearest of 40 images had 0.65 to 0.7 in groceries, and 0.83 to 0.89 in three sets without scenes."""
FEWEST_HELD_OUT = 2
"""Number of classes to hold out by default with fewer than ten classes. With more, a fifth of
them."""


class Sample(NamedTuple):
    """Images from one split in one draw, either all of known classes or all of held-out classes."""

    distances: Distances
    """Distance of each image (N,) to the nearest gallery vector."""
    clusterings: tuple[Clusters, ...]
    """The class of each image and, with ``data.group``, its group."""

    @property
    def independent(self) -> float:
        """The number of independent images, estimated by `effective_totals` if they have groups."""
        if len(self.clusterings) == 1:
            return float(len(self.distances))
        return float(effective_totals(np.zeros_like(self.clusterings[-1]), self.clusterings[-1], 1)[0])

    def select(self, mask: NDArray[np.bool_]) -> Self:
        return self._replace(
            distances=self.distances[mask], clusterings=tuple(clusters[mask] for clusters in self.clusterings)
        )


class Added(NamedTuple):
    """Images of the held-out classes that ask after the classes joined the gallery."""

    sample: Sample
    right: NDArray[np.bool_]
    """Whether the label is right (N,)."""


class Draw(NamedTuple):
    """Distances that are measured with one network, which was not trained on the held-out
    classes."""

    known: Sample
    unknown: Sample
    known_for_calibration: Distances
    unknown_for_calibration: Distances
    """Query and gallery images of the held-out classes."""
    added: Added | None = None
    """None if no image of the held-out classes is left to ask with."""

    @property
    def classes(self) -> float:
        """The number of all classes, relative to that of the known ones."""
        known, unknown = (len(np.unique(sample.clusterings[0])) for sample in (self.known, self.unknown))
        return (known + unknown) / known


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


def assess(draws: Sequence[Draw], settings: IndexSettings, *, one_scale: bool = False) -> OpenSet:
    """Choose the threshold, and measure its effect on the test images of ``draws``.

    The distances of two trained networks differ, so they are relative to `unit_of` a draw's known
    query images. Those of a frozen backbone have ``one_scale``, also with a head on it, and the
    threshold holds for the release as it is. It is the largest that accepts at most
    ``settings.false_accept_rate`` of the images of unseen classes. If it would reject more than
    ``settings.false_reject_rate`` of the known images, it is raised, because known images take
    precedence. If it then accepts more than `MOST_ACCEPTED` of the others, no image is called
    unknown. In the result, ``held_out`` is empty.
    """
    known, unknown = (_concatenate(samples) for samples in zip(*(draw[:2] for draw in draws), strict=True))
    by_draw = [place(draw.known.distances, draw.unknown.distances) for draw in draws]
    placements = Placements(*(np.concatenate(column) for column in zip(*by_draw, strict=True)))
    known_of_draw = float(np.mean([draw.known.independent for draw in draws]))  # the draws use the same test images
    value, *of_images = auroc_interval(placements, known_of_draw, unknown.independent, CONFIDENCE)
    of_classes = _interval_of_classes(value, placements, known, unknown)
    units = [1.0 if one_scale else unit_of(draw.known_for_calibration) for draw in draws]
    known_queries, unknown_queries = (
        np.concatenate([distances / unit for distances, unit in zip(column, units, strict=True)])
        for column in zip(*((draw.known_for_calibration, draw.unknown_for_calibration) for draw in draws), strict=True)
    )
    accepting = threshold_at(unknown_queries, settings.false_accept_rate)
    # `threshold_rejecting` would take the largest distance of few images, which is often an outlier
    sparing_known = float(np.quantile(known_queries, 1 - settings.false_reject_rate, method="lower"))
    limit = max(accepting, sparing_known)
    limits = [
        (draw, limit if one_scale else threshold_of(draw.known_for_calibration, limit, settings.false_reject_rate))
        for draw in draws
    ]
    accepted_queries = np.concatenate([draw.unknown_for_calibration <= threshold for draw, threshold in limits])
    is_farther, accepts_most = of_images[0] > 0.5, bool(accepted_queries.mean() > MOST_ACCEPTED)
    separates = is_farther and not accepts_most
    if not separates:
        limits = [(draw, MAX_DISTANCE) for draw in draws]
    accepted = np.concatenate([draw.unknown.distances <= threshold for draw, threshold in limits])
    rejected = np.concatenate([draw.known.distances > threshold for draw, threshold in limits])
    at_threshold = _share(accepted, unknown.clusterings)
    relative = np.concatenate([draw.unknown.distances / unit for draw, unit in zip(draws, units, strict=True)])
    ends = quantile_limits(known_queries, len(known_queries) / len(draws), 1 - settings.false_reject_rate)
    within = [float((relative <= max(accepting, end)).mean()) for end in ends]
    return OpenSet(
        held_out=(),
        draws=len(draws),
        auroc=Auroc(
            value=value,
            low=min(of_images[0], of_classes[0]),
            high=max(of_images[1], of_classes[1]),
            known=len(known.distances),
            unknown=len(unknown.distances),
        ),
        false_accepts_at_95=_false_accepts_at_95(known, unknown),
        roc=roc(known.distances, unknown.distances),
        accepts_most=is_farther and accepts_most,
        threshold=(limit if one_scale else None) if separates else MAX_DISTANCE,
        relative_threshold=None if one_scale or not separates else limit,
        reject_rate=float((known_queries > limit).mean()) if separates else None,
        required_reject_rate=float((known_queries > accepting).mean()),
        stated_false_accept_rate=settings.false_accept_rate,
        stated_false_reject_rate=settings.false_reject_rate,
        calibrated_known=len(known_queries),
        calibrated_unknown=len(unknown_queries),
        false_accepts=_including(at_threshold, *within) if separates else at_threshold,
        expected_false_accepts=expected_share(at_threshold, float(np.mean([draw.classes for draw in draws]))),
        false_rejects=_share(rejected, known.clusterings),
        added_recognized=_added_recognized(limits),
    )


def quantile_limits(distances: Distances, images: float, share: float) -> tuple[float, float]:
    """The distances of known images (N,) between which the quantile ``share`` of all such images
    lies, by the binomial distribution of its rank (David and Nagaraja 2003, section 7.1).
    ``images`` is the number of different ones."""
    from scipy.stats import binom

    ranks = binom.interval(CONFIDENCE, round(images), share)
    low, high = np.quantile(distances, [rank / round(images) for rank in ranks], method="lower")
    return float(low), float(high)


def _including(share: Proportion, low: float, high: float) -> Proportion:
    """``share`` with an interval that includes the spread of the threshold, at whose limits the
    share is ``low`` and ``high``."""
    value = share.value
    below, above = (
        math.hypot(value - share.low, value - min(low, value)),
        math.hypot(share.high - value, max(high, value) - value),
    )
    return share.model_copy(update={"low": max(0.0, value - below), "high": min(1.0, value + above)})


def _added_recognized(limits: Sequence[tuple[Draw, float]]) -> Interval | None:
    """The share of images of added classes that are named right within the threshold of their
    draw."""
    asked = [(draw.added, limit) for draw, limit in limits if draw.added]
    if not asked:
        return None
    recognized = np.concatenate([added.right & (added.sample.distances <= limit) for added, limit in asked])
    return expected_share(_share(recognized, _concatenate([added.sample for added, _ in asked]).clusterings))


def _interval_of_classes(value: float, placements: Placements, known: Sample, unknown: Sample) -> tuple[float, float]:
    """Interval limits for the area ``value``. The known and the held-out classes are regarded as
    samples of all classes."""
    from scipy.special import expit, logit

    if not 0 < value < 1:
        return value, value
    half = sum_of_spreads(
        [
            spread_of_mean(placements.known_below, known.clusterings),
            spread_of_mean(placements.beyond_known, unknown.clusterings),
        ]
    ).half_width(CONFIDENCE)
    return float(expit(logit(value) - half)), float(expit(logit(value) + half))


def _false_accepts_at_95(known: Sample, unknown: Sample) -> Interval:
    measured = false_accepts_at(known.distances, unknown.distances, 0.95, CONFIDENCE)
    accepted = unknown.distances <= np.quantile(known.distances, 0.95, method="inverted_cdf")
    of_classes = _share(accepted, unknown.clusterings)
    return measured.model_copy(
        update={"low": min(measured.low, of_classes.low), "high": max(measured.high, of_classes.high)}
    )


def _share(outcomes: NDArray[np.bool_], clusterings: Sequence[Clusters]) -> Proportion:
    """The share of ``outcomes`` (N,) that are true, with an interval that includes the spread
    between classes."""
    effective = effective_images(outcomes, clusterings, CONFIDENCE)
    return proportion(int(outcomes.sum()), len(outcomes), CONFIDENCE, effective)


def _concatenate(samples: Sequence[Sample]) -> Sample:
    distances, clusterings = zip(*samples, strict=True)
    return Sample(np.concatenate(distances), tuple(np.concatenate(each) for each in zip(*clusterings, strict=True)))


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
        _concatenate([of_test.unknown, of_query.unknown]), np.concatenate([of_test.embeddings, of_query.embeddings])
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
    return Asked(_concatenate(known), np.concatenate(digests), _concatenate(unseen), np.concatenate(embedded))


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
    return Added(_concatenate(samples), np.concatenate(right))


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
