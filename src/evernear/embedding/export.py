"""Export the network as TorchScript and for OpenVINO, each verified on real images."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.common.disk import sha256_bytes, sha256_file, write_atomically
from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.common.store import Store
from evernear.data.manifest import Manifest, Split
from evernear.data.preprocess import Preprocessing
from evernear.data.shards import Dataset
from evernear.embedding import (
    DESCRIPTION_FILE,
    NETWORK_FILE,
    OPENVINO_FILES,
    OPENVINO_MODEL_FILE,
    OPENVINO_WEIGHTS_FILE,
    openvino_version,
)
from evernear.embedding.artifact import TrainedNetwork, load_trained
from evernear.embedding.data_loader import OnImages, TrainingImages, to_tensor
from evernear.embedding.engine import (
    OpenVINONetwork,
    cache_key,
    convert,
    read_openvino,
    save,
    unsplit,
)
from evernear.embedding.network import (
    Architecture,
    EmbeddingNetwork,
    Network,
    freeze_parameters,
    load_torchscript,
    network_identity,
    read_torchscript,
    to_torchscript,
)
from evernear.embedding.whitening import Whitening, whiten
from evernear.errors import IntegrityError, TrainingError
from evernear.settings import ClassSettings

PARITY_TOLERANCE = 1e-4
"""Largest difference of a coordinate. Rounding differs by about 1e-7."""
PARITY_IMAGES = 256
WHITENED_IMAGES = 8192
"""Images of the train split to which the last layer of a trained network is fitted."""
PARITY_SPLITS: tuple[Split, ...] = ("query", "gallery")
T = TypeVar("T")


class OpenVINOFiles(Frozen):
    """The same network for OpenVINO. Its input is NHWC. A frozen network's features are its second
    output."""

    model_sha256: str
    weights_sha256: str
    max_batch_size: int
    """Larger batches are split to limit memory use."""
    parity_max_abs_difference: float


class ExportedNetwork(Frozen):
    """The input, output and parity of the files beside this description."""

    remedy = "run the export step again"

    sha256: str
    identity: str
    """Key of the cached vectors: the sha256 of weights, architecture and code. torch writes the
    same network as a different file in each process, so the file's sha256 cannot be the key. For a
    frozen network, it covers only the backbone, whose features are cached."""
    features_dim: int = 0
    """Dimensions of a frozen network's cached features. 0: the cache has embeddings."""
    input: Literal["uint8 NCHW, 0..255"] = "uint8 NCHW, 0..255"
    embedding_dim: int
    preprocessing: Preprocessing
    parity_max_abs_difference: float
    parity_images: int
    dataset_digest: str
    weights_sha256: str
    backbone: str = "compact"
    frozen: bool = False
    pretrained_sha256: str | None = None
    """sha256 of the pretrained weights file."""
    training_warnings: tuple[str, ...] = ()
    training: dict[str, JsonValue]
    """The ``train.*`` settings of its training."""
    openvino: OpenVINOFiles | None = None
    openvino_refused: str = ""
    """Why OpenVINO cannot run the network."""

    def summary(self) -> str:
        images = quantity(self.parity_images, "image")
        torchscript = f"TorchScript within {self.parity_max_abs_difference:.1e} of eager on {images}"
        if self.openvino is None:
            missing = self.openvino_refused or "OpenVINO is not installed"
            return f"{torchscript}; TorchScript answers, because {missing}"
        return f"{torchscript}, OpenVINO within {self.openvino.parity_max_abs_difference:.1e}"

    @property
    def runs_on_openvino(self) -> bool:
        return self.openvino is not None and bool(openvino_version())

    @property
    def cache_key(self) -> str:
        """The folder of the cached vectors."""
        return cache_key(self.identity, self.openvino is not None or self.openvino_refused != "")


class WhitenedNetwork(nn.Module):
    """A trained network whose unit vectors are whitened and normalized again
    (`evernear.embedding.whitening`)."""

    def __init__(self, network: EmbeddingNetwork, dim: int) -> None:
        super().__init__()
        self.network = network
        self.standardize = Whitening(dim, dim)

    def forward(self, images: Tensor) -> Tensor:
        """Embed ``images`` (N, C, H, W), uint8 or float in 0..255, as unit vectors (N, D)."""
        return F.normalize(self.standardize(self.network(images)))


@torch.inference_mode()
def whiten_network(
    network: EmbeddingNetwork, dim: int, dataset: Dataset, exclude_labels: Collection[str]
) -> WhitenedNetwork:
    """Whiten the ``dim`` dimensions of ``network`` on a sample of the train split."""
    images, whitened = TrainingImages(dataset, frozenset(exclude_labels)), WhitenedNetwork(network.eval(), dim).eval()
    vectors = ((network(pixels), classes) for pixels, classes in _sample(images))
    whiten(whitened.standardize, vectors, images.classes)
    return whitened


