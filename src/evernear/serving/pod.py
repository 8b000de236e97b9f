"""What runs in a serving pod, in the order in which a kubelet runs it.

::

    init container   evernear pod fetch --release VERSION --sha256 HEX    the archive, from the object store
    container        evernear pod serve [--without-token]                 becomes TorchServe
    startupProbe     exec evernear pod ready                              all stored queries, answers compared
    readinessProbe   GET /ready on the inference port, no token           a stored query, unless traffic tells
    livenessProbe    the same, with more patience than a worker takes to load
    preStop          exec evernear pod drain                              answers while the endpoints are removed
    SIGTERM          drains, see decision 9

All of them have EVERNEAR_WORKDIR, the one directory that is written to (an emptyDir) besides /tmp. The init container
alone has EVERNEAR_STORE and the keys of the object store; the others have EVERNEAR_TOKEN_FILE, a file of the Secret.

::

    WORKDIR/torchserve/                     the server's home: model store, configuration, keys, unpacked release
    WORKDIR/release/                        manifest, preprocessing and stored queries of the release, for the probes
"""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

from evernear.disk import disk_errors, sha256_file
from evernear.errors import IntegrityError, ServingError, SettingsError
from evernear.release.archive_reader import (
    ARCHIVE_FILE,
    MANIFEST_FILE,
    PREPROCESSING_FILE,
    SMOKE_FILE,
    ReleaseParts,
    open_release,
)
from evernear.release.manifest import ReleaseManifest
from evernear.release.registry import Registry
from evernear.serving import torchserve
from evernear.serving.client import Client, Target
from evernear.serving.configuration import LOOPBACK, model_store
from evernear.serving.connection import home_of
from evernear.settings import ServingSettings, Settings
from evernear.settings.sources import TOKEN_FILE_VARIABLE
from evernear.store import open_store

ANYWHERE = "0.0.0.0"  # noqa: S104 - of the pod; a NetworkPolicy says who gets there
JAVA_ENDS_S = 5  # after the last answer
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,4096}=*")
"""b64token of RFC 6750, section 2.1, of at least 96 bits."""


def grace_period_s(settings: ServingSettings) -> int:
    """The ``terminationGracePeriodSeconds`` of a pod: seconds of its preStop, of its drain and of Java's end."""
    return settings.endpoint_removal_s + settings.drain_timeout_s + JAVA_ENDS_S


def fetch(version: str, sha256: str, settings: Settings) -> ReleaseManifest:
    """Bring a release from the store of ``settings`` to where `serve` finds it.

    ``sha256`` is what the deployer says of the archive; the registry has to say the same, and the archive to be that.
    The store is only read. Killed and run again, or run twice, it comes to the same.

    Raises:
        IntegrityError: the deployer, the registry and the archive do not agree, or it is no sound release.
        StoreError: there is no such release, the store cannot be reached, or the disk is full.
    """
    home, archive = home_of(settings.workdir), _archive(settings)
    if _lies_alone(archive) and sha256_file(archive) == sha256:  # what belongs to it was written before it
        return release(settings).manifest
    registry = Registry(open_store(settings.store_uri))
    record = registry.get(version)
    if record.archive_sha256 != sha256:
        raise IntegrityError(
            f"The archive of release {version} in {registry.uri} has the sha256 {record.archive_sha256}, and this pod "
            f"was told to serve {sha256}; deploy again."
        )
    with disk_errors(home):
        _remove_remains(home)
        archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=_STAGING) as temporary:
            staged = Path(temporary) / ARCHIVE_FILE
            registry.fetch(version, staged)
            parts = open_release(staged, Path(temporary) / "release")
            if parts.manifest != record.manifest:
                raise IntegrityError(f"The archive of release {version} in {registry.uri} is another release.")
            _keep_for_probes(parts)
            shutil.rmtree(_release_dir(settings), ignore_errors=True)
            parts.directory.replace(_release_dir(settings))
            staged.replace(archive)
    return parts.manifest


