"""Export the trained network as TorchScript, verified against the eager network on real images."""

import hashlib
import io
import warnings
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.common.code_digest import code_digest
from evernear.common.disk import sha256_bytes, sha256_file, write_atomically
from evernear.common.frozen import Frozen
from evernear.common.store import Store
from evernear.data.manifest import Manifest
from evernear.data.preprocess import Preprocessing
from evernear.data.shards import Dataset
from evernear.embedding.architecture import Architecture
from evernear.embedding.artifact import load_trained
from evernear.embedding.data_loader import TrainingImages, to_tensor
from evernear.embedding.network import EmbeddingNetwork
from evernear.errors import IntegrityError, TrainingError

NETWORK_FILE = "network.pt"
DESCRIPTION_FILE = "network.json"
PARITY_IMAGES = 256
LIBRARIES = ("timm", "torch")
"""Libraries whose versions affect the outputs of a network."""


class ExportedNetwork(Frozen):
    """`DESCRIPTION_FILE`: input, output and parity with the eager network of the TorchScript file next to it."""

    remedy = "run the export step again"

    sha256: str
    identity: str
    """sha256 of weights, architecture and code. Torch writes the same network as another file in each process."""
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
    """As in `evernear.embedding.artifact.TrainedNetwork`."""
    training_warnings: tuple[str, ...] = ()
    training: dict[str, JsonValue]
    """The settings ``train.*`` that it was trained with."""


