"""The manifest of a release: ``manifest.json`` in the archive and in the registry."""

import os
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self

from pydantic import AwareDatetime, Field, JsonValue, model_validator

from evernear.common.frozen import Document, Frozen
from evernear.data.preprocess import Preprocessing
from evernear.embedding import DESCRIPTION_FILE as NETWORK_DESCRIPTION_FILE
from evernear.embedding import NETWORK_FILE, OPENVINO_FILES, OPENVINO_MODEL_FILE, openvino_version
from evernear.index.description import DESCRIPTION_FILE as INDEX_FILE
from evernear.index.description import PARTS as INDEX_PARTS
from evernear.index.description import Collection, index_parts

QUOTED_MAX = 100
"""Maximum number of characters that an error message quotes from an archive or a manifest."""
VERSION_PATTERN = r"^\d{8}\.\d{6}\.[0-9a-f]{8}$"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[str, Field(pattern=VERSION_PATTERN)]
HANDLER_FILE = "handler.py"
MODEL_CONFIG_FILE = "model-config.yaml"
PREPROCESSING_FILE = "preprocessing.json"
SMOKE_FILE = "smoke.json"
SMOKE_IMAGE = re.compile(r"smoke-\d\d\.png")
VERDICT_FILE = "verdict.json"
DRIFT_BASELINE_FILE = "reference.npz"
PARTS = frozenset(
    {
        NETWORK_FILE,
        NETWORK_DESCRIPTION_FILE,
        INDEX_FILE,
        *INDEX_PARTS,
        HANDLER_FILE,
        PREPROCESSING_FILE,
        SMOKE_FILE,
        VERDICT_FILE,
        MODEL_CONFIG_FILE,
        DRIFT_BASELINE_FILE,
    }
)
"""The parts of a release whose archive contains the index vectors, without `OPENVINO_FILES` and the
images that `SMOKE_FILE` lists."""

PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class Part(Frozen):
    sha256: Sha256
    size_bytes: int = Field(ge=0)


class ReleaseManifest(Document):
    """The description of a release. It is immutable after archiving.

    ``network_sha256`` is the hash of the TorchScript file, and ``network_identity`` the key of its
    cached embeddings. ``threshold`` is the distance beyond which an image is unknown. ``parent``
    is the champion that was measured together with this release. ``training`` has the ``train.*``
    settings. ``pretrained_sha256`` is the hash of the weights file that initialized the backbone.
    ``collection`` contains the index vectors, or is None if they are in the archive. For each
    class, ``joined_gallery`` is the number of train images that follow the gallery split in the
    index. ``group_distance`` is the midpoint between the median L2 distances within a class and
    between classes, or None if either is undefined.
    """

    version: Version
    created: AwareDatetime
    parts: dict[PartName, Part]
    network_sha256: Sha256
    network_identity: Sha256
    backbone: str = Field(max_length=100)
    pretrained_sha256: Sha256 | None
    dataset_name: str
    dataset_digest: str
    source: str
    training: dict[str, JsonValue]
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    max_pixels: int = Field(gt=0)
    embedding_dim: int = Field(gt=0)
    collection: Collection | None
    joined_gallery: dict[str, int]
    group_distance: float | None
    threshold: float
    metrics: dict[str, float]
    verdict_sha256: Sha256
    parent: Version | None
    git_commit: str

    @property
    def engine(self) -> str:
        """What runs the network where this is called."""
        return "OpenVINO" if OPENVINO_MODEL_FILE in self.parts and openvino_version() else "TorchScript"

    @model_validator(mode="after")
    def _agree_with_itself(self) -> Self:
        named = {name for name in self.parts if not SMOKE_IMAGE.fullmatch(name)}
        openvino = OPENVINO_FILES if named.intersection(OPENVINO_FILES) else ()
        expected = PARTS.difference(INDEX_PARTS).union(index_parts(self.collection), openvino)
        mismatched = expected.symmetric_difference(named)
        if mismatched:
            raise ValueError(f"parts are missing or unknown: {', '.join(sorted(mismatched)[:3])}")
        for name, sha256 in ((NETWORK_FILE, self.network_sha256), (VERDICT_FILE, self.verdict_sha256)):
            if self.parts[name].sha256 != sha256:
                raise ValueError(f"{name} has the sha256 {self.parts[name].sha256[:12]}, but should have {sha256[:12]}")
        return self

    @property
    def network_description_sha256(self) -> str:
        """Equal in all releases with this network, which a reindex copies."""
        return self.parts[NETWORK_DESCRIPTION_FILE].sha256


def new_version(created: datetime, content_sha256: str) -> str:
    """Create a version such as ``20261120.140501.1a2b3c4d``: ``created`` in UTC, and the first
    digits of ``content_sha256``. Versions sort by time, differ if the content differs, and are
    valid in URLs."""
    return f"{created.astimezone(UTC):%Y%m%d.%H%M%S}.{content_sha256[:8]}"


def version_time(version: str) -> datetime:
    return datetime.strptime(version[: -len(".1a2b3c4d")], "%Y%m%d.%H%M%S").replace(tzinfo=UTC)


def is_version(text: str) -> bool:
    return re.fullmatch(VERSION_PATTERN.strip("^$"), text) is not None


def git_commit(refused: Callable[[str], None] = lambda _: None) -> str:
    """With the suffix ``-dirty`` if the source tree has uncommitted changes. Empty for an installed
    package, and if git does not answer, in which case ``refused`` receives git's reason."""
    module = Path(__file__).resolve()
    if not any((folder / ".git").exists() for folder in module.parents):
        return ""
    try:
        _git(module.parent, "ls-files", "--error-unmatch", module.name)
        return _git(module.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except OSError as error:
        refused(f"git cannot be started ({error.strerror}).")
    except subprocess.CalledProcessError as error:
        if error.returncode != _NOT_TRACKED:
            refused(f"git does not name the commit of {module.parent}: {' '.join(error.stderr.split())}")
    return ""


_NOT_TRACKED = 1
"""The exit code of ``git ls-files --error-unmatch``: an installed copy inside an unrelated tree."""


def _git(directory: Path, *words: str) -> str:
    """Ignores variables such as GIT_DIR, which a hook or a script sets for another repository."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith("GIT_CONFIG_")  # may say which directories are safe
    }
    command = ["git", "-C", directory, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
