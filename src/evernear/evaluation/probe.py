"""The open-set probe, which measures how well distances separate unseen classes from known ones."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from evernear.common.store import Store
from evernear.data.gallery import joining_gallery
from evernear.data.groups import GroupNumbers, group_numbers
from evernear.data.manifest import SPLITS, Split
from evernear.data.shards import Dataset
from evernear.embedding.artifact import load_trained
from evernear.embedding.clock import Clock, OnStep
from evernear.embedding.data_loader import ImageVectors, TrainingImages
from evernear.embedding.embed import Embed, write_embeddings
from evernear.embedding.embeddings import EmbeddingCache, Embeddings
from evernear.embedding.export import center, centered_head
from evernear.embedding.freeze import Pretrained, fit_last_layer, open_pretrained
from evernear.embedding.network import freeze_parameters
from evernear.embedding.recipe import PROBE_DRAWS, Recipe, recipe_of_probe
from evernear.embedding.train import train_network
from evernear.evaluation.measure import BATCH_SIZE
from evernear.evaluation.open_set import OpenSet
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
    false_accepts_at,
    place,
    proportion,
    roc,
    spread_of_mean,
    sum_of_spreads,
)
from evernear.index.build import build_index
from evernear.index.calibrate import threshold_at, threshold_rejecting
from evernear.index.description import MAX_DISTANCE
from evernear.index.search import Gallery
from evernear.index.vectors import digests_outside
from evernear.settings import EvaluationSettings, IndexSettings, TrainSettings

Distances = NDArray[np.float32]
FEWEST_KNOWN = 2
"""Minimum number of classes that remain for training. Calibration requires two classes in the
gallery."""
TIME_OF_FLIP = 2.0
"""Time to embed an image together with its mirror image, relative to that of the image alone."""
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


class Draw(NamedTuple):
    """Distances that are measured with one network, which was not trained on the held-out
    classes."""

    known: Sample
    unknown: Sample
    known_for_calibration: Distances
    unknown_for_calibration: Distances
    """Query and gallery images of the held-out classes."""


class ProbedRecognizer(NamedTuple):
    """A network's gallery, and a function that embeds queries with the network."""

    gallery: Gallery
    embed: Embed


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
    draws with different held-out classes. The share of known images to reject is determined from
    the query and gallery images of the held-out classes and the query images of the others, the
    figures from the test split. If images of unseen classes are not significantly farther from the
    gallery than known images, the release calls no image unknown.

    ``on_draw`` is called after each draw with the numbers of completed and of all draws. Features
    of a frozen backbone are read from ``store``. If ``train.minutes`` is set, ``clock`` measures
    the time, and no draw begins that is unlikely to end in it. ``views``: see `recipe_of_probe`.
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
    open_without = choose_opener(dataset, recipe, index_settings, on_step, store, clock)
    draws: list[Draw] = []
    with group_numbers(dataset) as groups:
        for labels in held_out:
            draws.append(_measure_draw(open_without(labels), dataset, labels, groups))
            if on_draw is not None:
                on_draw(len(draws), len(held_out))
            if clock.share * (len(draws) + 1) / len(draws) > 1:
                break
    all_held_out = tuple(sorted(frozenset[str]().union(*held_out[: len(draws)])))
    return assess(draws, index_settings).model_copy(update={"held_out": all_held_out})


def assess(draws: Sequence[Draw], settings: IndexSettings) -> OpenSet:
    """Choose the share of known images to reject, and measure its effect on the test images of
    ``draws``. Each draw has a separate threshold, because the distances of two networks differ. In
    the result, ``held_out`` is empty."""
    known, unknown = (_concatenate(samples) for samples in zip(*(draw[:2] for draw in draws), strict=True))
    by_draw = [place(draw.known.distances, draw.unknown.distances) for draw in draws]
    placements = Placements(*(np.concatenate(column) for column in zip(*by_draw, strict=True)))
    known_of_draw = float(np.mean([draw.known.independent for draw in draws]))  # the draws use the same test images
    value, *of_images = auroc_interval(placements, known_of_draw, unknown.independent, CONFIDENCE)
    of_classes = _interval_of_classes(value, placements, known, unknown)
    required = float(np.mean([_required_reject_rate(draw, settings.false_accept_rate) for draw in draws]))
    separates = of_images[0] > 0.5
    reject_rate = min(required, settings.false_reject_rate) if separates else None
    thresholds = [
        MAX_DISTANCE if reject_rate is None else threshold_rejecting(draw.known_for_calibration, reject_rate)
        for draw in draws
    ]
    limits = list(zip(draws, thresholds, strict=True))
    accepted = np.concatenate([draw.unknown.distances <= threshold for draw, threshold in limits])
    rejected = np.concatenate([draw.known.distances > threshold for draw, threshold in limits])
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
        threshold=None if separates else MAX_DISTANCE,
        reject_rate=reject_rate,
        required_reject_rate=required,
        stated_false_accept_rate=settings.false_accept_rate,
        stated_false_reject_rate=settings.false_reject_rate,
        false_accepts=_share(accepted, unknown.clusterings),
        false_rejects=_share(rejected, known.clusterings),
    )