class CenteredNetwork(nn.Module):
    """A network whose unit vectors are centered and normalized again (Wang et al. 2019, arXiv:1911.04623).

    ArcFace separates classes by angle, but lets all of them share a direction, in which images of unseen classes lie as
    well. Without that direction, they are farther from the known classes (docs/decisions/0008-unknown-images.md).
    """

    def __init__(self, network: EmbeddingNetwork, center: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("center", center)
        self.center: Tensor

    def forward(self, images: Tensor) -> Tensor:
        """Embed ``images`` (N, C, H, W), uint8 or float in 0..255, as unit vectors (N, D)."""
        return F.normalize(self.network(images) - self.center)


@torch.inference_mode()
def center(network: EmbeddingNetwork, dataset: Dataset, exclude_labels: Collection[str]) -> CenteredNetwork:
    """Center ``network`` on the mean of the classes' mean vectors in the gallery, without ``exclude_labels``.

    A mean over images would follow the largest class.
    """
    images = TrainingImages(dataset, frozenset(exclude_labels))
    counts, sums = torch.zeros(images.classes), torch.zeros(0)
    for pixels, classes in images.gallery():
        vectors = network.eval()(pixels)
        sums = sums if len(sums) else torch.zeros(images.classes, vectors.shape[1])
        sums.index_add_(0, classes, vectors)
        counts += torch.bincount(classes, minlength=images.classes)
    present = counts > 0
    return CenteredNetwork(network, (sums[present] / counts[present, None]).mean(dim=0)).eval()


def export_network(trained_dir: Path, dataset: Dataset, out_dir: Path, tolerance: float) -> ExportedNetwork:
    """Center the network of ``trained_dir``, and write it to ``out_dir`` as TorchScript with its description.

    Parity is the largest absolute difference of any coordinate between the eager network and the file as it will be
    served (read back and optimized), over images of the query split, or of the gallery if that is empty.

    Raises:
        TrainingError: the difference exceeds ``tolerance`` or is not a number. Nothing is written.
        IntegrityError: ``trained_dir`` has no trained network, or one for images of another shape.
    """
    trained, uncentered = load_trained(trained_dir)
    if trained.architecture.shape != dataset.shape:
        raise IntegrityError(
            f"The network in {trained_dir} takes images of {trained.architecture.shape}, but the images of "
            f"{dataset.manifest.name} are {dataset.shape}; train again."
        )
    network = center(uncentered, dataset, trained.exclude_labels)
    data = to_torchscript(network)
    candidate = out_dir / f"{NETWORK_FILE}.unverified"
    write_atomically(candidate, data)
    try:
        images = _parity_images(dataset)
        difference = max_abs_difference(network, load_torchscript(candidate), images)
        if not difference <= tolerance:
            raise TrainingError(
                f"The exported network differs from the trained one by {difference:.2g} on real images, "
                f"more than train.parity_tolerance = {tolerance:g}."
            )
        exported = ExportedNetwork(
            sha256=sha256_bytes(data),
            identity=_identity(network, trained.architecture),
            embedding_dim=trained.architecture.embedding_dim,
            preprocessing=_preprocessing(trained.architecture, dataset.manifest),
            parity_max_abs_difference=difference,
            parity_images=len(images),
            dataset_digest=trained.dataset_digest,
            weights_sha256=trained.weights_sha256,
            backbone=trained.architecture.backbone,
            frozen=trained.architecture.frozen,
            pretrained_sha256=trained.pretrained_sha256,
            training_warnings=trained.warnings,
            training=trained.settings.model_dump(mode="json"),
        )
        candidate.replace(out_dir / NETWORK_FILE)
    finally:
        candidate.unlink(missing_ok=True)
    exported.save(out_dir / DESCRIPTION_FILE)
    return exported


def describe_network(directory: Path) -> ExportedNetwork:
    """Read the description that `export_network` wrote.

    Raises:
        IntegrityError: it is missing or invalid.
    """
    return ExportedNetwork.load(directory / DESCRIPTION_FILE)


def training_dataset(network_dir: Path, dataset: Dataset, store: Store) -> Dataset:
    """The snapshot that a network was trained on: ``dataset``, or an earlier one of the same name.

    Raises:
        IntegrityError: the store no longer has it.
    """
    digest = describe_network(network_dir).dataset_digest
    snapshot = dataset if digest == dataset.digest else Dataset.find(store, dataset.manifest.name, digest)
    if snapshot is None:
        raise IntegrityError(
            f"The network was trained on the snapshot {digest[:12]} of {dataset.manifest.name}, which the store no "
            "longer has, so the images that it was trained on are unknown; run the whole pipeline."
        )
    return snapshot


def load_network(network_dir: Path) -> torch.jit.ScriptModule:
    """Load the network of an `export_network` directory, verified by its description, and optimize it for big batches.

    It maps uint8 images (N, C, H, W) to unit vectors (N, D) of float32. With oneDNN's operators and memory layout, a
    batch of 256 takes 2% to 14% less time, but a single image up to 3 times as much, so servers do not use them. An
    optimized graph cannot be saved.

    Raises:
        IntegrityError: the file is missing, is not TorchScript, or does not match its description.
    """
    described, file = describe_network(network_dir), network_dir / NETWORK_FILE
    if not file.is_file() or sha256_file(file) != described.sha256:
        raise IntegrityError(f"{file} is missing or does not match {DESCRIPTION_FILE}; {described.remedy}.")
    with _ignore_torchscript_deprecation():
        return torch.jit.optimize_for_inference(load_torchscript(file))


def to_torchscript(network: nn.Module) -> bytes:
    """Serialize the network, in eval mode, as TorchScript."""
    buffer = io.BytesIO()
    with _ignore_torchscript_deprecation():
        torch.jit.save(torch.jit.script(network.eval()), buffer)
    return buffer.getvalue()


def load_torchscript(file: Path) -> torch.jit.ScriptModule:
    """Load a TorchScript file on the CPU, with its parameters frozen as constants. The caller has verified the file.

    Raises:
        IntegrityError: the file is not TorchScript.
    """
    with _ignore_torchscript_deprecation():
        try:
            network = torch.jit.load(file, map_location="cpu").eval()
        except (RuntimeError, ValueError) as error:
            raise IntegrityError(f"{file} is not a TorchScript network; {ExportedNetwork.remedy}.") from error
        return torch.jit.freeze(network)


@torch.inference_mode()
def max_abs_difference(eager: nn.Module, scripted: torch.jit.ScriptModule, images: Tensor) -> float:
    """Largest absolute difference of any coordinate; NaN if an output is not finite."""
    return float((eager.eval()(images) - scripted(images)).abs().max())


@contextmanager
def _ignore_torchscript_deprecation() -> Generator[None]:
    """Ignore the deprecation warnings of ``torch.jit`` (torch 2.13): TorchServe loads TorchScript."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield


def _identity(network: CenteredNetwork, architecture: Architecture) -> str:
    sha256 = hashlib.sha256(architecture.model_dump_json().encode())
    sha256.update(code_digest("evernear.embedding.export", LIBRARIES).encode())
    for name, tensor in sorted(network.state_dict().items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


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


def _parity_images(dataset: Dataset) -> Tensor:
    for split in ("query", "gallery"):
        for block in dataset.blocks(split, PARITY_IMAGES):
            return to_tensor(np.asarray(block.images))
    raise TrainingError(f"Dataset {dataset.manifest.name} has no query or gallery images to verify the export with.")
