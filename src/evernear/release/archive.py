"""Pack the network, index, preprocessing and verdict into a release, an archive that TorchServe can
load."""

import os
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evernear.common.disk import disk_errors, link_or_copy, sha256_bytes, sha256_file, write_atomically
from evernear.common.store import Store
from evernear.data.manifest import Split
from evernear.data.shards import Block, Dataset
from evernear.embedding import OPENVINO_FILES
from evernear.embedding.embed import ExportedEmbedder
from evernear.embedding.export import ExportedNetwork, describe_network
from evernear.errors import DataError, EvernearError, IntegrityError
from evernear.evaluation.evaluate import Evaluation
from evernear.index.description import DESCRIPTION_FILE as INDEX_DESCRIPTION
from evernear.index.description import DISTANCE_TOLERANCE
from evernear.index.search import Gallery, Recognition
from evernear.release.archive_reader import ARCHIVE_FILE, MANIFEST_FILE, SmokeQuery, smoke_file
from evernear.release.drift_baseline import SIZE, DriftBaseline, evenly, random_projection
from evernear.release.manifest import (
    DRIFT_BASELINE_FILE,
    HANDLER_FILE,
    MODEL_CONFIG_FILE,
    NETWORK_DESCRIPTION_FILE,
    NETWORK_FILE,
    PREPROCESSING_FILE,
    SMOKE_FILE,
    VERDICT_FILE,
    Part,
    ReleaseManifest,
    git_commit,
    new_version,
)
from evernear.settings import ServingSettings
from evernear.settings.serving import (
    MODEL_NAME,
    QUEUE_SIZE,
    RESPONSE_TIMEOUT_S,
    STARTUP_TIMEOUT_S,
)

SMOKE_QUERIES = 8
"""Largest number of stored queries that a release must answer before it goes live."""
EmbeddedBlocks = Iterator[tuple[Block, NDArray[np.float32]]]
SMOKE_BLOCK = 512  # number of query images from which the smoke queries are chosen
# Runs torch-model-archiver. ``python -m model_archiver...`` would warn that the module is imported
# twice. For an `OSError`, such as a full disk, the exit code contains the errno.
_OS_ERROR = 100
_ARCHIVER = f"""
import sys
from model_archiver.model_packaging import generate_model_archive
try:
    generate_model_archive()
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit({_OS_ERROR} + (error.errno or 0))
"""


@dataclass(frozen=True)
class Candidate:
    """The artifacts from which a release is packed. ``metrics`` are the results on which the
    verdict is based. ``parent`` is the version of the champion in that measurement, or None without
    a champion."""

    dataset: Dataset
    network_dir: Path
    index_dir: Path
    verdict_file: Path
    metrics: Mapping[str, float]
    parent: str | None

    @staticmethod
    def open(dataset: Path, parts: Mapping[str, Path]) -> "Candidate":
        """Open the artifacts of a run. ``parts`` maps ``network``, ``index`` and ``evaluation`` to
        directories, and ``verdict`` to a file."""
        measured = Evaluation.open(parts["evaluation"])
        return Candidate(
            dataset=Dataset.open(dataset),
            network_dir=parts["network"],
            index_dir=parts["index"],
            verdict_file=parts["verdict"],
            metrics=measured.metrics(),
            parent=measured.champion.name if measured.champion else None,
        )


@dataclass(frozen=True)
class Release:
    """An archived release: the ``.mar`` file and ``manifest.json`` next to it. ``smoke_settled`` is
    false if rounding errors could change the prediction for every candidate query image. The smoke
    test then compares only distances."""

    manifest: ReleaseManifest
    archive: Path
    smoke_settled: bool

    def summary(self) -> str:
        summary = f"release {self.manifest.version}, {self.archive.stat().st_size / 1e6:.1f} MB"
        if self.smoke_settled:
            return summary
        return f"{summary}; the smoke test compares distances only, because no query image is clearly recognized"


