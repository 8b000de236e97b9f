"""The trained network as TorchScript, proved on real images to compute what it was trained to."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from evernear.data.preprocess import Preprocessing
from evernear.data.shards import Dataset
from evernear.disk import sha256_bytes, sha256_file, write_atomically
from evernear.embedding import torchscript
from evernear.embedding.images import to_tensor
from evernear.embedding.network import Architecture, EmbeddingNetwork
from evernear.embedding.trained import load_trained
from evernear.errors import IntegrityError, TrainingError
from evernear.frozen import Frozen
from evernear.store import Store

NETWORK_FILE = "network.pt"
DESCRIPTION_FILE = "network.json"
PARITY_IMAGES = 256


class ExportResult(Frozen):
    """`DESCRIPTION_FILE`: what the TorchScript file beside it takes and gives, and how well it was proved."""

    sha256: str
    input: Literal["uint8 NCHW, 0..255"] = "uint8 NCHW, 0..255"
    embedding_dim: int
    preprocessing: Preprocessing
    parity_max_abs_difference: float
    parity_images: int
    dataset_digest: str
    weights_sha256: str


def export(trained_dir: Path, dataset: Dataset, out_dir: Path, tolerance: float) -> ExportResult:
    """Write the network of ``trained_dir`` to ``out_dir`` as TorchScript with its description.

    Parity is the largest absolute difference of any coordinate between the eager network and the file as it
    will be served, read back and optimised, over real images of the query split (or the gallery, where that
    is empty).

    Raises:
        TrainingError: the difference is above ``tolerance``, or not a number; nothing is written then.
        IntegrityError: ``trained_dir`` holds no trained network, or one of another dataset's image shape.
    """
    trained, network = load_trained(trained_dir)
    if trained.architecture.shape != dataset.shape:
        raise IntegrityError(
            f"The network in {trained_dir} takes images of {trained.architecture.shape}, but those of "
            f"{dataset.manifest.name} are {dataset.shape}; train again."
        )
    data = torchscript.script(network)
    out_dir.mkdir(parents=True, exist_ok=True)
    candidate = out_dir / f"{NETWORK_FILE}.unproved"
    write_atomically(candidate, data)
    try:
        images = _real_images(dataset)
        difference = max_abs_difference(network, torchscript.load(candidate, optimize=True), images)
        if not difference <= tolerance:
            raise TrainingError(
                f"The exported network differs from the trained one by {difference:.2g} on real images, "
                f"more than train.parity_tolerance = {tolerance:g}."
            )
        result = ExportResult(
            sha256=sha256_bytes(data),
            embedding_dim=trained.architecture.embedding_dim,
            preprocessing=_preprocessing(trained.architecture),
            parity_max_abs_difference=difference,
            parity_images=len(images),
            dataset_digest=trained.dataset_digest,
            weights_sha256=trained.weights_sha256,
        )
        candidate.replace(out_dir / NETWORK_FILE)
    finally:
        candidate.unlink(missing_ok=True)
    write_atomically(out_dir / DESCRIPTION_FILE, result.model_dump_json(indent=2))
    return result


def describe_network(directory: Path) -> ExportResult:
    """The description that `export` wrote.

    Raises:
        IntegrityError: there is none.
    """
    try:
        return ExportResult.model_validate_json((directory / DESCRIPTION_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise IntegrityError(f"{directory} holds no exported network; run the export step again.") from error


def trained_on(directory: Path, dataset: Dataset, store: Store) -> Dataset:
    """The snapshot that the network in ``directory`` was trained on: ``dataset``, or an earlier one of its name.

    Raises:
        IntegrityError: it is gone from the store.
    """
    digest = describe_network(directory).dataset_digest
    found = dataset if digest == dataset.digest else Dataset.find(store, dataset.manifest.name, digest)
    if found is None:
        raise IntegrityError(
            f"The network was trained on the snapshot {digest[:12]} of {dataset.manifest.name}, which the store no "
            "longer has: nobody can tell which images it has seen. Run the whole pipeline."
        )
    return found


def load_network(path: Path, optimize: bool = True) -> torch.jit.ScriptModule:
    """The network of an `export` directory, its hash checked, or of a TorchScript file whose hash the caller
    knows.

    It takes uint8 images (N, C, H, W) and gives unit vectors (N, D) of float32. ``optimize`` makes it several
    times faster; it costs a moment here and in the first two calls.

    Raises:
        IntegrityError: the file is missing, is no TorchScript, or is not the one that was described.
    """
    if path.is_dir():
        described, file = describe_network(path), path / NETWORK_FILE
        if not file.is_file() or sha256_file(file) != described.sha256:
            raise IntegrityError(f"{file} is not the network that {path / DESCRIPTION_FILE} names; export again.")
        return torchscript.load(file, optimize)
    return torchscript.load(path, optimize)


@torch.inference_mode()
def max_abs_difference(eager: EmbeddingNetwork, scripted: torch.jit.ScriptModule, images: Tensor) -> float:
    """Largest absolute difference of any coordinate; NaN when an output is not finite."""
    ours, theirs = eager.eval()(images), scripted(images)
    return float((ours - theirs).abs().max())


def _preprocessing(architecture: Architecture) -> Preprocessing:
    height, width, channels = architecture.shape
    return Preprocessing(
        height_px=height,
        width_px=width,
        channels=3 if channels == 3 else 1,
        mean=architecture.mean,
        std=architecture.std,
    )


def _real_images(dataset: Dataset) -> Tensor:
    for split in ("query", "gallery"):
        for block in dataset.blocks(split, PARITY_IMAGES):
            return to_tensor(np.asarray(block.images))
    raise TrainingError(f"Dataset {dataset.manifest.name} has no query or gallery image to prove the export on.")
