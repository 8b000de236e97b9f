"""Export the network as TorchScript, verified against the eager network on real images."""

from collections.abc import Callable, Collection, Iterator
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
from evernear.embedding import DESCRIPTION_FILE
from evernear.embedding.artifact import TrainedNetwork, load_trained
from evernear.embedding.data_loader import OnImages, TrainingImages, to_tensor
from evernear.embedding.network import (
    Architecture,
    EmbeddingNetwork,
    freeze_parameters,
    load_torchscript,
    network_identity,
    read_torchscript,
    to_torchscript,
)
from evernear.embedding.whitening import Whitening, whiten
from evernear.errors import IntegrityError, TrainingError
from evernear.settings import ClassSettings

NETWORK_FILE = "network.pt"
PARITY_TOLERANCE = 1e-4
"""Largest difference of a coordinate. Rounding differs by about 1e-7."""
PARITY_IMAGES = 256
WHITENED_IMAGES = 8192
"""Images of the train split to which the last layer of a trained network is fitted."""
PARITY_SPLITS: tuple[Split, ...] = ("query", "gallery")
T = TypeVar("T")


class ExportedNetwork(Frozen):
    """The input, output and parity of the TorchScript file beside this description."""

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

    def summary(self) -> str:
        images = quantity(self.parity_images, "image")
        return f"TorchScript within {self.parity_max_abs_difference:.1e} of eager on {images}"


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
    """A whitened network, its vectors' cache key, and images (N, C, H, W) with their vectors."""

    network: nn.Module
    identity: str
    images: Tensor
    expected: Tensor
    features_dim: int = 0


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
    from evernear.embedding.features import (
        FrozenBackbone,
        FrozenFeatures,  # timm is not installed where releases are served
        FrozenHead,
        FrozenNetwork,
    )

    features = FrozenFeatures(network, trained.architecture, store, on_images)
    head = FrozenHead(network).eval()
    block, cached = _first(dataset, lambda split: features.blocks(dataset, split))
    return _Exportable(
        FrozenNetwork(FrozenBackbone(network), head).eval(),
        features.identity,
        to_tensor(block.images),
        head(torch.from_numpy(cached)),
        features.dim,
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
        difference = max_abs_difference(exportable.expected, load_torchscript(candidate), exportable.images)
        if not difference <= tolerance:
            raise TrainingError(
                f"The exported network differs from the trained one by {difference:.2g} on real images, "
                f"more than {tolerance:g}."
            )
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


def load_network(network_dir: Path) -> torch.jit.ScriptModule:
    """Load what `export_network` wrote. It maps uint8 images (N, C, H, W) to unit vectors (N, D).

    Raises:
        IntegrityError: the file is missing, is not TorchScript, or differs from its
            description.
    """
    return load_torchscript(_verified(network_dir))


def load_parts(network_dir: Path) -> tuple[torch.jit.ScriptModule, torch.jit.ScriptModule]:
    """A frozen network's backbone, and the head on its features. The backbone's parameters are not
    frozen to constants, because it is not needed if all features are cached."""
    network = read_torchscript(_verified(network_dir))
    return network.backbone, freeze_parameters(network.head)


def _verified(network_dir: Path) -> Path:
    described, file = describe_network(network_dir), network_dir / NETWORK_FILE
    if not file.is_file() or sha256_file(file) != described.sha256:
        raise IntegrityError(f"{file} is missing or does not match {DESCRIPTION_FILE}; {described.remedy}.")
    return file


@torch.inference_mode()
def max_abs_difference(expected: Tensor, scripted: torch.jit.ScriptModule, images: Tensor) -> float:
    """Largest difference of any coordinate. NaN if an output is not finite."""
    return float((expected - scripted(images)).abs().max())


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