def _sample(images: TrainingImages) -> Iterator[tuple[Tensor, Tensor]]:
    seen = 0
    for pixels, classes in images.in_order("train"):
        yield pixels, classes
        if (seen := seen + len(classes)) >= WHITENED_IMAGES:
            return


class _Exportable(NamedTuple):
    """A whitened network, its identity, and images (N, C, H, W) with their vectors."""

    network: nn.Module
    identity: str
    images: Tensor
    expected: Tensor
    features_dim: int = 0
    converted: nn.Module | None = None
    """What OpenVINO converts, if not ``network``."""


@torch.inference_mode()
def _trained(network: EmbeddingNetwork, trained: TrainedNetwork, dataset: Dataset) -> _Exportable:
    whitened = whiten_network(network, trained.architecture.embedding_dim, dataset, trained.exclude_labels)
    images = to_tensor(_first(dataset, lambda split: dataset.blocks(split, PARITY_IMAGES)).images)
    architecture = trained.architecture.model_dump_json()
    return _Exportable(whitened, network_identity(whitened, architecture), images, whitened(images))


@torch.inference_mode()
def _frozen(
    network: EmbeddingNetwork,
    trained: TrainedNetwork,
    dataset: Dataset,
    store: Store | None,
    on_images: OnImages | None,
) -> _Exportable:
    from evernear.embedding.features import (  # timm is not installed where releases are served
        FrozenBackbone,
        FrozenFeatures,
        FrozenHead,
        FrozenNetwork,
        WithFeatures,
    )

    features = FrozenFeatures(network, trained.architecture, store, on_images)
    head = FrozenHead(network).eval()
    block, cached = _first(dataset, lambda split: features.blocks(dataset, split))
    frozen = FrozenNetwork(FrozenBackbone(network), head).eval()
    return _Exportable(
        frozen,
        features.identity,
        to_tensor(block.images),
        head(torch.from_numpy(cached)),
        features.dim,
        WithFeatures(frozen),
    )


def export_network(
    trained_dir: Path,
    dataset: Dataset,
    out_dir: Path,
    store: Store | None = None,
    on_images: OnImages | None = None,
    tolerance: float = PARITY_TOLERANCE,
) -> ExportedNetwork:
    """Whiten the network of ``trained_dir``, and write it and its description to ``out_dir``.

    Parity is the largest absolute difference of any coordinate between the eager network and the
    file as it is served (read back and frozen), on images of the query split, or of the gallery if
    that is empty. Cached features of a frozen network come from ``store``, so the check covers
    them. Nothing is written if the difference exceeds ``tolerance`` or is NaN. ``on_images`` is
    called as features are computed.
    """
    trained, loaded = load_trained(trained_dir)
    if trained.architecture.shape != dataset.shape:
        raise IntegrityError(
            f"The network in {trained_dir} takes images of {trained.architecture.shape}, but the images of "
            f"{dataset.manifest.name} are {dataset.shape}; train again."
        )
    if trained.architecture.frozen:
        exportable = _frozen(loaded, trained, dataset, store, on_images)
    else:
        exportable = _trained(loaded, trained, dataset)
    data = to_torchscript(exportable.network)
    candidate = out_dir / f"{NETWORK_FILE}.unverified"
    write_atomically(candidate, data)
    try:
        difference = _verify(load_torchscript(candidate), exportable, tolerance)
        openvino, refused = _export_openvino(exportable, out_dir, tolerance)
        exported = ExportedNetwork(
            sha256=sha256_bytes(data),
            identity=exportable.identity,
            features_dim=exportable.features_dim,
            embedding_dim=trained.architecture.embedding_dim,
            preprocessing=_preprocessing(trained.architecture, dataset.manifest),
            parity_max_abs_difference=difference,
            parity_images=len(exportable.images),
            dataset_digest=trained.dataset_digest,
            weights_sha256=trained.weights_sha256,
            backbone=trained.architecture.backbone,
            frozen=trained.architecture.frozen,
            pretrained_sha256=trained.pretrained_sha256,
            training_warnings=trained.warnings,
            training=trained.recipe.model_dump(mode="json"),
            openvino=openvino,
            openvino_refused=refused,
        )
        candidate.replace(out_dir / NETWORK_FILE)
    finally:
        candidate.unlink(missing_ok=True)
    exported.save(out_dir / DESCRIPTION_FILE)
    return exported


def describe_network(directory: Path) -> ExportedNetwork:
    return ExportedNetwork.load(directory / DESCRIPTION_FILE)


def training_dataset(network_dir: Path, dataset: Dataset, store: Store) -> Dataset:
    """The snapshot that a network was trained on: ``dataset``, or an earlier snapshot of it."""
    digest = describe_network(network_dir).dataset_digest
    snapshot = dataset if digest == dataset.digest else Dataset.find(store, dataset.manifest.name, digest)
    if snapshot is None:
        raise IntegrityError(
            f"The network was trained on the snapshot {digest[:12]} of {dataset.manifest.name}, which the store no "
            "longer has, so the images that it was trained on are unknown; run the whole pipeline."
        )
    return snapshot


