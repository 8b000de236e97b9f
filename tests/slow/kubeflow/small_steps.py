"""Steps of a pipeline on small inputs, with parts on any number of nodes."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evernear import steps
from evernear.common.store import Store, open_store
from evernear.data.manifest import Manifest, load_manifest, save_manifest
from evernear.embedding.embeddings import Embeddings
from evernear.evaluation.open_set import OpenSet
from tests.releases import System
from tests.small_ingest import limits

Tree = dict[str, Any]


def put_photos(source: Store, directory: Path, images: int = 60) -> None:
    """Write small images of two classes, and a broken one."""
    random = np.random.default_rng(0)
    for number in range(images):
        Image.fromarray(random.integers(0, 255, (8, 8), np.uint8)).save(directory / "image.png")
        source.put(f"{number % 2}/{number}.png", directory / "image.png")
    source.put("1/broken.png", b"\x89PNG\r\n\x1a\n broken")


def ingest(run: str, nodes: int, source: str, store: str, out: Path, part_names: int = 10) -> Manifest:
    """Run the ingest step, and return the snapshot."""
    data = {"source": source, "dataset": run, "nodes": nodes}
    with limits(part_names=part_names):
        steps.ingest(run, store, {}, {"target": "registry", "data": data}, str(out / run))
    return load_manifest(out / run)


def put_system(system: System, store: Store, out: Path) -> Path:
    """Copy the dataset of a system to the store, and return a directory with its manifest."""
    original = open_store(system.dataset.manifest.store_uri)
    for info in original.list("datasets/"):
        store.put(info.key, original.get(info.key))
    save_manifest(system.dataset.manifest.model_copy(update={"store_uri": store.uri}), out / "dataset")
    return out / "dataset"


def embed(run: str, nodes: int, system: System, dataset: Path, store: Store, out: Path) -> Tree:
    """Run the embed step without cached embeddings, and return its metadata."""
    for info in [*store.list("embeddings/")]:
        store.delete(info.key)
    settings = {"store": store.uri, "index": {"nodes": nodes}}
    return steps.embed(run, settings, str(dataset), str(system.network_dir), str(out / run))


def embedded(directory: Path) -> list[tuple[str, str]]:
    """The digests of the embeddings that a run of `embed` wrote."""
    return [(shard.sha256, shard.split) for shard in Embeddings.open(directory).description.shards]


def evaluate(run: str, system: System, dataset: Path, store: Store, out: Path) -> Tree:
    """Run the evaluate step, and return the evaluation."""
    OpenSet(held_out=()).save(out / "open-set.json")
    candidate = [str(path) for path in (dataset, system.network_dir, system.index_dir)]
    made = steps.evaluate(
        run, {"store": store.uri}, *candidate, str(out / "open-set.json"), str(out / f"evaluation-{run}")
    )
    return made.model_dump()