def make_archive(
    candidate: Candidate,
    settings: ServingSettings,
    handler: Path,
    out_dir: Path,
    created: datetime | None = None,
    store: Store | None = None,
) -> Release:
    """Pack a release into ``out_dir``.

    ``handler`` is the module that TorchServe runs (`evernear.serving.HANDLER`). ``created``
    defaults to now. Embeddings that ``store`` has cached are used.
    """
    created = created or datetime.now(UTC)
    dataset, network_dir = candidate.dataset, candidate.network_dir
    network = describe_network(network_dir)
    gallery = Gallery.open(candidate.index_dir, network.sha256)
    if gallery.description.dataset_digest != dataset.digest:
        raise IntegrityError(
            f"The index in {candidate.index_dir} was built from another dataset; run the index step again."
        )
    with disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out_dir, prefix=".archive-") as temporary:
            parts = Path(temporary) / "parts"
            parts.mkdir()
            _link_parts(parts, candidate, (*gallery.description.parts, INDEX_DESCRIPTION), handler)
            write_atomically(parts / PREPROCESSING_FILE, network.preprocessing.model_dump_json(indent=2))
            write_atomically(parts / MODEL_CONFIG_FILE, _model_config(settings))
            embedder = ExportedEmbedder(network_dir, store)
            queries = _write_smoke_queries(
                parts, dataset, _embedded(dataset, "query", embedder), gallery, SMOKE_QUERIES
            )
            baseline, group_distance = _drift_baseline(dataset, embedder, gallery)
            write_atomically(parts / DRIFT_BASELINE_FILE, baseline.to_bytes())
            manifest = _describe(parts, candidate, network, gallery, settings, created, group_distance)
            write_atomically(parts / MANIFEST_FILE, manifest.to_json())
            _pack(Path(temporary), manifest.version)
            (Path(temporary) / f"{MODEL_NAME}.mar").replace(out_dir / ARCHIVE_FILE)
            write_atomically(out_dir / MANIFEST_FILE, manifest.to_json())
    return Release(manifest, out_dir / ARCHIVE_FILE, smoke_settled=all(query.settled for query in queries))


def _link_parts(parts: Path, candidate: Candidate, index_names: Iterable[str], handler: Path) -> None:
    converted = OPENVINO_FILES if describe_network(candidate.network_dir).openvino else ()
    network_files = [candidate.network_dir / name for name in (NETWORK_FILE, NETWORK_DESCRIPTION_FILE, *converted)]
    index_files = [candidate.index_dir / name for name in index_names]
    for file in (*network_files, *index_files):
        link_or_copy(file, parts / file.name)
    link_or_copy(candidate.verdict_file, parts / VERDICT_FILE)
    link_or_copy(handler, parts / HANDLER_FILE)


def _model_config(settings: ServingSettings) -> str:
    """TorchServe's options for the model. The number of workers is a server option."""
    options = {
        "batchSize": settings.batch_size,
        "jobQueueSize": QUEUE_SIZE,
        "responseTimeout": RESPONSE_TIMEOUT_S,
        "startupTimeout": STARTUP_TIMEOUT_S,
    }
    return "".join(f"{name}: {value}\n" for name, value in options.items())


def _describe(
    parts: Path,
    candidate: Candidate,
    network: ExportedNetwork,
    gallery: Gallery,
    settings: ServingSettings,
    created: datetime,
    group_distance: float | None,
) -> ReleaseManifest:
    described = {
        file.name: Part(sha256=sha256_file(file), size_bytes=file.stat().st_size) for file in sorted(parts.iterdir())
    }
    if described[NETWORK_FILE].sha256 != network.sha256:
        raise IntegrityError("The network changed since it was exported; run the export step again.")
    content = "\n".join(f"{name} {part.sha256}" for name, part in described.items())
    return ReleaseManifest(
        version=new_version(created, sha256_bytes(content.encode())),
        created=created,
        parts=described,
        network_sha256=network.sha256,
        network_identity=network.identity,
        backbone=network.backbone,
        pretrained_sha256=network.pretrained_sha256,
        dataset_name=candidate.dataset.manifest.name,
        dataset_digest=candidate.dataset.digest,
        source=candidate.dataset.manifest.source,
        training=network.training,
        labels=gallery.description.known_labels,
        preprocessing=network.preprocessing,
        max_pixels=settings.max_pixels,
        embedding_dim=network.embedding_dim,
        collection=gallery.description.collection,
        joined_gallery=_joined(candidate.dataset, gallery),
        group_distance=group_distance,
        threshold=gallery.description.threshold,
        metrics=dict(candidate.metrics),
        verdict_sha256=described[VERDICT_FILE].sha256,
        parent=candidate.parent,
        git_commit=git_commit(),
    )


def _joined(dataset: Dataset, gallery: Gallery) -> dict[str, int]:
    """For each class, the number of train images that follow the gallery split in the index, in the
    order of `evernear.data.gallery`."""
    numbers = Counter(gallery.label_indices[dataset.count("gallery") :].tolist())
    return {dataset.labels[number]: count for number, count in sorted(numbers.items())}


def _embedded(dataset: Dataset, split: Split, embedder: ExportedEmbedder) -> EmbeddedBlocks:
    shards = ((dataset.shard_blocks(shard, SMOKE_BLOCK), shard.count) for shard in dataset.shards(split))
    return embedder.embed(shards)


