"""How images from review bias the accuracy that evernear shows:
``python benchmarks/review_bias.py``.

Each repetition divides the 1,797 handwritten digits of scikit-learn into 500 source
images, five rounds of 100 live queries, and 797 fresh images. A small network is
trained once on the source. In each round, the release answers the queries. The queries
for which it is uncertain (`evernear.serving.query_log.is_uncertain`) get their true
label, as if a person labeled them. These images are ingested, and the next release
indexes them with the same network. The last release is measured in three ways:

- ``all test images``: the labeled images have ordinary names. Ingest therefore splits
  them by hash, as before evernear marked images from review.
- ``without images from review``: the files get the names that review writes, and are
  ingested again. The images from review leave the test split, as in evernear.
- ``fresh``: the 797 images that no dataset contains. They are a random sample.

"In the interval" counts the 95% intervals of the test split that contain the accuracy
on the fresh images. The fresh sample has an error too (standard deviation 1.2 points at
an accuracy of 87%), so slightly fewer than 95% are expected. The repetitions divide the
same digits and are not fully independent.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest

from benchmarks import machine
from benchmarks.replay import digits
from evernear.common.disk import sha256_bytes
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.data.sources.names import reviewed_stem
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.train import train_network
from evernear.evaluation.measure import measure
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.statistics import Proportion
from evernear.index.build import build_index
from evernear.index.search import Recognition
from evernear.serving.query_log import is_uncertain
from evernear.serving.responses import Neighbor, Prediction
from evernear.settings import DataSettings, EvaluationSettings, IndexSettings, TrainSettings

SOURCE, ROUNDS, QUERIES = 500, 5, 100
FRACTIONS = {"test_fraction": 0.2, "gallery_fraction": 0.2, "query_fraction": 0.1}


class Repetition(NamedTuple):
    """The accuracy of one release on the test images with and without images from
    review, and on fresh images.
    """

    all_images: Proportion
    unreviewed: Proportion
    fresh: float
    labeled: int

    def reviewed(self) -> tuple[int, int]:
        """Correct and all test images from review."""
        return self.all_images.count - self.unreviewed.count, self.all_images.total - self.unreviewed.total


def repeat(directory: Path, seed: int) -> Repetition:
    """Train, run the rounds of review and measure the last release."""
    pixels, labels = digits()
    order = np.random.default_rng(seed).permutation(len(pixels))
    source, live, fresh = np.split(order, [SOURCE, SOURCE + ROUNDS * QUERIES])
    for row in source:
        write_image(directory, f"{labels[row]}/{row}.png", pixels[row])
    settings = TrainSettings(
        epochs=16, min_steps=0, width=8, embedding_dim=32, batch_size=128, patience_epochs=16, seed=seed
    )
    dataset = ingest(directory)
    train_network(dataset, settings, directory / "trained")
    export_network(directory / "trained", dataset, directory / "network", settings.parity_tolerance)
    release = index(directory, dataset, 0)
    labeled: list[Path] = []
    for number, queries in enumerate(np.split(live, ROUNDS), 1):
        threshold = release.gallery.description.threshold
        answers = recognize(release, pixels[queries])
        for row, answer in zip(queries, answers, strict=True):
            if is_uncertain(as_prediction(answer), threshold):
                labeled.append(write_image(directory, f"{labels[row]}/live-{row}.png", pixels[row]))
        dataset = ingest(directory)
        release = index(directory, dataset, number)
    all_images = measure(release, dataset, EvaluationSettings())[0].accuracy
    for file in labeled:
        file.rename(file.with_name(f"{reviewed_stem(sha256_bytes(file.read_bytes()))}.png"))
    marked = ingest(directory)
    unreviewed = measure(release, marked, EvaluationSettings())[0].accuracy
    left_out = sum(marked.manifest.reviewed_left_out.get("test", {}).values())
    if left_out != all_images.total - unreviewed.total:
        raise AssertionError(f"{left_out} images were left out of {all_images.total}, but {unreviewed.total} remain.")
    predictions = [answer.pred for answer in recognize(release, pixels[fresh])]
    accuracy = float((np.array(predictions) == labels[fresh].astype(str)).mean())
    return Repetition(all_images, unreviewed, accuracy, len(labeled))


def write_image(directory: Path, name: str, pixels: NDArray[np.uint8]) -> Path:
    """Write an image (H, W) to the source and return its path."""
    path = directory / "source" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def ingest(directory: Path) -> Dataset:
    """Ingest the source and open the new snapshot."""
    settings = DataSettings(source=f"folder:{directory / 'source'}", **FRACTIONS)
    manifest = ingest_source(settings, (directory / "store").as_uri())
    snapshot = directory / manifest.digest
    save_manifest(manifest, snapshot)
    return Dataset.open(snapshot)


def index(directory: Path, dataset: Dataset, number: int) -> Recognizer:
    """Embed the gallery with the network of ``directory`` and index it."""
    embeddings, out = directory / f"embeddings-{number}", directory / f"index-{number}"
    embed_dataset(directory / "network", dataset, embeddings)
    build_index(Embeddings.open(embeddings), dataset.labels, IndexSettings(), out)
    return Recognizer.open(directory / "network", out)


def recognize(release: Recognizer, pixels: NDArray[np.uint8]) -> list[Recognition]:
    """Recognize images (N, H, W)."""
    return release.gallery.recognize(release.embed(pixels[..., None]))


def as_prediction(answer: Recognition) -> Prediction:
    """The answer as a server returns it."""
    neighbors = tuple(Neighbor(label=each.label, dist=each.dist) for each in answer.neighbors)
    return Prediction(pred=answer.pred, dist=answer.dist, unknown=answer.unknown, neighbors=neighbors, version="")


def row_of(name: str, shown: list[Proportion], fresh: NDArray[np.float64]) -> tuple[list[str], dict[str, float]]:
    """A row of the table, and its values."""
    values = np.array([each.value for each in shown])
    inside = int(sum(each.low <= truth <= each.high for each, truth in zip(shown, fresh, strict=True)))
    interval = binomtest(inside, len(shown)).proportion_ci(0.95, method="exact")
    images = float(np.mean([each.total for each in shown]))
    case = {"images": images, "accuracy": float(values.mean()), "bias": float((values - fresh).mean()), "in": inside}
    coverage = f"{inside} of {len(shown)} ({float(interval.low):.0%} to {float(interval.high):.0%})"
    return [name, f"{images:.0f}", f"{values.mean():.1%}", f"{case['bias'] * 100:+.1f}", coverage], case


def main() -> None:
    """Run all repetitions and write their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    repetitions: int = parser.parse_args().repetitions
    description, results = machine.describe(), list[Repetition]()
    for seed in range(repetitions):
        with tempfile.TemporaryDirectory(prefix="evernear-review-") as directory:
            results.append(repeat(Path(directory), seed))
        print(seed, *results[-1], file=sys.stderr, flush=True)
    fresh = np.array([each.fresh for each in results])
    rows = {
        "all test images": [each.all_images for each in results],
        "without images from review": [each.unreviewed for each in results],
    }
    table = [["measured on", "images, mean", "accuracy, mean", "points from fresh, mean", "in the interval"]]
    cases: dict[str, dict[str, float]] = {}
    for name, accuracies in rows.items():
        row, cases[name] = row_of(name, accuracies, fresh)
        table.append(row)
    correct, total = np.array([each.reviewed() for each in results]).sum(axis=0).tolist()
    table.append(["test images from review alone", f"{total / repetitions:.0f}", f"{correct / total:.1%}", "", ""])
    table.append(["fresh", f"{len(digits()[0]) - SOURCE - ROUNDS * QUERIES}", f"{fresh.mean():.1%}", "", ""])
    shown = [(each.all_images.value, each.unreviewed.value, each.fresh, each.labeled) for each in results]
    values = [dict(zip(("all", "unreviewed", "fresh", "labeled"), each, strict=True)) for each in shown]
    machine.write(
        "review_bias",
        "Accuracy after five rounds of review, with and without the images from review",
        description,
        {"cases": cases, "reviewed": {"correct": correct, "total": total}, "repetitions": values},
        table,
    )


if __name__ == "__main__":
    main()
