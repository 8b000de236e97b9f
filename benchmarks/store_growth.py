"""The growth of a store over many runs, and its size after a prune.

Run it with ``python benchmarks/store_growth.py --directory DIRECTORY``.

Each run calls the steps of the pipeline in this process, with a small network. Between
two runs, 1% of the images of the folder are replaced by others. Then the store is
pruned, first to the newest 10 releases and then to the newest one, and compared with
the store of a single run of the last state of the folder.

A kept release accounts for its archive, snapshot, run record and cached embeddings,
as far as only it needs them.
"""

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import machine
from evernear import steps
from evernear.common.run_record import RUNS, RunRecord
from evernear.common.store import Store, open_store
from evernear.embedding.embedding_cache import EMBEDDINGS_PREFIX
from evernear.maintenance.check import check_store
from evernear.maintenance.prune import prune_store
from evernear.maintenance.references import NEWEST, references
from evernear.release.registry import Registry

CLASSES, IMAGES, REPLACED = 5, 500, 5
SIDE_PX = 16
SETTINGS = {
    "train": {"epochs": 8, "min_steps": 0, "width": 8, "embedding_dim": 16, "batch_size": 32},
    "gate": {"accuracy_floor": 0.0},
}
Sizes = dict[str, tuple[int, int]]
"""Objects and bytes, by folder."""


def write_image(images: Path, number: int, seed: int) -> None:
    """A noisy stripe whose direction shows the class."""
    rng = np.random.default_rng([number, seed])
    label = number % CLASSES
    rows, columns = np.mgrid[:SIDE_PX, :SIDE_PX]
    angle = np.pi * label / CLASSES
    wave = np.sin(np.cos(angle) * rows + np.sin(angle) * columns + rng.uniform(0, 6))
    pixels = np.clip(128 + 60 * wave + rng.normal(0, 20, wave.shape), 0, 255).astype(np.uint8)
    path = images / f"class-{label}" / f"{number:04}-{seed}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def replace_images(images: Path, run: int) -> None:
    """Replace `REPLACED` images, the oldest first."""
    for number in range(run * REPLACED, (run + 1) * REPLACED):
        (old,) = images.glob(f"*/{number % IMAGES:04}-*.png")
        old.unlink()
        write_image(images, number % IMAGES, run)


def run_pipeline(run: str, images: Path, store: str) -> None:
    """The steps of a run that trains, promoted to target ``registry``."""
    with tempfile.TemporaryDirectory() as scratch:

        def path(name: str) -> str:
            return f"{scratch}/{name}"

        parameters = {"source": f"folder:{images}", "target": "registry"}
        _, chosen = steps.ingest(run, store, parameters, SETTINGS, path("dataset"))
        steps.validate(run, chosen, path("dataset"), path("report"))
        steps.train(run, chosen, path("dataset"), path("trained"), path("curves"))
        steps.export(run, chosen, path("dataset"), path("trained"), path("network"))
        steps.probe(run, chosen, path("dataset"), path("open_set"))
        steps.embed(run, chosen, path("dataset"), path("network"), path("embeddings"))
        steps.index(run, chosen, path("dataset"), path("embeddings"), path("open_set"), path("index"))
        steps.evaluate(
            run, chosen, path("dataset"), path("network"), path("index"), path("open_set"), path("evaluation")
        )
        steps.gate(run, chosen, path("evaluation"), path("verdict"))
        parts = {name: path(name) for name in ("network", "index", "evaluation", "verdict")}
        steps.archive(run, chosen, path("dataset"), parts, path("release"))
        steps.deploy(run, chosen, "", path("release"), path("verdict"))
        steps.notify(run, store, "continuous-training", "SUCCEEDED", "", path("outcome"), path("page"))


def measure(store: Store) -> Sizes:
    """Objects and bytes by folder."""
    objects, sizes = Counter[str](), Counter[str]()
    for info in store.list(""):
        folder, *rest = info.key.split("/")
        if folder == "datasets" and len(rest) > 2:
            folder += f"/{rest[1]}"
        objects[folder] += 1
        sizes[folder] += info.size_bytes
    return {folder: (objects[folder], sizes[folder]) for folder in sorted(objects)}


def of_other_releases(store: Store) -> int:
    """Bytes that only releases need, except for the newest release."""
    records, _ = Registry(store).records()
    newest = max(records)
    needed = {True: set[str](), False: set[str]()}
    for reference in references(store):
        needed[reference.owner.startswith(NEWEST) or reference.owner == f"release {newest}"].add(reference.key)
    only = needed[False] - needed[True]
    networks = {v: f"{EMBEDDINGS_PREFIX}{record.manifest.network_identity}/" for v, record in records.items()}
    runs = {info.key.split("/")[1] for info in store.list(RUNS) if info.key.endswith("/archived.json")}
    released = {run: RunRecord(store, run).load("archived")["version"] for run in runs}
    folders = (
        *{folder for folder in networks.values() if folder != networks[newest]},
        *(f"{RUNS}{run}/" for run, version in released.items() if version != newest and version in records),
    )
    return sum(info.size_bytes for info in store.list("") if info.key in only or info.key.startswith(folders))


def total(sizes: Sizes) -> int:
    return sum(size for _, size in sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=100)
    arguments = parser.parse_args()
    machine_info = machine.describe()
    shutil.rmtree(arguments.directory, ignore_errors=True)
    images = arguments.directory / "images"
    store, fresh = (open_store((arguments.directory / name).resolve().as_uri()) for name in ("store", "fresh"))
    for number in range(IMAGES):
        write_image(images, number, 0)
    measured: dict[str, Sizes] = {}
    kept: dict[str, int] = {}

    def record(name: str, of: Store, change: Callable[[], object] = lambda: None) -> None:
        change()
        measured[name], kept[name] = measure(of), of_other_releases(of)

    for run in range(arguments.runs):
        if run:
            replace_images(images, run)
        run_pipeline(f"run-{run:03}", images, store.uri)
        if run == 0:
            record("1 run", store)
    record(f"{arguments.runs} runs", store)
    record("pruned, --keep 10", store, lambda: prune_store(store, 10))
    record("pruned, --keep 1", store, lambda: prune_store(store, 1))
    run_pipeline("run-fresh", images, fresh.uri)
    record("a fresh run of the last state", fresh)
    assert not check_store(store)
    title = f"Growth of a store over {arguments.runs} runs, and its size after a prune"
    machine.write(
        "store_growth", title, machine_info, {"measured": measured, "other_releases_bytes": kept}, table(measured, kept)
    )


def table(measured: dict[str, Sizes], kept: dict[str, int]) -> list[list[str]]:
    """One row for each state of the store; the last columns are in kB."""
    fresh_bytes = total(measured["a fresh run of the last state"])
    folders = sorted({folder for sizes in measured.values() for folder in sizes})
    remaining = ["MB needed only by other remaining releases", "the rest, relative to a fresh run"]
    heading = ["store", "objects", "MB", *remaining]
    rows = [[*heading, *(f"{folder} (kB)" for folder in folders)]]
    for name, sizes in measured.items():
        objects = sum(count for count, _ in sizes.values())
        rest = (total(sizes) - kept[name]) / fresh_bytes
        by_folder = [f"{sizes.get(folder, (0, 0))[1] / 1e3:,.0f}" for folder in folders]
        rows.append(
            [name, f"{objects:,}", f"{total(sizes) / 1e6:.2f}", f"{kept[name] / 1e6:.2f}", f"{rest:.2f}", *by_folder]
        )
    return rows


if __name__ == "__main__":
    main()
