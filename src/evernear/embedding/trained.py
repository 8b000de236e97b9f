"""A trained network on disk: its weights and what it takes to build it again."""

from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from evernear.disk import sha256_bytes, write_atomically
from evernear.embedding.checkpoint import from_bytes, to_bytes
from evernear.embedding.network import Architecture, EmbeddingNetwork, build
from evernear.errors import IntegrityError
from evernear.frozen import Frozen
from evernear.settings import TrainSettings

WEIGHTS_FILE = "weights.pt"
DESCRIPTION_FILE = "network.json"


class Trained(Frozen):
    """`DESCRIPTION_FILE`: the network that the weights belong to, and what they were trained on."""

    architecture: Architecture
    dataset_digest: str
    exclude_labels: tuple[str, ...]
    settings: TrainSettings
    weights_sha256: str


def save_trained(
    directory: Path,
    weights: dict[str, Tensor],
    architecture: Architecture,
    settings: TrainSettings,
    dataset_digest: str,
    exclude_labels: frozenset[str],
) -> Trained:
    """Write weights, then their description, each whole or not at all."""
    data = to_bytes(weights)
    trained = Trained(
        architecture=architecture,
        dataset_digest=dataset_digest,
        exclude_labels=tuple(sorted(exclude_labels)),
        settings=settings,
        weights_sha256=sha256_bytes(data),
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / WEIGHTS_FILE, data)
    write_atomically(directory / DESCRIPTION_FILE, trained.model_dump_json(indent=2))
    return trained


def load_trained(directory: Path) -> tuple[Trained, EmbeddingNetwork]:
    """The network that `save_trained` wrote, on the CPU, ready to embed.

    Raises:
        IntegrityError: a file is missing, or the weights are not those that the description names.
    """
    try:
        trained = Trained.model_validate_json((directory / DESCRIPTION_FILE).read_bytes())
        data = (directory / WEIGHTS_FILE).read_bytes()
    except (OSError, ValidationError) as error:
        raise IntegrityError(f"{directory} holds no trained network; run the train step again.") from error
    if sha256_bytes(data) != trained.weights_sha256:
        raise IntegrityError(
            f"The weights in {directory / WEIGHTS_FILE} are not those of {DESCRIPTION_FILE}; train again."
        )
    network = build(trained.architecture)
    network.load_state_dict(from_bytes(data))
    network.eval()
    return trained, network