def serve(settings: Settings, *, without_token: bool = False) -> NoReturn:
    """Replace this process by TorchServe with the fetched release.

    Inference and metrics listen on all addresses, management on loopback; no model can be registered. Inference
    wants the token in the file that ``EVERNEAR_TOKEN_FILE`` names, unless ``without_token``.

    Raises:
        SettingsError: no token is given, or one is that cannot be used, or one is ``without_token``.
        ServingError: nothing was fetched, or Java or TorchServe is not installed.
        PortInUseError: a port is in use.
    """
    if not _lies_alone(_archive(settings)):
        raise ServingError(
            f"No release lies in {settings.workdir}, or something beside it; run `evernear pod fetch` before."
        )
    token_file = _token_file(without_token)
    serving = settings.serving
    host = ANYWHERE if serving.host == LOOPBACK else serving.host
    frontend = {
        "log": "console",
        "model": serving.model_name,
        "query_file": _release_dir(settings) / release(settings).smoke_queries()[0][1].file,
    }
    torchserve.become(
        serving.model_copy(update={"host": host, "model_api": False}),
        home_of(settings.workdir),
        frontend | ({"token_file": token_file} if token_file else {}),
        tokens=token_file is not None,
    )


def release(settings: Settings) -> ReleaseParts:
    """What was fetched: manifest, preprocessing and stored queries alone.

    Raises:
        ServingError: nothing was.
    """
    directory = _release_dir(settings)
    manifest = directory / MANIFEST_FILE
    if not manifest.is_file():
        raise ServingError(f"No release lies in {settings.workdir}; run `evernear pod fetch` before.")
    return ReleaseParts(ReleaseManifest.from_json(manifest.read_bytes(), str(manifest)), directory)


def client(settings: Settings) -> Client:
    """A client of this pod's server, with the token of the environment."""
    return Client(Target.remote(settings, LOOPBACK))


_STAGING = ".fetch-"


def _archive(settings: Settings) -> Path:
    return model_store(home_of(settings.workdir)) / f"{settings.serving.model_name}.mar"


def _release_dir(settings: Settings) -> Path:
    return settings.workdir.resolve() / "release"


def _lies_alone(archive: Path) -> bool:
    """Whether the archive is in the model store and nothing else: the server loads all that it finds."""
    return archive.is_file() and list(archive.parent.iterdir()) == [archive]


def _remove_remains(home: Path) -> None:
    """Remove what a killed fetch left, and all of the model store."""
    for left in (*home.glob(f"{_STAGING}*"), *model_store(home).glob("*")):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def _keep_for_probes(parts: ReleaseParts) -> None:
    """Leave of an unpacked release what probes and people look at; TorchServe unpacks all of it for itself."""
    kept = {MANIFEST_FILE, PREPROCESSING_FILE, SMOKE_FILE, *(query.file for _, query in parts.smoke_queries())}
    for file in parts.directory.iterdir():
        if file.name not in kept:
            file.unlink()


def _token_file(without_token: bool) -> Path | None:
    """The file of the token that all replicas share."""
    name = os.environ.get(TOKEN_FILE_VARIABLE)
    if without_token:
        if name:
            raise SettingsError(
                f"{TOKEN_FILE_VARIABLE} names a token, and --without-token wants none; drop one of them."
            )
        return None
    if not name:
        raise SettingsError(
            f"No token: let {TOKEN_FILE_VARIABLE} name a file of the mounted Secret or, behind a NetworkPolicy, "
            "say --without-token."
        )
    file = Path(name).absolute()
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{TOKEN_FILE_VARIABLE}={name} cannot be read: {error}.") from None
    if not TOKEN.fullmatch(text):
        raise SettingsError(
            f"{TOKEN_FILE_VARIABLE}={name} holds no token: 16 or more letters, digits and -._~+/, as "
            "`openssl rand -hex 32` prints them."
        )
    return file
