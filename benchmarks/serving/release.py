"""The release for all servers: one network and one large gallery, packed for evernear and for the
naive handler, and the query images."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import NETWORK_FILE, export_network
from evernear.embedding.train import train_network
from evernear.evaluation.verdict import Rule, System, Verdict
from evernear.index.build import build_index
from evernear.index.description import LABELS_FILE, VECTORS_FILE
from evernear.index.faiss_compat import faiss
from evernear.release.archive import Candidate, make_archive
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.serving import HANDLER
from evernear.settings import Settings

APPS = Path(__file__).parent
METADATA_FILE = "naive.json"
QUERIES = 512
PHOTOGRAPHS = {"12mp": (4000, 3000, 8), "640px": (640, 480, 64)}
"""Width and height of the photographs, and their number."""
NOISE = 6
"""Standard deviation of the noise, with which JPEG files of 12 megapixels have 2 to 4 MB."""


@dataclass(frozen=True)
class Served:
    """The champion of ``settings``' store, unpacked in ``parts``; its naive counterpart; query
    images as PNG files, or photographs as JPEG files."""

    settings: Settings
    parts: Path
    naive: Path
    """What the naive handler needs, with its archive in ``model-store``."""
    peers: Path
    """What FastAPI and LitServe serve: ``parts``, or ``naive`` for photographs, which they decode
    themselves."""
    images: tuple[bytes, ...]
    gallery_size: int


def prepare(settings: Settings, scratch: Path, photographs: tuple[int, int, int] | None = None) -> Served:
    """Train briefly, index every image outside the test split, release it, and pack the naive
    counterpart."""
    data = ingest_source(settings.data, settings.store_uri)
    save_manifest(data, scratch)
    dataset = Dataset.open(scratch)
    network_dir, index_dir = scratch / "network", scratch / "index"
    one_epoch = settings.train.model_copy(update={"epochs": 1, "min_steps": 0})  # weights do not affect speed
    train_network(dataset, one_epoch, scratch / "trained")
    export_network(scratch / "trained", dataset, network_dir)
    # All train images join the gallery, as those of classes that the network was not trained on.
    embed_dataset(network_dir, dataset, scratch / "embeddings", untrained=frozenset(dataset.labels))
    gallery = Embeddings.open(scratch / "embeddings")
    index = build_index(gallery, dataset.labels, settings.index, index_dir)
    verdict = scratch / "verdict.json"
    rule = Rule(name="benchmark", passed=True, reason="only speed matters here")
    measured = System(
        name="candidate",
        network_sha256=gallery.network_sha256,
        index_digest=index.digest,
    )
    verdict.write_text(Verdict.of([rule], measured, None, dataset.digest).model_dump_json())
    candidate = Candidate(
        dataset=dataset,
        network_dir=network_dir,
        index_dir=index_dir,
        verdict_file=verdict,
        metrics={},
        parent=None,
    )
    packed = make_archive(candidate, settings.serving, HANDLER, scratch / "release")
    registry = Registry(open_store(settings.store_uri))
    registry.publish(packed.archive)
    registry.set_champion(packed.manifest.version, None)
    open_release(packed.archive, scratch / "parts")
    naive = scratch / "naive"
    _pack_naive(network_dir, index_dir, gallery, dataset, naive)
    width_px, height_px, count = photographs or (0, 0, QUERIES)
    queries = next(dataset.blocks("test", count)).images
    images = tuple(_jpeg(image, width_px, height_px) if photographs else _png(image) for image in queries)
    parts = scratch / "parts"
    return Served(settings, parts, naive, naive if photographs else parts, images, gallery.count("gallery"))


def _pack_naive(network_dir: Path, index_dir: Path, gallery: Embeddings, dataset: Dataset, directory: Path) -> None:
    store = directory / "model-store"
    store.mkdir(parents=True)
    for file in (network_dir / NETWORK_FILE, index_dir / LABELS_FILE):
        shutil.copy(file, directory)
    (directory / METADATA_FILE).write_text(
        json.dumps({"labels": dataset.labels, "size": dataset.shape[:2], "channels": dataset.shape[2]})
    )
    flat = faiss.IndexFlatL2(gallery.dim)
    for block in gallery.blocks("gallery"):
        flat.add(block.embeddings)
    faiss.write_index(flat, str(directory / VECTORS_FILE))
    extra = (*(directory / name for name in (VECTORS_FILE, LABELS_FILE, METADATA_FILE)), APPS / "tutorial.py")
    options = {
        "--model-name": "naive",
        "--version": "1.0",
        "--serialized-file": directory / NETWORK_FILE,
        "--handler": APPS / "naive_handler.py",
        "--extra-files": ",".join(str(file) for file in extra),
        "--export-path": store,
    }
    archiver = Path(sys.executable).with_name("torch-model-archiver")
    command = [archiver, *(str(word) for option in options.items() for word in option)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"TMPDIR": str(directory)})


def _jpeg(image, width_px: int, height_px: int) -> bytes:
    """A photograph as a phone writes it: quality 90, with the noise of a sensor."""
    buffer = BytesIO()
    enlarged = np.asarray(Image.fromarray(image).resize((width_px, height_px), Image.Resampling.BICUBIC), np.float32)
    noise = np.random.default_rng(0).normal(0, NOISE, (height_px, width_px, 1)).astype(np.float32)
    Image.fromarray(np.clip(enlarged + noise, 0, 255).astype(np.uint8)).save(buffer, format="JPEG", quality=90)
    return buffer.getvalue()


def _png(image) -> bytes:
    buffer = BytesIO()
    Image.fromarray(image.squeeze()).save(buffer, format="PNG")
    return buffer.getvalue()
