"""Bring a release up, prove that it answers, or leave the old one in place: on this machine or in a cluster."""

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evernear.deployment import local
from evernear.deployment.promotion_policy import Deployment, publish, readmit
from evernear.errors import ConflictError, SettingsError, StoreError
from evernear.release.archive_reader import ARCHIVE_FILE, ReleaseParts, open_release
from evernear.release.registry import Cause, Champion, Registry
from evernear.serving.endpoints import home_of
from evernear.serving.torchserve import require_startable
from evernear.settings import RunSettings
from evernear.store import open_store


def require_deployable(settings: RunSettings) -> None:
    """Refuse what a deployment would refuse in the end, hours later: no image, no rights, a port that is taken.

    Raises:
        ServingError: the local TorchServe could not start.
        SettingsError, ClusterError: as `evernear.deployment.kubernetes.require_deployable`.
    """
    if settings.target == "local":
        require_startable(settings.serving, home_of(settings.workdir))
    if settings.target == "kubernetes":
        cluster().require_deployable(settings)


def deploy(release_dir: Path, verdict_file: Path, settings: RunSettings, cause: Cause | None = None) -> Deployment:
    """Make the release that the archive step left in ``release_dir`` live at ``settings.target``.

    ``cause`` (default: this process) goes into the champion's history.

    Raises:
        IntegrityError, ConflictError: it may not serve, see `evernear.deployment.promotion_policy.admit`.
        ServingError: the server or the release does not come up; what served before still does.
        ClusterError, BusyError, SettingsError: as `evernear.deployment.kubernetes.deploy`.
        StoreError: the registry cannot be reached.
    """
    archive = release_dir / ARCHIVE_FILE
    if settings.target == "local":
        return local.deploy(archive, verdict_file, settings, cause)
    if settings.target == "kubernetes":
        return cluster().deploy(archive, verdict_file, settings, cause)
    return publish(archive, verdict_file, open_store(settings.store_uri), cause)


def promote(version: str, settings: RunSettings, *, force: bool = False, cause: Cause | None = None) -> Deployment:
    """Make a release of the registry the champion, because a person says so.

    The TorchServe of ``settings.workdir`` follows if ``settings.target`` is local and it is up, proved as in
    `deploy`; else the archive is checked and the pointer moves alone. ``force`` overrules a verdict that
    holds and needs a reason in ``cause``, which goes into the history.

    Raises:
        IntegrityError: the archive is damaged, or its verdict holds it and nothing forces it.
        ServingError: the release does not come up or fails its smoke test; what served before still does.
        ClusterError, BusyError: as `evernear.deployment.kubernetes.deploy`.
        ConflictError: the champion changed meanwhile.
        StoreError: there is no such release, or the registry cannot be reached.
        SettingsError: ``force`` without a reason.
    """
    if force and not (cause and cause.why.strip()):
        raise SettingsError("Promoting against a verdict has to say why; add --why 'the reason'.")
    registry = Registry(open_store(settings.store_uri))
    champion = registry.champion()  # before any lock: of two promotions at once, one loses
    if champion is not None and champion.version == version:
        raise StoreError(f"Release {version} is the champion already.")
    vet: Callable[[ReleaseParts], None] = lambda parts: readmit(parts, force)  # noqa: E731
    how = "force" if force else "promote"
    return _move(version, settings, registry, vet, lambda: registry.set_champion(version, champion, how, cause))


def rollback(settings: RunSettings, *, cause: Cause | None = None, expected: str | None = None) -> Deployment:
    """Let serve what served before the champion; at once, where it is still registered.

    ``expected`` is the champion that a person wants to be rid of, where one has been named. ``cause`` as in `promote`.

    Raises:
        ConflictError: another release than ``expected`` is the champion.
        StoreError: nothing served before it, what did was pruned, or the registry cannot be reached.
        ServingError, ClusterError, BusyError, IntegrityError, ConflictError: as `promote`.
    """
    registry = Registry(open_store(settings.store_uri))
    champion = registry.champion()
    if champion is None:
        raise StoreError(f"There is nothing to roll back to: no release was promoted in {settings.store_uri} yet.")
    if expected not in (None, champion.version):
        raise ConflictError(f"{champion.version} is the champion now, not {expected}; look at it and decide again.")
    target = champion.rollback_target()
    vet: Callable[[ReleaseParts], None] = lambda _: None  # noqa: E731 - it served before
    return _move(target, settings, registry, vet, lambda: registry.roll_back(champion, cause))


def cluster() -> Any:
    """The module `evernear.deployment.kubernetes`, for which not every installation has the client.

    Raises:
        SettingsError: this one has not.
    """
    try:
        return importlib.import_module("evernear.deployment.kubernetes")
    except ModuleNotFoundError as error:
        if error.name != "kubernetes":
            raise
        raise SettingsError(
            "Target kubernetes needs the Kubernetes client; install evernear with its extra: evernear[pipeline]."
        ) from None


def _move(
    version: str,
    settings: RunSettings,
    registry: Registry,
    vet: Callable[[ReleaseParts], None],
    commit: Callable[[], Champion],
) -> Deployment:
    registry.get(version)
    if settings.target == "local" and local.is_up(settings):
        return local.move(version, settings, registry, vet, commit)
    if settings.target == "kubernetes":
        return cluster().move(version, settings, registry, vet, commit)
    with tempfile.TemporaryDirectory(prefix="evernear-release-") as temporary:
        archive = Path(temporary) / ARCHIVE_FILE
        registry.fetch(version, archive)
        vet(open_release(archive, Path(temporary) / "release"))
    champion = commit()
    return Deployment(version=champion.version, previous=champion.previous)
