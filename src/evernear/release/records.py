"""The published record of a release, and the store keys for records and archives."""

import gzip
import zlib
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Self

from pydantic import JsonValue

from evernear.common.disk import sha256_file
from evernear.common.frozen import Document, Frozen
from evernear.data.preprocess import Preprocessing
from evernear.errors import IntegrityError
from evernear.evaluation.verdict import Verdict
from evernear.index.description import DESCRIPTION_FILE, IndexDescription, describe_threshold
from evernear.release.archive_reader import read_release
from evernear.release.manifest import HANDLER_FILE, PREPROCESSING_FILE, VERDICT_FILE, ReleaseManifest, Sha256

RELEASES = "releases/"
MANIFESTS = f"{RELEASES}manifests/"
ARCHIVES = f"{RELEASES}archives/"
PRUNED = f"{RELEASES}pruned/"
_GZIP = b"\x1f\x8b"


class Decision(Frozen):
    promote: bool
    reasons: tuple[str, ...]


class Record(Document):
    remedy = "run `evernear store check --repair`"

    manifest: ReleaseManifest
    archive_sha256: Sha256
    archive_size_bytes: int
    verdict: Decision

    @property
    def archive_key(self) -> str:
        return f"{ARCHIVES}{self.archive_sha256}.mar"

    @classmethod
    def from_json(cls, data: bytes | str, source: Path | str, remedy: str | None = None) -> Self:
        """Like `Frozen.from_json`. Records of pruned releases are compressed."""
        if isinstance(data, bytes) and data.startswith(_GZIP):
            with suppress(OSError, EOFError, zlib.error):  # a damaged record is no JSON either
                data = gzip.decompress(data)
        return super().from_json(data, source, remedy)


def record_key(folder: str, version: str) -> str:
    return f"{folder}{version}.json"


def describe_archive(archive: Path) -> Record:
    manifest, texts = read_release(archive)
    verdict = Verdict.from_json(texts[VERDICT_FILE], f"{VERDICT_FILE} in {archive}")
    return Record(
        manifest=manifest,
        archive_sha256=sha256_file(archive),
        archive_size_bytes=archive.stat().st_size,
        verdict=Decision(promote=verdict.promote, reasons=tuple(verdict.reasons)),
    )


