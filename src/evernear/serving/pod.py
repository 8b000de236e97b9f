"""The containers, probes and the hook of a serving pod,
in the order in which the kubelet runs them.

::

    init container   evernear pod fetch --release VERSION --sha256 HEX    downloads the archive from the object store
    container        evernear pod serve [--without-token]                 becomes TorchServe
    startupProbe     exec evernear pod ready                              all stored queries, predictions compared
    readinessProbe   GET /ready on the inference port, no token           a stored query, unless traffic is answered
    livenessProbe    the same, tolerating the time in which a worker loads
    preStop          exec evernear pod drain                              serves while the endpoint is removed
    SIGTERM          drains (decision 9)

All containers have EVERNEAR_WORKDIR, which is an emptyDir and the only writable
directory besides /tmp. Only the init container has EVERNEAR_STORE and the credentials
for the object store. All other containers have EVERNEAR_TOKEN_FILE, a file of the
Secret.

::

    WORKDIR/torchserve/     the server's home: model store, configuration, keys, unpacked release
    WORKDIR/release/        manifest, preprocessing and stored queries of the release, for the probes
"""  # noqa: W505

import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.store import open_store
from evernear.data.preprocess import decode_size_bytes
from evernear.errors import IntegrityError, ServingError, SettingsError
from evernear.release.archive_reader import ARCHIVE_FILE, MANIFEST_FILE, ReleaseParts, open_release
from evernear.release.manifest import PREPROCESSING_FILE, SMOKE_FILE, ReleaseManifest
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client, Target
from evernear.serving.configuration import LOOPBACK, model_store
from evernear.serving.endpoints import home_of
from evernear.settings import RunSettings, ServingSettings, Settings
from evernear.settings.sources import TOKEN_FILE_VARIABLE

ANYWHERE = "0.0.0.0"  # noqa: S104 - of the pod, to which a NetworkPolicy restricts access
JAVA_EXIT_S = 5  # after the drain
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,4096}=*")
"""A b64token (RFC 6750, section 2.1) with at least 96 bits."""
_STAGING = ".fetch-"
# These sizes were measured with the network and index for digits
# (benchmarks/hostile_traffic.py).
WORKER_SIZE_BYTES = 480 * 2**20
"""Memory of a worker before its first large image."""
JAVA_SIZE_BYTES = 200 * 2**20
"""Memory of TorchServe's frontend in addition to its heap."""
MEMORY_STEP_BYTES = 256 * 2**20  # so that small differences between releases do not change the pod
_UNITS = {"Mi": 2**20, "Gi": 2**30}


def grace_period_s(settings: ServingSettings) -> int:
    """The ``terminationGracePeriodSeconds`` of a pod: time for preStop,
    drain and Java's exit.
    """
    return settings.endpoint_removal_s + settings.drain_timeout_s + JAVA_EXIT_S


def memory_size_bytes(settings: ServingSettings, index_size_bytes: int, worker_parts_size_bytes: int) -> int:
    """The memory that a pod needs for a batch of the largest requests in every worker.

    The workers map one copy of the index (``index_size_bytes``). Each worker loads the
    network, labels and centroids (``worker_parts_size_bytes``). A body is in memory
    twice: as received, and rewritten without metadata.
    """
    batch = 2 * settings.batch_size * settings.max_request_size_bytes
    worker = WORKER_SIZE_BYTES + worker_parts_size_bytes + decode_size_bytes(settings.max_pixels) + batch
    return settings.heap_size_bytes + JAVA_SIZE_BYTES + index_size_bytes + settings.workers * worker


def pod_memory(settings: RunSettings, index_size_bytes: int = 0, worker_parts_size_bytes: int = 0) -> str:
    """Memory request and limit of a pod, as a Kubernetes quantity. The sizes are the
    same as in `memory_size_bytes`.

    Without the sizes, the result is the minimum memory that any release needs.

    Raises:
        SettingsError: ``kubernetes.memory`` is less than ``auto`` would be.
    """
    serving, chosen = settings.serving, settings.kubernetes.memory
    needed = memory_size_bytes(serving, index_size_bytes, worker_parts_size_bytes)
    needed_bytes = math.ceil(needed / MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES
    auto = f"{needed_bytes // 2**20}Mi"
    if chosen == "auto":
        return auto
    if int(chosen[:-2]) * _UNITS[chosen[-2:]] < needed_bytes:
        of_release = "" if index_size_bytes or worker_parts_size_bytes else " or more, depending on the release"
        raise SettingsError(
            f"Invalid setting kubernetes.memory = {chosen}: a pod needs {auto}{of_release}. With less, the kernel "
            f"kills a worker and its requests when {serving.batch_size} requests of the largest size arrive together; "
            "use auto, or lower serving.workers, serving.batch_size, serving.max_request_size_bytes or "
            "serving.max_pixels."
        )
    return chosen


def fetch_release(version: str, sha256: str, settings: Settings) -> ReleaseManifest:
    """Download a release from the store of ``settings`` for `serve_pod`.

    ``sha256`` is the hash of the archive according to the deployer. The registry's
    record and the archive must match this hash. The store is only read. The function is
    safe to repeat, even after a kill.

    Raises:
        IntegrityError: the deployer, the registry and the archive disagree,
            or the release is damaged.
        StoreError: the release does not exist, the store is unreachable,
            or the disk is full.
    """
    home, archive = home_of(settings.workdir), _archive(settings)
    if _is_alone(archive) and sha256_file(archive) == sha256:  # written last, so the release directory is complete
        return release(settings).manifest
    registry = Registry(open_store(settings.store_uri))
    record = registry.get(version)
    if record.archive_sha256 != sha256:
        raise IntegrityError(
            f"The archive of release {version} in {registry.uri} has the sha256 {record.archive_sha256}, but the pod "
            f"expects {sha256}; deploy again."
        )
    with disk_errors(home):
        _remove_leftovers(home)
        archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=_STAGING) as temporary:
            staged = Path(temporary) / ARCHIVE_FILE
            registry.fetch(version, staged)
            parts = open_release(staged, Path(temporary) / "release")
            if parts.manifest != record.manifest:
                raise IntegrityError(f"The archive of release {version} in {registry.uri} is another release.")
            _remove_all_but_probe_files(parts)
            shutil.rmtree(_release_dir(settings), ignore_errors=True)
            parts.directory.replace(_release_dir(settings))
            staged.replace(archive)
    return parts.manifest