def _required_reject_rate(draw: Draw, false_accept_rate: float) -> float:
    """Share of known images that are rejected by the threshold for ``false_accept_rate``."""
    return float((draw.known_for_calibration > threshold_at(draw.unknown_for_calibration, false_accept_rate)).mean())


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
    recognizer: ProbedRecognizer,
    dataset: Dataset,
    held_out: frozenset[str],
    groups: GroupNumbers | None,
) -> Draw:
    """The gallery of ``recognizer`` does not contain ``held_out``."""
    seen = groups.seen_queries() if groups else frozenset[bytes]()
    known, unknown = _distances(recognizer, dataset, "test", held_out, groups)
    queries, others = _distances(recognizer, dataset, "query", held_out, None, seen)
    _, gallery = _distances(recognizer, dataset, "gallery", held_out, None)
    return Draw(known, unknown, queries.distances, np.concatenate([others.distances, gallery.distances]))


def _distances(
    recognizer: ProbedRecognizer,
    dataset: Dataset,
    split: Split,
    held_out: Iterable[str],
    groups: GroupNumbers | None,
    exclude: frozenset[bytes] = frozenset(),
) -> tuple[Sample, Sample]:
    """Nearest-neighbor distances of a split's images: the known classes, then the held-out classes.
    Known images whose digest is in ``exclude`` are left out, unless none would be left."""
    held_out_indices = [dataset.labels.index(label) for label in held_out]
    gallery = recognizer.gallery
    parts: list[Sample] = []
    included: list[NDArray[np.bool_]] = []
    shards = ((dataset.shard_blocks(shard, BATCH_SIZE), shard.count) for shard in dataset.shards(split))
    for block, embeddings in recognizer.embed(shards):
        distances = gallery.classify(embeddings, gallery.search(embeddings, gallery.description.k)).distances
        of_groups = (groups.of(block.digests),) if groups else ()
        parts.append(Sample(distances, (block.labels.astype(np.int32), *of_groups)))
        included.append(digests_outside(block.digests, exclude))
    images = _concatenate(parts)
    is_unknown = np.isin(images.clusterings[0], held_out_indices)
    is_known = ~is_unknown & np.concatenate(included)
    return images.select(is_known if is_known.any() else ~is_unknown), images.select(is_unknown)


def choose_opener(
    dataset: Dataset,
    recipe: Recipe,
    settings: IndexSettings,
    on_step: OnStep | None,
    store: Store | None,
    clock: Clock,
) -> Callable[[frozenset[str]], ProbedRecognizer]:
    """Return a function that takes a set of labels and makes a recognizer without them."""
    if not recipe.keeps_backbone:
        return partial(_open_trained, dataset, recipe, settings, on_step, store, clock)
    pretrained = open_pretrained(dataset, recipe, store)
    pretrained.features.compute(dataset, SPLITS)
    return partial(_open_head, dataset, recipe, settings, on_step, pretrained, clock)


def _open_trained(
    dataset: Dataset,
    recipe: Recipe,
    settings: IndexSettings,
    on_step: OnStep | None,
    store: Store | None,
    clock: Clock,
    held_out: frozenset[str],
) -> ProbedRecognizer:
    with TemporaryDirectory(prefix="evernear-probe-") as scratch:
        train_network(dataset, recipe, Path(scratch), store, held_out, on_step=on_step, clock=clock)
        described, network = load_trained(Path(scratch))
    scripted, dim = freeze_parameters(center(network, dataset, held_out)), described.architecture.embedding_dim
    embed = ImageVectors(EmbeddingCache(None, "", dim), lambda: scripted).of
    return _with_gallery(embed, dim, described.weights_sha256, frozenset(), dataset, settings, held_out)


def _open_head(
    dataset: Dataset,
    recipe: Recipe,
    settings: IndexSettings,
    on_step: OnStep | None,
    pretrained: Pretrained,
    clock: Clock,
    held_out: frozenset[str],
) -> ProbedRecognizer:
    """Fit the last layer of a pretrained network."""
    from evernear.embedding.features import HeadEmbedder  # timm takes seconds to import

    images = TrainingImages(dataset, held_out)
    fit_last_layer(pretrained, dataset, images, recipe, on_step, clock)
    head = centered_head(pretrained.network, pretrained.features, dataset, held_out)
    embed, dim = HeadEmbedder(pretrained.features, head).embed, head.standardize.matrix.shape[1]
    identity, untrained = pretrained.features.identity, frozenset(dataset.labels)
    return _with_gallery(embed, dim, identity, untrained, dataset, settings, held_out)


def _with_gallery(
    embed: Embed,
    dim: int,
    network_sha256: str,
    untrained: frozenset[str],
    dataset: Dataset,
    settings: IndexSettings,
    held_out: frozenset[str],
) -> ProbedRecognizer:
    """Exporting the network would take longer than embedding the gallery."""
    joining = joining_gallery(dataset.manifest, untrained)
    with TemporaryDirectory(prefix="evernear-probe-") as scratch:
        embeddings, index = Path(scratch) / "embed", Path(scratch) / "index"
        write_embeddings(embed, dim, dataset, embeddings, joining, network_sha256)
        build_index(Embeddings.open(embeddings), dataset.labels, settings.temporary, index, held_out)
        return ProbedRecognizer(Gallery.open(index, network_sha256), embed)
