"""``index.json``: what an index is made of, whose vectors it holds and how it answers."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from evernear.disk import sha256_bytes, sha256_file
from evernear.errors import IntegrityError
from evernear.frozen import Frozen

DESCRIPTION_FILE = "index.json"
VECTORS_FILE = "index.faiss"
LABELS_FILE = "labels.npy"
CENTROIDS_FILE = "centroids.npy"
FARTHEST = 2.0
"""The largest distance between two unit vectors."""
PARTS = (VECTORS_FILE, LABELS_FILE, CENTROIDS_FILE)


class Calibration(Frozen):
    """How the open-set threshold was found, and what the index does at it on the query split."""

    found_by: Literal["unseen classes", "impostors"]
    stated_false_accept_rate: float
    threshold: float = Field(ge=0.0, le=FARTHEST, allow_inf_nan=False)
    queries: int = Field(ge=1)
    false_accepts: int
    """Queries whose nearest vector of another class is within the threshold."""
    false_rejects: int
    """Queries whose nearest vector, as the index finds it, is beyond the threshold."""
    nearest_found: int
    """Queries whose nearest vector of all the index found: recall@1 against exact search."""


class IndexDescription(Frozen):
    """All of ``index.json``. Distances are L2 between unit vectors, not squared: 0 to 2."""

    format: Literal[1] = 1
    network_sha256: str
    dataset_digest: str
    factory: str
    search: str
    metric: Literal["inner product", "l2"] = "inner product"
    """What FAISS ranks by; of unit vectors, L2 ranks alike."""
    dim: int = Field(ge=1)
    size: int = Field(ge=1)
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    """Vectors of each of ``labels``; a label with none cannot be answered."""
    label_by: Literal["vote", "centroid"]
    k: int = Field(ge=1)
    calibration: Calibration
    parts: dict[str, str]
    """sha256 of each of `PARTS`."""

    @property
    def threshold(self) -> float:
        """The largest distance to the nearest neighbour at which an image counts as known."""
        return self.calibration.threshold

    @property
    def known_labels(self) -> tuple[str, ...]:
        """The labels that the index can answer with."""
        return tuple(label for label, count in zip(self.labels, self.counts, strict=True) if count)

    @property
    def digest(self) -> str:
        """sha256 that names the index: of its parts and of how it answers."""
        return sha256_bytes(self.model_dump_json().encode())


def describe_index(directory: Path) -> IndexDescription:
    """The description of the index in ``directory``; its parts are not looked at.

    Raises:
        IntegrityError: there is none, or it is not one that `build` wrote.
    """
    try:
        described = IndexDescription.model_validate_json((directory / DESCRIPTION_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise IntegrityError(f"{directory} holds no index; run the index step again.") from error
    if set(described.parts) != set(PARTS) or len(described.counts) != len(described.labels):
        raise IntegrityError(f"{directory / DESCRIPTION_FILE} contradicts itself; run the index step again.")
    return described


def check_parts(directory: Path, described: IndexDescription) -> None:
    """Compare the files with their hashes, before anything parses them.

    Raises:
        IntegrityError: one is missing or changed.
    """
    for name, sha256 in described.parts.items():
        path = directory / name
        if not path.is_file() or sha256_file(path) != sha256:
            raise IntegrityError(f"{path} is missing or changed since it was written; run the index step again.")