def serve_pod(settings: Settings, *, without_token: bool = False) -> NoReturn:
    """Replace this process with TorchServe and the fetched release.

    The inference and metrics APIs listen on all addresses, and the management API
    listens on loopback. No model can be registered. Unless ``without_token`` is set,
    the inference API requires the token in the file that ``EVERNEAR_TOKEN_FILE`` names.

    Raises:
        SettingsError: the token is missing or invalid,
            or contradicts ``without_token``.
        ServingError: no release was fetched, or Java or TorchServe is not installed.
        PortInUseError: a port is in use.
    """
    if not _is_alone(_archive(settings)):
        raise ServingError(
            f"{settings.workdir} has no release, or other files next to it; run `evernear pod fetch` first."
        )
    token_file = _token_file(without_token)
    serving = settings.serving
    host = ANYWHERE if serving.host == LOOPBACK else serving.host
    frontend = {
        "log": "console",
        "model": serving.model_name,
        "query_file": _release_dir(settings) / release(settings).smoke_queries()[0][1].file,
    }
    torchserve.exec_torchserve(
        serving.model_copy(update={"host": host, "model_api": False}),
        home_of(settings.workdir),
        frontend | ({"token_file": token_file} if token_file else {}),
        tokens=token_file is not None,
    )


def release(settings: Settings) -> ReleaseParts:
    """The fetched release: manifest, preprocessing and stored queries only.

    Raises:
        ServingError: no release was fetched.
    """
    manifest = _release_dir(settings) / MANIFEST_FILE
    if not manifest.is_file():
        raise ServingError(f"{settings.workdir} has no release; run `evernear pod fetch` first.")
    return ReleaseParts(ReleaseManifest.load(manifest), manifest.parent)


def client(settings: Settings) -> Client:
    """A client of this pod's server, with the token in the environment."""
    return Client(Target.remote(settings, LOOPBACK))


def _archive(settings: Settings) -> Path:
    return model_store(home_of(settings.workdir)) / f"{settings.serving.model_name}.mar"


def _release_dir(settings: Settings) -> Path:
    return settings.workdir.resolve() / "release"


def _is_alone(archive: Path) -> bool:
    """Whether the archive is the only file in the model store.
    The server loads all files in it.
    """
    return archive.is_file() and list(archive.parent.iterdir()) == [archive]


def _remove_leftovers(home: Path) -> None:
    """Empty the model store and remove the staging directories of killed fetches."""
    for path in (*home.glob(f"{_STAGING}*"), *model_store(home).glob("*")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_all_but_probe_files(parts: ReleaseParts) -> None:
    """Remove all files except those that probes and people read.
    TorchServe unpacks the archive itself.
    """
    needed = {MANIFEST_FILE, PREPROCESSING_FILE, SMOKE_FILE, *(query.file for _, query in parts.smoke_queries())}
    for file in parts.directory.iterdir():
        if file.name not in needed:
            file.unlink()


def _token_file(without_token: bool) -> Path | None:
    """The file with the token that all replicas share."""
    name = os.environ.get(TOKEN_FILE_VARIABLE)
    if without_token:
        if name:
            raise SettingsError(f"{TOKEN_FILE_VARIABLE} and --without-token contradict each other; drop one of them.")
        return None
    if not name:
        raise SettingsError(
            f"No token: set {TOKEN_FILE_VARIABLE} to a file of the mounted Secret or, behind a NetworkPolicy, "
            "use --without-token."
        )
    file = Path(name).absolute()
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{TOKEN_FILE_VARIABLE}={name} cannot be read: {error}.") from None
    if not TOKEN.fullmatch(text):
        raise SettingsError(
            f"{TOKEN_FILE_VARIABLE}={name} has no valid token: 16 or more letters, digits and -._~+/, as printed by "
            "`openssl rand -hex 32`."
        )
    return file
