"""``index.json``, which describes an index, its network and its classification rule."""

import math
import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from evernear.common.disk import sha256_bytes, sha256_file
from evernear.common.frozen import Document, Frozen
from evernear.common.output import quantity
from evernear.errors import IntegrityError

DESCRIPTION_FILE = "index.json"
VECTORS_FILE = "index.faiss"
LABELS_FILE = "labels.npy"
RECALL = 0.99
"""Recall@1 against exact search, with 95% confidence, that an index must reach to be chosen: its
errors then hardly count among those of the network."""
MAX_DISTANCE = 2.0
"""The largest distance between two unit vectors."""
DISTANCE_TOLERANCE = 2e-3
"""Maximum difference between two computed distances of the same image. Rounding differs between
machines and batch sizes, and the square root is steep near zero: squared distances of equal vectors
that differ by 4e-6 (observed: 1e-6) give this difference."""
TOWARD_MEAN = 0.85
"""`IndexDescription.toward_mean` of a new network's gallery. What is left of the image keeps the
clusters of a class, such as a digit's two forms. Class means alone name fewer of the trained
classes right (docs/decisions/0008-unknown-images.md)."""
WIDE = 3
"""The interval of false rejects is wide above this multiple of ``index.false_reject_rate``."""
PARTS = (VECTORS_FILE, LABELS_FILE)


def index_parts(collection: "Collection | None") -> tuple[str, ...]:
    """The files of an index except its description."""
    return tuple(name for name in PARTS if collection is None or name != VECTORS_FILE)


class Collection(Frozen):
    """Holds the vectors of an index, in a backend such as Milvus."""

    backend: str = "milvus"
    """The value of ``index.backend`` (`evernear.index.vectors.index_backend`)."""
    uri: str = Field(max_length=1000)
    """The address of the server, or the absolute path of a file."""
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}(_s[0-9a-f]{12})?_[0-9a-f]{32}$")
    """An alias, the store that owns the collection (`owner_of`), and the content hash."""

    @property
    def alias(self) -> str:
        return re.sub("(_s[0-9a-f]{12})?_[0-9a-f]{32}$", "", self.name)


def collection_owner(name: str) -> str | None:
    """The store in the name of a collection, or None if no store owns it."""
    owned = re.search("_s([0-9a-f]{12})_[0-9a-f]{32}$", name)
    return owned[1] if owned else None


def wilson(share: float, n: float, z: float) -> tuple[float, float]:
    """The limits of Wilson's interval (1927) for a ``share`` of ``n`` independent images."""
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(share * (1 - share) / n + (z / n) ** 2 / 4) / (1 + z**2 / n)
    # at 0 and 1, rounding errors may move a limit past the value by 1e-17
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))


def clopper_pearson(events: float, total: float, tail: float) -> tuple[float, float]:
    """The exact limits (1934) for the share of ``events``, each exceeded with a probability of at
    most ``tail``. SciPy's `binomtest` takes integers only."""
    from scipy.special import betaincinv

    low = float(betaincinv(events, total - events + 1, tail)) if events > 0 else 0.0
    high = float(betaincinv(events + 1, total - events, 1 - tail)) if events < total else 1.0
    return low, high


