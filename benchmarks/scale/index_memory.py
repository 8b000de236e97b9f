"""Build the automatic index within a memory limit:
``python -m benchmarks.scale.index_memory --count 10000000``.

The vectors are the gallery that ``benchmarks.scale.index`` embedded, repeated up to
``--count``, so a larger gallery takes no disk space. The kernel enforces the limit
(``RLIMIT_DATA``): an allocation beyond it fails. The peak is ``VmHWM``. Each count is
added to the table; memory and size are valid for distinct vectors too, recall is not.
"""

import argparse
import json
import resource
import time
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import machine
from evernear.data.manifest import load_manifest
from evernear.embedding.embeddings import DESCRIPTION_FILE, Embeddings, EmbeddingsDescription, EmbeddingShard
from evernear.index.build import build_index
from evernear.index.description import VECTORS_FILE
from evernear.settings import IndexSettings

LIMIT_BYTES = 6 * 2**30
RESULT = "scale_index_memory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="the directory of benchmarks.scale.index")
    parser.add_argument("--count", type=int, default=10_000_000, help="vectors to index, in whole shards of 65,536")
    arguments = parser.parse_args()

    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    labels = load_manifest(arguments.directory).labels
    started_s, cpu_before_s = time.perf_counter(), time.process_time()
    with TemporaryDirectory(dir=arguments.directory) as scratch, TemporaryDirectory(dir=arguments.directory) as index:
        embeddings = repeat_gallery(arguments.directory / "embeddings", arguments.count, Path(scratch))
        described = build_index(embeddings, labels, IndexSettings(), Path(index))
        size_bytes = (Path(index) / VECTORS_FILE).stat().st_size
    run = {
        "vectors": described.size,
        "chosen": f"{described.factory} ({described.search})",
        "wall_s": time.perf_counter() - started_s,
        "cpu_s": time.process_time() - cpu_before_s,
        "peak_bytes": peak_bytes(),
        "size_bytes": size_bytes,
    }
    runs = [*(each for each in load_runs() if each["vectors"] != run["vectors"]), run]
    runs.sort(key=lambda each: each["vectors"])
    machine.write(
        RESULT,
        "Building the automatic index of ten million vectors within 6 GiB",
        machine.describe(),
        {"limit_bytes": LIMIT_BYTES, "runs": runs},
        table(runs),
    )


def repeat_gallery(directory: Path, count: int, out: Path) -> Embeddings:
    """The same queries, and the gallery's shards, repeated until they have ``count``
    vectors; described in ``out``.
    """
    description = EmbeddingsDescription.load(directory / DESCRIPTION_FILE)
    gallery: list[EmbeddingShard] = []
    total = 0
    for shard in cycle(shard for shard in description.shards if shard.split == "gallery"):
        if total >= count:
            break
        gallery.append(shard)
        total += shard.count
    others = (shard for shard in description.shards if shard.split != "gallery")
    store_uri = description.store_uri or directory.resolve().as_uri()
    changes = {"shards": (*gallery, *others), "store_uri": store_uri}
    description.model_copy(update=changes).save(out / DESCRIPTION_FILE)
    return Embeddings.open(out)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def load_runs() -> list[dict[str, Any]]:
    path = machine.RESULTS / f"{RESULT}.json"
    return json.loads(path.read_text())["runs"] if path.is_file() else []


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    return [["vectors of 128", "index", "peak memory of the build", "CPU time, s", "index, MB"]] + [
        [
            f"{run['vectors']:,}",
            run["chosen"],
            f"{run['peak_bytes'] / 2**20:,.0f} MiB",
            f"{run['cpu_s']:,.0f}",
            f"{run['size_bytes'] / 1e6:,.0f}",
        ]
        for run in runs
    ]


if __name__ == "__main__":
    main()
