"""Accuracy with 100,000 classes of ten images each:
``python -m benchmarks.scale.splits``.

The embeddings imitate a nearly perfect network: a random unit vector for each class,
and noise. They are split as ingest splits images, indexed with default settings, and a
sample of the test split is recognized with two galleries:

- ``by digest``: the digest alone assigns an image to a split, as in earlier versions,
  so some classes have no image in the gallery;
- ``ingest``: the split of `evernear.data.splits.choose_split`.
"""

import argparse
import hashlib
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.scale.vectors import row_dtype, write_shard
from evernear.data.manifest import SPLITS, Split
from evernear.data.splits import choose_split, hash_split, split_fractions
from evernear.embedding.embeddings import DESCRIPTION_FILE, Embeddings, EmbeddingsDescription
from evernear.index.build import build_index
from evernear.index.search import Gallery
from evernear.settings import DataSettings, IndexSettings

DIM, IMAGES_PER_CLASS = 128, 10
NOISE = 0.9
"""Length of the noise, relative to a class's vector: images of a class have a cosine of about
0.55."""
BLOCK = 8192
QUERIES = 10_000
"""Images of the test split that are recognized."""
SETTINGS = DataSettings()
FRACTIONS = split_fractions(SPLITS, SETTINGS)
Rows = NDArray[np.void]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=100_000)
    classes = parser.parse_args().classes
    machine_info, rows = machine.describe(), images(classes)
    galleries: dict[str, list[Split]] = {
        "by digest": [hash_split(digest.tobytes(), FRACTIONS) for digest in rows["digest"]],
        "ingest": split_by_ingest(rows),
    }
    results = []
    for name, splits in galleries.items():
        results.append({"gallery": name, **recognize(rows, np.array(splits), classes)})
        print(results[-1], flush=True)
    table = [["gallery", "vectors", "classes without a vector", "accuracy on the test split", "index"]]
    for result in results:
        table.append(
            [
                result["gallery"],
                f"{result['vectors']:,}",
                f"{result['missing_classes']:,}",
                f"{result['accuracy']:.2%} of {result['queries']:,}",
                result["index"],
            ]
        )
    machine.write(
        "scale_splits",
        "Accuracy with 100,000 classes of ten images each",
        machine_info,
        {"classes": classes, "noise": NOISE, "results": results},
        table,
    )


def images(classes: int) -> Rows:
    """The embeddings of all images, class by class, with labels and digests."""
    rng = np.random.default_rng(0)
    rows = np.empty(classes * IMAGES_PER_CLASS, row_dtype(DIM))
    rows["label"] = np.repeat(np.arange(classes), IMAGES_PER_CLASS)
    centers = rng.standard_normal((classes, DIM), np.float32)
    for start in range(0, len(rows), BLOCK):
        part = rows[start : start + BLOCK]
        noise = rng.standard_normal((len(part), DIM), np.float32)
        vectors = centers[part["label"]] + NOISE * noise
        part["embedding"] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    digests = b"".join(hashlib.sha256(str(number).encode()).digest() for number in range(len(rows)))
    rows["digest"] = np.frombuffer(digests, np.uint8).reshape(-1, 32)
    return rows


def split_by_ingest(rows: Rows) -> list[Split]:
    counts: Counter[Split] = Counter()
    splits: list[Split] = []
    for number, digest in enumerate(rows["digest"]):
        if number % IMAGES_PER_CLASS == 0:
            counts.clear()
        splits.append(choose_split(digest.tobytes(), counts, FRACTIONS))
        counts[splits[-1]] += 1
    return splits


def recognize(rows: Rows, splits: NDArray[np.str_], classes: int) -> dict[str, object]:
    """Index the gallery as the index step does, and recognize the test split."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        shards = [write_shard(directory / f"{name}.npy", name, rows[splits == name]) for name in ("gallery", "query")]
        description = EmbeddingsDescription(network_sha256="0" * 64, dataset_digest="", dim=DIM, shards=tuple(shards))
        description.save(directory / DESCRIPTION_FILE)
        labels = [f"class {number}" for number in range(classes)]
        built = build_index(Embeddings.open(directory), labels, IndexSettings(), directory / "index")
        gallery = Gallery.open(directory / "index", description.network_sha256)
        test = np.random.default_rng(0).permutation(rows[splits == "test"])[:QUERIES]
        correct = 0
        for start in range(0, len(test), BLOCK):
            part = test[start : start + BLOCK]
            embeddings = np.ascontiguousarray(part["embedding"])
            predictions = gallery.classify(gallery.search(embeddings, built.k))
            correct += int((predictions.labels == part["label"]).sum())
    return {
        "vectors": built.size,
        "missing_classes": sum(count == 0 for count in built.counts),
        "queries": len(test),
        "accuracy": correct / len(test),
        "index": built.factory,
    }


if __name__ == "__main__":
    main()
