"""Exact search compared with the index that evernear chooses, at a million vectors:
``python -m benchmarks.scale.index``.

The vectors are real embeddings (`benchmarks.scale.vectors`). ``auto`` is built by the product's own
code, tuned on variations of the query split's images. Recall@1 is measured on variations of the
test split's images, against exact search; the two indexes answer the same batches of 32
alternately, in one process, as in the server.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.scale.vectors import embed_variations
from evernear.common.disk import sha256_file
from evernear.data.manifest import Split, load_manifest
from evernear.embedding.embeddings import EmbeddingBlock, Embeddings
from evernear.index.build import build_index
from evernear.index.calibrate import is_nearest
from evernear.index.description import DESCRIPTION_FILE, PARTS, VECTORS_FILE, IndexDescription
from evernear.index.faiss_compat import FaissIndex, faiss
from evernear.index.search import Gallery
from evernear.index.vectors import exact_neighbors
from evernear.settings import IndexSettings

COUNTS: dict[Split, int] = {"gallery": 1_000_000, "query": 60_000, "test": 40_000}
RECALL_QUERIES = 4096
BATCH_SIZE = 32
BATCHES = {"flat": 20, "auto": 400}
ROUNDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="mnist", help="a source of `evernear run`: mnist or mnist:DIRECTORY")
    parser.add_argument("--directory", type=Path, required=True, help="embeddings and indexes, created if missing")
    arguments = parser.parse_args()

    embeddings = embed_variations(arguments.source, arguments.directory, COUNTS)
    labels = load_manifest(arguments.directory).labels
    machine_info = machine.describe() | {"faiss": faiss.__version__, "faiss_threads": 1}
    started_s = time.perf_counter()
    described = build_index(embeddings, labels, IndexSettings(), arguments.directory / "auto")
    build_s = time.perf_counter() - started_s
    chosen = f"{described.factory} ({described.search}), chosen because {described.reason}"
    print(chosen, f"{build_s:.0f} s", flush=True)
    build_flat(embeddings, described, arguments.directory)

    faiss.omp_set_num_threads(1)  # as in a worker of the server
    queries = test_queries(embeddings)
    galleries = {name: Gallery.open(arguments.directory / name, embeddings.network_sha256) for name in BATCHES}
    seconds = batch_seconds(galleries, queries)
    exact = exact_neighbors(queries, embeddings.blocks("gallery"))
    rows = {
        name: {
            "recall_at_1": recall_at_1(arguments.directory / name, queries, exact),
            "batch_qps": BATCH_SIZE / float(np.median(seconds[name])),
            "p99_ms": float(np.quantile(seconds[name], 0.99)) * 1e3,
            "size_bytes": (arguments.directory / name / VECTORS_FILE).stat().st_size,
        }
        for name in galleries
    }
    details = {
        "chosen": chosen,
        "build_s": build_s,
        "recall_queries": len(queries.labels),
        "batch_size": BATCH_SIZE,
        "times_qps": rows["auto"]["batch_qps"] / rows["flat"]["batch_qps"],
        "share_of_size": rows["auto"]["size_bytes"] / rows["flat"]["size_bytes"],
    }
    machine.write(
        "index",
        "Exact search and the automatically chosen index at a million vectors",
        machine_info,
        {"at_1000000": rows, "details": details},
        table(rows),
    )


def build_flat(embeddings: Embeddings, described: IndexDescription, directory: Path) -> None:
    """Write the same gallery with exact search next to the chosen index."""
    index = faiss.IndexFlatIP(embeddings.dim)
    for block in embeddings.blocks("gallery"):
        index.add(block.embeddings)
    flat = directory / "flat"
    FaissIndex(index).save(flat)
    for name in PARTS:
        if name != VECTORS_FILE:
            (flat / name).write_bytes((directory / "auto" / name).read_bytes())
    parts = {name: sha256_file(flat / name) for name in PARTS}
    changed = {"factory": "Flat", "search": "", "reason": "", "parts": parts}
    described.model_copy(update=changed).save(flat / DESCRIPTION_FILE)


def test_queries(embeddings: Embeddings) -> EmbeddingBlock:
    """`RECALL_QUERIES` embeddings of the test split, evenly spaced and sorted by label."""
    block = next(iter(embeddings.blocks("test")))
    chosen = np.linspace(0, len(block.labels) - 1, RECALL_QUERIES).astype(int)
    chosen = chosen[np.argsort(block.labels[chosen], kind="stable")]
    return EmbeddingBlock(block.embeddings[chosen], block.labels[chosen], block.digests[chosen])


def batch_seconds(galleries: dict[str, Gallery], queries: EmbeddingBlock) -> dict[str, list[float]]:
    """Seconds of each batch; the indexes alternate."""
    order = np.random.default_rng(0).permutation(len(queries.labels))
    shuffled = queries.embeddings[order]
    starts = range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE)
    seconds: dict[str, list[float]] = {name: [] for name in galleries}
    for _ in range(ROUNDS):
        for name, gallery in galleries.items():
            for batch in range(BATCHES[name] // ROUNDS):
                start = starts[batch % len(starts)]
                started_s = time.perf_counter()
                gallery.search(shuffled[start : start + BATCH_SIZE], gallery.description.k)
                seconds[name].append(time.perf_counter() - started_s)
    return seconds


def recall_at_1(directory: Path, queries: EmbeddingBlock, exact: Any) -> float:
    index = FaissIndex(faiss.read_index(str(directory / VECTORS_FILE)))
    distances, rows = index.search(queries.embeddings, 1)
    return float(is_nearest(rows[:, 0], distances[:, 0], exact).mean())


def table(rows: dict[str, dict[str, float]]) -> list[list[str]]:
    heading = ["1,000,000 vectors of 128", "recall@1", "queries/s at batch 32", "batch p99, ms", "index, MB"]
    return [heading] + [
        [
            name,
            f"{row['recall_at_1']:.4f}",
            f"{row['batch_qps']:,.0f}",
            f"{row['p99_ms']:,.1f}",
            f"{row['size_bytes'] / 1e6:,.0f}",
        ]
        for name, row in rows.items()
    ]


if __name__ == "__main__":
    main()
