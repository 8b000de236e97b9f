"""How often replay holds equal retrainings and planted damage:
``python benchmarks/replay.py``.

Networks of one recipe are trained on scikit-learn's digits with different seeds. 500
digits are never ingested: they are the live queries, stored as larger files with a
margin at both sides, as a camera sends them. Each trial draws champion and candidate,
80% of the test images and 80% of the queries, and plants one damage:

- ``another preprocessing``: the candidate's files say that images are stretched, while
  they were cropped for training. The test split is preprocessed already, so it shows
  nothing.
- ``a lost class``: the candidate's dataset lost one class together with its test
  images.
- ``labels exchanged in the dataset``: the labels of three classes rotate in the
  candidate's dataset, and so in its test split.
- ``labels exchanged in the release``: the same in the candidate's index alone,
  which the test split shows.

``gate`` also counts the paired test with the champion and the rule that the candidate
knows the champion's classes.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest
from sklearn.datasets import load_digits

from benchmarks import machine
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.train import train_network
from evernear.evaluation.compare import mcnemar_worse
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.replay import (
    AnswerNumbers,
    Answers,
    PairedAnswers,
    compare_answers,
    replay_rule,
    unexpected_errors,
)
from evernear.index.build import build_index
from evernear.serving.query_log_files import SampledQuery
from evernear.serving.replay import replay_queries
from evernear.settings import ClassSettings, DataSettings, GateSettings, IndexSettings, TrainSettings

QUERIES = 500
SHARE = 0.8
KNOWN = np.arange(10, dtype=np.int32)
NO_WORSE_LEVEL = 0.8 * GateSettings().significance
CASES = (
    "equal retraining",
    "another preprocessing",
    "a lost class",
    "labels exchanged in the dataset",
    "labels exchanged in the release",
)


@dataclass(frozen=True)
class System:
    """One network with its answers to the test split and to the queries,
    as cropped and as stretched images.
    """

    recognizer: Recognizer
    test: Answers
    cropped: Answers
    stretched: Answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=6)
    parser.add_argument("--trials", type=int, default=300)
    arguments = parser.parse_args()
    described = machine.describe()
    with tempfile.TemporaryDirectory() as directory:
        truth, systems = build(Path(directory), arguments.networks)
        replay_s = time_replay(systems)
    rng = np.random.default_rng(0)
    results: list[dict[str, object]] = []
    table = [["planted", "held by replay (95% interval)", "held by the gate"]]
    for case in CASES:
        counts = np.array([trial(case, truth, systems, rng) for _ in range(arguments.trials)]).sum(axis=0)
        interval = binomtest(int(counts[0]), arguments.trials).proportion_ci(0.95, method="exact")
        results.append({"case": case, "replay": int(counts[0]), "gate": int(counts[1]), "trials": arguments.trials})
        held = f"{counts[0] / arguments.trials:.1%} ({float(interval.low):.1%} to {float(interval.high):.1%})"
        table.append([case, held, f"{counts[1] / arguments.trials:.1%}"])
    table.append([f"time to replay {QUERIES} queries", f"{replay_s:.1f} s", ""])
    machine.write(
        "replay",
        "How often replay holds equal retrainings and planted damage",
        described,
        {"replay_s": replay_s, "cases": results},
        table,
    )


def build(directory: Path, networks: int) -> tuple[NDArray[np.int32], list[System]]:
    """Train the networks; return the labels of the test split, and the systems."""
    pixels, labels = digits()
    order = np.random.default_rng(0).permutation(len(pixels))
    for number, row in enumerate(order[QUERIES:]):
        folder = directory / "source" / str(labels[row])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[row]).save(folder / f"{number}.png")
    data = DataSettings(source=f"folder:{directory / 'source'}", gallery_fraction=0.2, query_fraction=0.1)
    save_manifest(ingest_source(data, (directory / "store").as_uri()), directory / "dataset")
    dataset = Dataset.open(directory / "dataset")
    queries = [as_stored(pixels[row]) for row in order[:QUERIES]]
    truth = np.concatenate([block.labels for block in dataset.blocks("test")]).astype(np.int32)
    return truth, [system(dataset, directory / str(seed), seed, queries) for seed in range(networks)]


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 8, 8) and labels (N,)."""
    flat, labels = load_digits(return_X_y=True)
    return (np.asarray(flat) * 15.9).astype(np.uint8).reshape(-1, 8, 8), np.asarray(labels)


def as_stored(pixels: NDArray[np.uint8]) -> bytes:
    """A camera's file: larger, and twice as wide as high."""
    large = pixels.repeat(2, axis=0).repeat(2, axis=1)
    buffer = BytesIO()
    Image.fromarray(np.pad(large, ((0, 0), (8, 8)))).save(buffer, format="PNG")
    return buffer.getvalue()


