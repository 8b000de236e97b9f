"""Calibrate and evaluate on a million vectors:
``python -m benchmarks.scale.evaluation``.

It reads the embeddings and the index that ``benchmarks.scale.index`` wrote. Calibration
runs as in the index step; the queries of the evaluation are embeddings of the test
split, repeated, in blocks as in the evaluate step. Each phase is timed by wall clock
and by CPU, because other processes lengthen the former only. Embedding the images is
not included; `benchmarks/embed_gallery.py` measures it.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from benchmarks import machine
from evernear.embedding.embeddings import EmbeddingBlock, Embeddings
from evernear.evaluation.measure import RECALL_AT
from evernear.index.calibrate import calibrate
from evernear.index.description import VECTORS_FILE
from evernear.index.exact import exact_neighbors, sample_queries
from evernear.index.faiss_compat import FaissIndex, faiss
from evernear.index.search import Gallery
from evernear.settings import EvaluationSettings, IndexSettings

FULL_QUERIES = 500_000
Seconds = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="the directory of benchmarks.scale.index")
    parser.add_argument("--queries", type=int, default=FULL_QUERIES, help="queries to evaluate")
    arguments = parser.parse_args()

    machine_info = machine.describe() | {"faiss": faiss.__version__, "faiss_threads": faiss.omp_get_max_threads()}
    embeddings = Embeddings.open(arguments.directory / "embeddings")
    gallery = Gallery.open(arguments.directory / "auto", embeddings.network_sha256)
    phases: dict[str, Seconds] = {}

    with timed(phases, "exact neighbors of the sample"):
        queries = sample_queries(embeddings, np.ones(len(gallery.description.labels), np.bool_))
        exact = exact_neighbors(queries, embeddings.blocks("gallery"))
    with timed(phases, "calibration"):
        index = FaissIndex.open(arguments.directory / "auto" / VECTORS_FILE)
        calibrate(queries, exact, index, IndexSettings())
    with timed(phases, "search and classification"):
        for block in test_blocks(embeddings, arguments.queries, EvaluationSettings().batch_size):
            neighbors = gallery.search(block, max(RECALL_AT, gallery.description.k))
            gallery.classify(block, neighbors)

    factor = FULL_QUERIES / arguments.queries
    cpu_s_by_phase = {
        name: phase["cpu_s"] * (factor if name.startswith("search") else 1) for name, phase in phases.items()
    }
    result = {
        "gallery": gallery.description.size,
        "sample": len(queries.labels),
        "queries": arguments.queries,
        "phases": phases,
        "cpu_s_of_500000_queries": sum(cpu_s_by_phase.values()),
    }
    rows = [
        [name, f"{seconds:,.1f}"]
        for name, seconds in (*cpu_s_by_phase.items(), ("total", sum(cpu_s_by_phase.values())))
    ]
    machine.write(
        "scale_evaluation",
        "Calibration and evaluation at a million vectors",
        machine_info,
        result,
        [[heading(result), "CPU time, s"], *rows],
    )


@contextmanager
def timed(phases: dict[str, Seconds], name: str) -> Iterator[None]:
    started_s, cpu_before_s = time.perf_counter(), time.process_time()
    yield
    phases[name] = {"wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - cpu_before_s}
    print(name, phases[name], flush=True)


def test_blocks(embeddings: Embeddings, count: int, size: int) -> Iterator[np.ndarray]:
    """``count`` vectors of the test split in blocks of ``size``,
    starting over at its end.
    """
    blocks: list[EmbeddingBlock] = list(embeddings.blocks("test"))
    vectors = np.concatenate([block.embeddings for block in blocks])
    vectors = vectors[np.random.default_rng(0).permutation(len(vectors))]
    parts = [vectors[start : start + size] for start in range(0, len(vectors) - size + 1, size)]
    return islice(cycle(parts), count // size)


def heading(result: dict[str, object]) -> str:
    scaled = "" if result["queries"] == FULL_QUERIES else f", estimated from {result['queries']:,}"
    return f"{result['gallery']:,} vectors, {FULL_QUERIES:,} queries{scaled}"


if __name__ == "__main__":
    main()
