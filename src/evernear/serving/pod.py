"""The containers, probes and preStop hook of a serving pod, in the order in which they run.

::

    init container   evernear pod fetch --release VERSION --sha256 HEX    downloads the archive from the object store
    container        evernear pod serve [--without-token]                 becomes TorchServe
    startupProbe     exec evernear pod ready                              all stored queries, predictions compared
    readinessProbe   GET /ready on the inference port, no token           a stored query, unless traffic is answered
    livenessProbe    the same, tolerating the time in which a worker loads
    preStop          exec sleep                                           serves while the endpoint is removed
    SIGTERM          drains (decision 9)

In all containers, ``EVERNEAR_WORKDIR`` is the path of an emptyDir, the only writable directory
besides ``/tmp``. Only the init container has ``EVERNEAR_STORE`` and the credentials for the object
store. In the others, ``EVERNEAR_TOKEN_FILE`` is the path of a file from the Secret.

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
from evernear.common.environment import text_file
from evernear.common.store import open_store
from evernear.data.preprocess import decode_size_bytes
from evernear.errors import IntegrityError, ServingError, SettingsError
from evernear.release.archive_reader import ARCHIVE_FILE, MANIFEST_FILE, ReleaseParts, open_release
from evernear.release.manifest import PREPROCESSING_FILE, SMOKE_FILE, ReleaseManifest
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client, Target
from evernear.serving.configuration import DRAIN_TIMEOUT_S, LOOPBACK, model_store
from evernear.serving.endpoints import home_of
from evernear.settings import RunSettings, ServingSettings, Settings
from evernear.settings.serving import HEAP_SIZE_BYTES, MODEL_NAME
from evernear.settings.sources import TOKEN_FILE_VARIABLE

ANYWHERE = "0.0.0.0"  # noqa: S104 - of the pod, to which a NetworkPolicy restricts access
ENDPOINT_REMOVAL_S = 10
"""Delay of the preStop hook, while Kubernetes removes the endpoint and clients notice."""
JAVA_EXIT_S = 5  # after the drain
GRACE_PERIOD_S = ENDPOINT_REMOVAL_S + DRAIN_TIMEOUT_S + JAVA_EXIT_S
"""``terminationGracePeriodSeconds``: time for the preStop hook, the drain and Java's exit."""
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,4096}=*")
"""A b64token (RFC 6750, section 2.1) of at least 96 bits."""
_STAGING = ".fetch-"
# These sizes were measured with the digits network and index (benchmarks/hostile_traffic.py).
WORKER_SIZE_BYTES = 480 * 2**20
"""A worker's memory before its first large image."""
JAVA_SIZE_BYTES = 200 * 2**20
"""Memory of TorchServe's frontend in addition to the Java heap."""
MEMORY_STEP_BYTES = 256 * 2**20  # so that small differences between releases do not change the pod
_UNITS = {"Mi": 2**20, "Gi": 2**30}


def memory_size_bytes(settings: ServingSettings, index_size_bytes: int, worker_parts_size_bytes: int) -> int:
    """The memory that a pod needs if every worker processes a full batch of the largest requests.

    All workers share one memory-mapped copy of the index (``index_size_bytes``). Each loads its own
    copy of the network and labels (``worker_parts_size_bytes``). Each request body is in
    memory twice: as received, and after it is rewritten without metadata.
    """
    batch = 2 * settings.batch_size * settings.max_request_size_bytes
    worker = WORKER_SIZE_BYTES + worker_parts_size_bytes + decode_size_bytes(settings.max_pixels) + batch
    return HEAP_SIZE_BYTES + JAVA_SIZE_BYTES + index_size_bytes + settings.workers * worker