class Calibration(Frozen):
    """The origin of the open-set threshold, and its effect on the query split."""

    found_by: Literal["unseen classes", "impostors"]
    stated_false_accept_rate: float
    stated_false_reject_rate: float
    threshold: float = Field(ge=0.0, le=MAX_DISTANCE, allow_inf_nan=False)
    queries: int = Field(ge=1)
    false_accepts: int
    """Queries whose nearest vector of a different class is within the threshold."""
    false_rejects: int
    """Queries whose nearest vector, according to the index, is beyond the threshold."""
    nearest_found: int
    """Queries whose exact nearest vector the index found, which gives the recall@1."""
    independent: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """The number of independent queries
    (`evernear.data.group_numbers.GroupNumbers.independent`), or None if all are."""

    def expected_false_rejects(self, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval for the share of new images of known classes that will be unknown.

        The Clopper-Pearson interval (1934) for `false_rejects` of `queries`, or of `independent`,
        is also valid for a threshold that was chosen on the same queries: the share beyond the
        order statistic of rank n - k follows a Beta(k + 1, n - k) distribution, and beyond the next
        one a Beta(k, n - k + 1) distribution (Vovk 2012, "Conditional validity of inductive
        conformal predictors", arXiv:1209.2673).
        """
        scale = 1.0 if self.independent is None else self.independent / self.queries
        return clopper_pearson(scale * self.false_rejects, scale * self.queries, (1 - confidence) / 2)

    def describe_false_rejects(self) -> str:
        """Empty if every image counts as known. Includes advice if the interval is wide."""
        if self.threshold >= MAX_DISTANCE:
            return ""
        low, high = self.expected_false_rejects()
        text = f"{low:.1%} to {high:.1%} of new images like the query images are called unknown"
        if high <= WIDE * self.stated_false_reject_rate:
            return text
        return (
            f"{text}, a wide range from only {quantity(self.queries, 'query image')}{self._grouped()}: to narrow it, "
            f"add {'images' if self.independent is None else 'groups'}, or raise data.query_fraction for a new dataset"
        )

    def _grouped(self) -> str:
        """The number of independent images as part of a sentence, or empty if all are."""
        if self.independent is None:
            return ""
        return f" of groups (data.group), as good as {quantity(round(self.independent), 'independent image')}"


def describe_threshold(threshold: float) -> str:
    return "unknown switched off" if threshold >= MAX_DISTANCE else f"unknown beyond {threshold:.3f}"


class IndexDescription(Document):
    """``index.json``. A distance is the square root of 2 - 2 times the inner product, from 0 to 2.
    Between unit vectors, this is the L2 distance."""

    remedy = "run the index step again"

    network_sha256: str
    dataset_digest: str
    factory: str
    search: str
    reason: str = ""
    """Why the index step chose this type and its parameters, or empty if the type was set."""
    metric: Literal["inner product", "l2"] = "inner product"
    """The metric by which FAISS ranks vectors."""
    dim: int = Field(ge=1)
    size: int = Field(ge=1)
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    """Vectors per label in ``labels``. A label without vectors is never predicted."""
    toward_mean: float = Field(ge=0.0, le=1.0)
    """How far each vector of the gallery was moved toward the mean of its class (see
    `evernear.index.vectors.move_toward`). A single photograph is a noisy sample of its class."""
    k: int = Field(ge=1)
    calibration: Calibration
    parts: dict[str, str]
    """The sha256 of each file in `index_parts`."""
    collection: Collection | None = None
    """The collection with the vectors, or None if they are in `VECTORS_FILE`."""

    @property
    def threshold(self) -> float:
        """A known image's maximum distance to its nearest neighbor. `MAX_DISTANCE` accepts all."""
        return self.calibration.threshold

    @property
    def known_labels(self) -> tuple[str, ...]:
        """The labels that the index can predict."""
        return tuple(label for label, count in zip(self.labels, self.counts, strict=True) if count)

    def summary(self) -> str:
        """Includes a warning if the measured recall@1 is below `RECALL`."""
        recall = self.calibration.nearest_found / self.calibration.queries
        summary = f"{quantity(self.size, 'vector')}, {self.factory}; {describe_threshold(self.threshold)}"
        if false_rejects := self.calibration.describe_false_rejects():
            summary += f"; {false_rejects}"
        if recall >= RECALL:
            return summary
        return (
            f"{summary}; WARNING: recall@1 is {recall:.2%}, less than {RECALL:.0%}; set another "
            "index.type or index.search, or index.type=null"
        )

    @property
    def digest(self) -> str:
        """Identifies the index and its settings."""
        return sha256_bytes(self.model_dump_json(exclude={"reason", "evernear_version"}).encode())


def describe_index(directory: Path) -> IndexDescription:
    """Read only ``index.json``, not the other files."""
    described = IndexDescription.load(directory / DESCRIPTION_FILE)
    if set(described.parts) != set(index_parts(described.collection)) or len(described.counts) != len(described.labels):
        raise IntegrityError(f"{directory / DESCRIPTION_FILE} is inconsistent; {described.remedy}.")
    return described


def check_parts(directory: Path, described: IndexDescription) -> None:
    """Compare the files with their hashes. Call this before any is parsed."""
    for name, sha256 in described.parts.items():
        path = directory / name
        if not path.is_file() or sha256_file(path) != sha256:
            raise IntegrityError(f"{path} is missing or changed since it was written; {described.remedy}.")