def _write_smoke_queries(
    parts: Path, dataset: Dataset, embedded: EmbeddedBlocks, gallery: Gallery, count: int
) -> list[SmokeQuery]:
    """Store the most clearly recognized images in the query split as smoke queries. Unsettled
    images are stored only if no image is settled."""
    first = next(embedded, None)
    if first is None:
        raise DataError(f"Dataset {dataset.manifest.name} has no query image; raise data.query_fraction.")
    block, embeddings = first
    answers = gallery.recognize(embeddings)
    settled = gallery.is_settled(embeddings, DISTANCE_TOLERANCE)
    rows = [row for row in _clearest(block.labels, answers, dataset.labels) if settled[row] or not settled.any()]
    queries = [
        SmokeQuery(
            file=f"smoke-{number:02d}.png",
            label=dataset.labels[block.labels[row]],
            pred=answers[row].pred,
            dist=answers[row].dist,
            unknown=answers[row].unknown,
            settled=bool(settled[row]),
        )
        for number, row in enumerate(rows[:count])
    ]
    for query, row in zip(queries, rows, strict=False):
        write_atomically(parts / query.file, _png(block.images[row]))
    write_atomically(parts / SMOKE_FILE, smoke_file(tuple(queries)))
    return queries


def _drift_baseline(
    dataset: Dataset, embedder: ExportedEmbedder, gallery: Gallery
) -> tuple[DriftBaseline, float | None]:
    """The release's predictions for images that it was not built from, and their
    `_group_distance`."""
    queries = _embed_evenly(dataset, "query", SIZE, embedder)
    tests = _embed_evenly(dataset, "test", max(0, SIZE - dataset.count("query")), embedder)
    images = np.concatenate([*queries, *tests])
    answers = gallery.recognize(images)
    projection = random_projection(images.shape[1])
    labels = np.array([answer.pred for answer in answers])
    baseline = DriftBaseline(
        projection=projection,
        coordinates=images @ projection,
        distances=np.array([answer.dist for answer in answers], np.float32),
        unknown=np.array([answer.unknown for answer in answers], np.bool_),
        labels=labels,
    )
    return baseline, _group_distance(images, labels)


def _group_distance(vectors: NDArray[np.float32], labels: NDArray[np.str_]) -> float | None:
    """The midpoint between the median distances within a class and between classes, or None if
    either is undefined."""
    rows, columns = np.triu_indices(len(vectors), 1)
    distances = np.sqrt(np.maximum(2 - 2 * vectors @ vectors.T, 0))[rows, columns]
    same = labels[rows] == labels[columns]
    if same.all() or not same.any():
        return None
    return round(float(np.median(distances[same]) + np.median(distances[~same])) / 2, 4)


def _embed_evenly(
    dataset: Dataset, split: Split, size: int, embedder: ExportedEmbedder
) -> Iterator[NDArray[np.float32]]:
    positions = deque(evenly(dataset.count(split), size))
    before = 0
    for block, vectors in _embedded(dataset, split, embedder) if positions else ():
        rows: list[int] = []
        while positions and positions[0] < before + len(block):
            rows.append(positions.popleft() - before)
        if rows:
            yield vectors[rows]
        before += len(block)


def _clearest(labels: NDArray[np.int64], answers: list[Recognition], names: tuple[str, ...]) -> Iterator[int]:
    """Yield row numbers that alternate between classes. Within each class, correctly recognized
    rows come first, sorted by distance."""
    of_class: dict[int, list[int]] = {}
    for row in sorted(range(len(labels)), key=lambda row: (answers[row].pred != names[labels[row]], answers[row].dist)):
        of_class.setdefault(int(labels[row]), []).append(row)
    for round_number in range(len(labels)):
        for label in sorted(of_class):
            yield from of_class[label][round_number : round_number + 1]


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(buffer, format="PNG")
    return buffer.getvalue()


def _pack(directory: Path, version: str) -> None:
    """Run torch-model-archiver on ``directory``/parts. The archiver stages its files in
    ``TMPDIR/<model name>``, and deletes this directory first. With a shared ``TMPDIR``, two
    concurrent runs would delete each other's files."""
    staging = directory / "staging"
    staging.mkdir()
    options = {
        "--model-name": MODEL_NAME,
        "--version": version,
        "--handler": f"parts/{HANDLER_FILE}",
        "--extra-files": "parts",
        "--config-file": f"parts/{MODEL_CONFIG_FILE}",
        "--runtime": "python",
        "--archive-format": "zip-store",
        "--export-path": ".",
    }
    command = [sys.executable, "-c", _ARCHIVER, *(word for option in options.items() for word in option)]
    environment = os.environ | {"TMPDIR": str(staging)}
    completed = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if completed.returncode > _OS_ERROR:
        number = completed.returncode - _OS_ERROR
        raise OSError(number, os.strerror(number), str(directory))
    if completed.returncode:
        last = (completed.stderr.strip() or "no message").splitlines()[-1]
        raise EvernearError(f"torch-model-archiver failed: {last}.")