def pod_memory(settings: RunSettings, index_size_bytes: int = 0, worker_parts_size_bytes: int = 0) -> str:
    """Memory request and limit of a pod, as a Kubernetes quantity. If both sizes are 0, the minimum
    that any release needs.

    Raises:
        SettingsError: ``kubernetes.memory`` is less than the release needs.
    """
    serving, chosen = settings.serving, settings.kubernetes.memory
    needed = memory_size_bytes(serving, index_size_bytes, worker_parts_size_bytes)
    needed_bytes = math.ceil(needed / MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES
    default = f"{needed_bytes // 2**20}Mi"
    if chosen is None:
        return default
    if int(chosen[:-2]) * _UNITS[chosen[-2:]] < needed_bytes:
        of_release = "" if index_size_bytes or worker_parts_size_bytes else " or more, depending on the release"
        raise SettingsError(
            f"Invalid setting kubernetes.memory = {chosen}: a pod needs {default}{of_release}. With less, the kernel "
            f"kills a worker and its requests when {serving.batch_size} requests of the largest size arrive together; "
            "leave it out, or lower serving.workers, serving.batch_size, serving.max_request_size_bytes or "
            "serving.max_pixels."
        )
    return chosen


def fetch_release(version: str, sha256: str, settings: Settings) -> ReleaseManifest:
    """Download a release for `serve_pod`.

    The registry's record and the archive must match ``sha256``, the deployer's hash of the archive.
    The store is only read. The call can be repeated, even if an earlier one was killed.
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
    """Replace this process with TorchServe, which serves the fetched release.

    The inference and metrics APIs listen on all addresses, and the management API only on loopback.
    No model can be registered. Unless ``without_token`` is set, the inference API requires the
    token in the file that ``EVERNEAR_TOKEN_FILE`` specifies.
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
        "model": MODEL_NAME,
        "query_file": _release_dir(settings) / release(settings).smoke_queries()[0][1].file,
    }
    torchserve.exec_torchserve(
        serving.model_copy(update={"host": host}),
        home_of(settings.workdir),
        frontend | ({"token_file": token_file} if token_file else {}),
        tokens=token_file is not None,
    )


def release(settings: Settings) -> ReleaseParts:
    """The fetched release: only its manifest, preprocessing and stored queries remain."""
    manifest = _release_dir(settings) / MANIFEST_FILE
    if not manifest.is_file():
        raise ServingError(f"{settings.workdir} has no release; run `evernear pod fetch` first.")
    return ReleaseParts(ReleaseManifest.load(manifest), manifest.parent)


def client(settings: Settings) -> Client:
    """A client of this pod's server, with the token from the environment."""
    return Client(Target.remote(settings, LOOPBACK))


def _archive(settings: Settings) -> Path:
    return model_store(home_of(settings.workdir)) / f"{MODEL_NAME}.mar"


def _release_dir(settings: Settings) -> Path:
    return settings.workdir.resolve() / "release"


def _is_alone(archive: Path) -> bool:
    """The server loads every file in the model store, so the archive must be the only one."""
    return archive.is_file() and list(archive.parent.iterdir()) == [archive]


def _remove_leftovers(home: Path) -> None:
    """Empty the model store, and remove staging directories that killed fetches left behind."""
    for path in (*home.glob(f"{_STAGING}*"), *model_store(home).glob("*")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_all_but_probe_files(parts: ReleaseParts) -> None:
    """Keep the release files that probes and people read. TorchServe unpacks the archive itself."""
    needed = {MANIFEST_FILE, PREPROCESSING_FILE, SMOKE_FILE, *(query.file for _, query in parts.smoke_queries())}
    for file in parts.directory.iterdir():
        if file.name not in needed:
            file.unlink()


def _token_file(without_token: bool) -> Path | None:
    """The token file, which all replicas share, or None if ``without_token`` is set."""
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
    if not TOKEN.fullmatch(text_file(TOKEN_FILE_VARIABLE, file)):
        raise SettingsError(
            f"{TOKEN_FILE_VARIABLE}={name} has no valid token: 16 or more letters, digits and -._~+/, as printed by "
            "`openssl rand -hex 32`."
        )
    return file