class Value(Frozen):
    """One input or output. ``shape`` is empty for a scalar. ``N`` is the batch size."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    meaning: str


class Signature(Frozen):
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Index(Frozen):
    """The FAISS index. An answer lists ``k`` neighbors. An image is unknown beyond the distance
    ``threshold``."""

    factory: str
    search: str
    reason: str
    metric: str
    size: int
    dim: int
    k: int
    threshold: float


class Lineage(Frozen):
    created: datetime
    parent: str | None
    source: str | None
    dataset_name: str
    dataset_digest: str
    network_sha256: str
    backbone: str
    pretrained_sha256: str | None
    git_commit: str
    evernear_version: str
    own_handler: bool
    """Whether `HANDLER_FILE`, which TorchServe runs, is identical to the installed handler."""


class Description(Frozen):
    """The output of ``evernear registry show``."""

    version: str
    archive_sha256: str
    archive_size_bytes: int
    request: Signature
    network: Signature
    preprocessing: Preprocessing
    index: Index
    labels: tuple[str, ...]
    training: dict[str, JsonValue]
    """The ``train.*`` settings, or an empty mapping if the release does not record them."""
    verdict: Decision
    metrics: dict[str, float]
    lineage: Lineage
    parts: dict[str, int]
    """Size in bytes."""


def describe(archive: Path, handler: Path) -> Description:
    """Describe an untrusted ``.mar``. The archived handler is compared with this installation's
    ``handler``. All members are hashed before any is parsed, and only JSON files are."""
    manifest, texts = read_release(archive)
    index = IndexDescription.from_json(texts[DESCRIPTION_FILE], f"{DESCRIPTION_FILE} in {archive}")
    preprocessing = Preprocessing.from_json(texts[PREPROCESSING_FILE], f"{PREPROCESSING_FILE} in {archive}")
    verdict = Verdict.from_json(texts[VERDICT_FILE], f"{VERDICT_FILE} in {archive}")
    _require_agreement(manifest, index, preprocessing, verdict, archive)
    return Description(
        version=manifest.version,
        archive_sha256=sha256_file(archive),
        archive_size_bytes=archive.stat().st_size,
        request=_request(manifest, index),
        network=_network(manifest),
        preprocessing=preprocessing,
        index=Index(threshold=index.threshold, **index.model_dump(include=set(Index.model_fields))),
        labels=manifest.labels,
        verdict=Decision(promote=verdict.promote, reasons=tuple(verdict.reasons)),
        training=manifest.training,
        metrics=manifest.metrics,
        lineage=Lineage(
            own_handler=manifest.parts[HANDLER_FILE].sha256 == sha256_file(handler),
            **manifest.model_dump(include=set(Lineage.model_fields)),
        ),
        parts={name: part.size_bytes for name, part in sorted(manifest.parts.items())},
    )


def _require_agreement(
    manifest: ReleaseManifest, index: IndexDescription, preprocessing: Preprocessing, verdict: Verdict, archive: Path
) -> None:
    network = manifest.network_sha256
    if index.network_sha256 != network:
        raise IntegrityError(
            f"The index in {archive} contains vectors of network {index.network_sha256[:12]}, not of {network[:12]}: "
            "distances between them are meaningless."
        )
    if verdict.candidate.network_sha256 != network:
        raise IntegrityError(f"The verdict in {archive} is about a different network than the one in the archive.")
    stamps = {name: manifest.parts[name].sha256 for name in index.parts if name in manifest.parts}
    described = (index.parts, index.dim, index.threshold, index.known_labels, index.dataset_digest, preprocessing)
    stated = (
        stamps,
        manifest.embedding_dim,
        manifest.threshold,
        manifest.labels,
        manifest.dataset_digest,
        manifest.preprocessing,
    )
    if described != stated or len(index.counts) != len(index.labels):
        raise IntegrityError(f"The manifest of {archive} contradicts its index or its preprocessing.")


def _request(manifest: ReleaseManifest, index: IndexDescription) -> Signature:
    neighbor_count = min(index.k, index.size)
    image = f"a PNG, JPEG, WebP or HEIC file of any size up to {manifest.max_pixels:,} pixels (JPEG: twice as many)"
    return Signature(
        inputs=(Value(name="image", dtype="bytes", shape=(), meaning=image),),
        outputs=(
            Value(name="pred", dtype="string", shape=(), meaning="one of the labels"),
            Value(name="dist", dtype="float", shape=(), meaning="distance to the nearest gallery image, 0 to 2"),
            Value(name="unknown", dtype="bool", shape=(), meaning=describe_threshold(index.threshold)),
            Value(name="neighbors.label", dtype="string", shape=(neighbor_count,), meaning="nearest first"),
            Value(name="neighbors.dist", dtype="float", shape=(neighbor_count,), meaning="ascending"),
            Value(name="neighbors.row", dtype="int", shape=(neighbor_count,), meaning="rows in the gallery"),
            Value(name="version", dtype="string", shape=(), meaning=manifest.version),
            Value(name="id", dtype="string", shape=(), meaning="the request's id in the query log"),
        ),
    )


def _network(manifest: ReleaseManifest) -> Signature:
    shape = manifest.preprocessing
    images = ("N", shape.channels, shape.height_px, shape.width_px)
    return Signature(
        inputs=(Value(name="images", dtype="uint8", shape=images, meaning="0 to 255, NCHW"),),
        outputs=(Value(name="embeddings", dtype="float32", shape=("N", manifest.embedding_dim), meaning="L2 norm 1"),),
    )