def untrained_classes(network_dir: Path, dataset: Dataset, store: Store, classes: ClassSettings) -> frozenset[str]:
    """The labels of ``dataset`` without images in the snapshot that the network was trained on."""
    counts = training_dataset(network_dir, dataset, store).manifest.label_counts("train")
    trained = classes.current_labels(label for label, count in counts.items() if count)
    return frozenset(dataset.labels).difference(trained)


def load_network(network_dir: Path, streams: int = 1) -> Network:
    """Load what `export_network` wrote: for OpenVINO if it is installed and the network was
    converted, otherwise TorchScript. The network may be called from ``streams`` threads at a time.

    Raises:
        IntegrityError: a file is missing, is not a network, or differs from its description.
    """
    described = describe_network(network_dir)
    if described.runs_on_openvino:
        return _load_openvino(network_dir, described, streams)
    return load_torchscript(_verified(network_dir, NETWORK_FILE, described.sha256))


def load_parts(network_dir: Path, streams: int) -> tuple[Callable[[], Network], torch.jit.ScriptModule]:
    """What loads a frozen network's backbone, which is not needed if all features are cached, and
    the head on its features."""
    described = describe_network(network_dir)
    scripted = read_torchscript(_verified(network_dir, NETWORK_FILE, described.sha256))
    load: Callable[[], Network] = partial(freeze_parameters, scripted.backbone)
    if described.runs_on_openvino:
        load = partial(_load_openvino, network_dir, described, streams, output=1)
    return load, freeze_parameters(scripted.head)


def _load_openvino(network_dir: Path, described: ExportedNetwork, streams: int = 1, output: int = 0) -> OpenVINONetwork:
    assert described.openvino is not None  # noqa: S101 - because OpenVINO runs it
    _verified(network_dir, OPENVINO_MODEL_FILE, described.openvino.model_sha256)
    _verified(network_dir, OPENVINO_WEIGHTS_FILE, described.openvino.weights_sha256)
    return read_openvino(network_dir, described.openvino.max_batch_size, streams, output)


def _verified(network_dir: Path, name: str, sha256: str) -> Path:
    file = network_dir / name
    if not file.is_file() or sha256_file(file) != sha256:
        raise IntegrityError(f"{file} is missing or does not match {DESCRIPTION_FILE}; {ExportedNetwork.remedy}.")
    return file


def _export_openvino(exportable: _Exportable, out_dir: Path, tolerance: float) -> tuple[OpenVINOFiles | None, str]:
    """Write the network for OpenVINO to ``out_dir``, or return why OpenVINO cannot run it."""
    if not openvino_version():
        return None, ""
    network = exportable.network
    try:
        with unsplit(network) as max_batch_size:
            model = convert(exportable.converted or network, exportable.images)
    except RuntimeError as error:
        return None, f"OpenVINO cannot run this network ({error})"
    save(model, out_dir)
    try:
        difference = _verify(read_openvino(out_dir, max_batch_size), exportable, tolerance)
    except TrainingError as error:
        for name in OPENVINO_FILES:
            (out_dir / name).unlink()
        return None, f"OpenVINO rounds too much: {error}"
    return OpenVINOFiles(
        model_sha256=sha256_file(out_dir / OPENVINO_MODEL_FILE),
        weights_sha256=sha256_file(out_dir / OPENVINO_WEIGHTS_FILE),
        max_batch_size=max_batch_size,
        parity_max_abs_difference=difference,
    ), ""


def _verify(network: Network, exportable: _Exportable, tolerance: float) -> float:
    difference = max_abs_difference(exportable.expected, network, exportable.images)
    if not difference <= tolerance:
        raise TrainingError(
            f"The exported network differs from the trained one by {difference:.2g} on real images, "
            f"more than {tolerance:g}."
        )
    return difference


@torch.inference_mode()
def max_abs_difference(expected: Tensor, network: Network, images: Tensor) -> float:
    """Largest difference of any coordinate. NaN if an output is not finite."""
    return float((expected - network(images)).abs().max())


def _preprocessing(architecture: Architecture, manifest: Manifest) -> Preprocessing:
    height, width, channels = architecture.shape
    return Preprocessing(
        height_px=height,
        width_px=width,
        channels=3 if channels == 3 else 1,
        mean=architecture.mean,
        std=architecture.std,
        network_input=architecture.input,
        resize=manifest.resize,
        bit_depth=manifest.bit_depth,
    )


def _first(dataset: Dataset, blocks: Callable[[Split], Iterator[T]]) -> T:
    """The first block of the query split, or of the gallery if that is empty."""
    for split in PARITY_SPLITS:
        for block in blocks(split):
            return block
    raise TrainingError(f"Dataset {dataset.manifest.name} has no query or gallery images to verify the export with.")