def system(dataset: Dataset, directory: Path, seed: int, files: list[bytes]) -> System:
    """Train, index and query one network."""
    tiny = TrainSettings(
        epochs=16, min_steps=0, width=8, embedding_dim=32, batch_size=128, patience_epochs=16, seed=seed
    )
    train_network(dataset, tiny, directory / "trained")
    export_network(directory / "trained", dataset, directory / "network", tiny.parity_tolerance)
    embed_dataset(directory / "network", dataset, directory / "embeddings")
    build_index(Embeddings.open(directory / "embeddings"), dataset.labels, IndexSettings(), directory / "index")
    opened = Recognizer.open(directory / "network", directory / "index")
    cropping, stretching = (
        replace(opened, preprocessing=opened.preprocessing.model_copy(update={"resize": resize}))
        for resize in ("crop", "stretch")
    )
    # Computed as in production, including the near-duplicates that are left out.
    replayed = replay_queries(stretching, cropping, numbers(opened), stored(files), 10_000)
    images = np.concatenate([block.images for block in dataset.blocks("test")])
    answers = opened.gallery.recognize(opened.embed(images))
    test = Answers(
        np.array([numbers(opened).of_candidate(answer.pred) for answer in answers], np.int32),
        np.array([answer.dist for answer in answers], np.float32),
        np.array([answer.unknown for answer in answers], np.bool_),
    )
    truth = np.concatenate([block.labels for block in dataset.blocks("test")])
    print(
        f"network {seed} is trained: {float((test.labels == truth).mean()):.1%} of {len(truth)} test images", flush=True
    )
    return System(cropping, test, replayed.answers.champion, replayed.answers.candidate)


def numbers(recognizer: Recognizer) -> AnswerNumbers:
    return AnswerNumbers(recognizer.gallery.description.labels, ClassSettings())


def stored(files: list[bytes]) -> list[SampledQuery]:
    return [SampledQuery("", datetime.now(UTC), "other", "", 0.0, False, file, False) for file in files]


def time_replay(systems: list[System]) -> float:
    """Seconds to replay `QUERIES` queries with two recognizers."""
    files = [as_stored(image) for image in digits()[0][:QUERIES]]
    started_s = time.perf_counter()
    replay_queries(systems[0].recognizer, systems[1].recognizer, numbers(systems[0].recognizer), stored(files), 10_000)
    return time.perf_counter() - started_s


def trial(case: str, truth: NDArray[np.int32], systems: list[System], rng: np.random.Generator) -> tuple[bool, bool]:
    """Whether replay, and whether the gate holds one candidate."""
    champion, candidate = (systems[number] for number in rng.choice(len(systems), 2, replace=False))
    rows = rng.permutation(len(truth))[: int(SHARE * len(truth))]
    queries = rng.permutation(len(champion.cropped.labels))[: int(SHARE * len(champion.cropped.labels))]
    after = candidate.stretched if case == "another preprocessing" else candidate.cropped
    live = PairedAnswers(pick(champion.cropped, queries), pick(after, queries))
    test = PairedAnswers(pick(champion.test, rows), pick(candidate.test, rows))
    labels, classes_kept = truth[rows], True
    accuracy_before = float((test.champion.labels == labels).mean())
    if case == "a lost class":
        lost = int(rng.integers(10))
        classes_kept = False
        live = PairedAnswers(live.champion, without(live.candidate, lost, rng))
        kept = np.flatnonzero(labels != lost)
        labels, test = labels[kept], PairedAnswers(pick(test.champion, kept), pick(test.candidate, kept))
    if case.startswith("labels exchanged"):
        exchanged = KNOWN.copy()
        three = rng.choice(10, 3, replace=False)
        exchanged[three] = exchanged[np.roll(three, 1)]
        live, test = (PairedAnswers(each.champion, relabel(each.candidate, exchanged)) for each in (live, test))
        labels = exchanged[labels] if case.endswith("dataset") else labels
    before, now = (each.labels == labels for each in (test.champion, test.candidate))
    unexpected = unexpected_errors(int((~before).sum()), len(labels), len(labels), accuracy_before)
    replayed = compare_answers(live, test, tuple("0123456789"), KNOWN, unexpected)
    held = not replay_rule(replayed, GateSettings()).passed
    is_worse = mcnemar_worse(int((before & ~now).sum()), int((now & ~before).sum())) <= NO_WORSE_LEVEL
    return held, held or is_worse or not classes_kept


def pick(answers: Answers, rows: NDArray[np.int64]) -> Answers:
    return Answers(answers.labels[rows], answers.distances[rows], answers.unknown[rows])


def relabel(answers: Answers, exchanged: NDArray[np.int32]) -> Answers:
    return Answers(exchanged[answers.labels], answers.distances, answers.unknown)


def without(answers: Answers, lost: int, rng: np.random.Generator) -> Answers:
    """Answers of a gallery without one class: half of its queries become unknown,
    half another class.
    """
    is_lost = answers.labels == lost
    others = ((lost + rng.integers(1, 10, len(is_lost))) % 10).astype(np.int32)
    labels = np.where(is_lost, others, answers.labels).astype(np.int32)
    return Answers(labels, answers.distances, answers.unknown | (is_lost & (rng.random(len(is_lost)) < 0.5)))


if __name__ == "__main__":
    main()
