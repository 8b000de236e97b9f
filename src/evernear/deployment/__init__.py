"""Deploy releases: check the promotion policy, publish the release, start and verify it, and make
it the champion.

`open_target` chooses the target. `evernear.deployment.target` defines the interface of deployment
targets.
"""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evernear.common.plugins import champion_moved
from evernear.common.store import open_store
from evernear.deployment.local import LocalTarget, at_running_server, serve_local
from evernear.deployment.promotion_policy import check_candidate, check_promotable
from evernear.deployment.target import Deployment, DeploymentTarget, RegistryTarget
from evernear.errors import ConflictError, SettingsError, StoreError
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.bake import Breaches
from evernear.release.promotions import Cause
from evernear.release.registry import Registry
from evernear.settings import RunSettings


def deploy_release(archive: Path, verdict_file: Path, settings: RunSettings, cause: Cause | None = None) -> Deployment:
    """Deploy an archived release to ``settings.target``, and make the release the champion.

    Deploying the champion again repeats the verification and changes nothing else. ``cause`` is
    recorded in the promotion history. By default, the cause is the user and host of this process.

    Raises:
        IntegrityError, ConflictError: the promotion policy rejects the release (see
            `promotion_policy.check_candidate`), or a bake rolled the release back
            (`evernear.release.bake`).
        ServingError, ClusterError: the release does not start, or its predictions are
            wrong. The previous release is live.
        StoreError: the registry is unreachable, or the champion changed during the
            deployment.
        TransientStoreError: the release is live and verified, but may not be recorded
            as the champion.
        BusyError: a different deployment to the same target is in progress.
        SettingsError: a setting that the target needs is missing.
    """
    store = open_store(settings.store_uri)
    registry = Registry(store)
    target = open_target(settings)
    with target.exclusive(), tempfile.TemporaryDirectory(prefix="evernear-release-") as temporary:
        champion = registry.champion()
        parts, anchor = check_candidate(archive, verdict_file, champion, Path(temporary) / "release")
        Breaches(store).require_none(parts.manifest)
        registry.publish(archive)
        with target.rollout(archive, parts) as rollout:
            version = parts.manifest.version
            current = champion
            if current is None or current.version != version:
                current = registry.set_champion(version, champion, cause=cause, anchor=anchor)
            deployed = Deployment.of(current, rollout)
    champion_moved(registry, champion)
    return deployed


def promote_release(
    version: str, settings: RunSettings, *, force: bool = False, cause: Cause | None = None
) -> Deployment:
    """Promote a release manually: make it live at ``settings.target``, then make it the champion.
    If it is the champion, `apply` the settings to it.

    ``force`` overrules a hold verdict and requires a reason in ``cause``. A release that a bake
    rolled back may be promoted again.

    Raises:
        StoreError: the release does not exist, or the registry is unreachable.
        IntegrityError: the archive is damaged, or the release has a hold verdict and
            ``force`` is not set.
        SettingsError: ``force`` is set without a reason, or the release is the
            champion and the target cannot apply settings to it.
        ServingError, ClusterError, BusyError, ConflictError: for the same reasons as in
            `deploy_release`.
    """
    if force and not (cause and cause.why.strip()):
        raise SettingsError("Promoting against a verdict needs a reason; add --why 'the reason'.")
    registry = Registry(open_store(settings.store_uri))
    champion = registry.champion()  # read before the lock is taken, so that one of two concurrent promotions fails
    if champion is not None and champion.version == version:
        return apply(settings, cause=cause)
    with _fetch_release(version, settings, registry) as (target, archive, parts):
        check_promotable(parts, force=force)
        with target.rollout(archive, parts) as rollout:
            Breaches(open_store(settings.store_uri)).overrule(version, cause)
            promoted = registry.set_champion(version, champion, "force" if force else "promote", cause)
            deployed = Deployment.of(promoted, rollout)
    champion_moved(registry, champion)
    return deployed


def apply(settings: RunSettings, *, cause: Cause | None = None) -> Deployment:
    """Roll out the champion again with ``settings``, and record the rollout in the promotion
    history. The release stays the champion.

    Raises:
        SettingsError: the target cannot apply settings to a live release.
        StoreError: no release has been promoted yet, or the registry is unreachable.
        ServingError, ClusterError, BusyError, ConflictError, IntegrityError: for the
            same reasons as in `promote_release`. The previous settings are live.
    """
    registry = Registry(open_store(settings.store_uri))
    champion = registry.champion()
    if champion is None:
        raise StoreError(registry.explain_no_champion())
    if settings.target != "kubernetes":
        raise SettingsError(
            f"Release {champion.version} is already the champion, and target {settings.target} applies no settings to "
            "it: only kubernetes does (--set target=kubernetes). TorchServe reads its settings when it starts; run "
            "`evernear stop`, then `evernear serve`."
        )
    with (
        _fetch_release(champion.version, settings, registry) as (target, archive, parts),
        target.rollout(archive, parts) as rollout,
    ):
        return Deployment.of(registry.record_settings(champion, cause), rollout)


def roll_back(settings: RunSettings, *, cause: Cause | None = None, expected: str | None = None) -> Deployment:
    """Roll back to the previous champion. If ``expected`` is set, fail unless ``expected`` is the
    current champion.

    Raises:
        ConflictError: the champion is not ``expected``.
        StoreError: no previous champion exists, the previous champion was pruned, or
            the registry is unreachable.
        ServingError, ClusterError, BusyError, IntegrityError: for the same reasons as
            in `promote_release`.
    """
    registry = Registry(open_store(settings.store_uri))
    champion = registry.champion()
    if champion is None:
        raise StoreError(f"There is nothing to roll back to: no release was promoted in {settings.store_uri} yet.")
    if expected not in (None, champion.version):
        raise ConflictError(f"The champion is now {champion.version}, not {expected}; check it and decide again.")
    with (
        _fetch_release(champion.rollback_target(), settings, registry) as (target, archive, parts),
        target.rollout(archive, parts) as rollout,
    ):
        deployed = Deployment.of(registry.roll_back(champion, cause), rollout)
    champion_moved(registry, champion)
    return deployed


def forget_releases(settings: RunSettings) -> None:
    """If the TorchServe server of ``settings.workdir`` is running, unload all releases that are no
    longer in the registry.

    Raises:
        StoreError, ServingError, BusyError: for the same reasons as in
            `evernear.deployment.local.serve_local`.
    """
    if settings.target == "local" and LocalTarget(settings).is_running():
        serve_local(at_running_server(settings))


def open_target(settings: RunSettings, *, start_server: bool = True) -> DeploymentTarget:
    """The target that ``settings.target`` names.

    If ``start_server`` is not set, the ``local`` target is the running TorchServe server, even if
    its ports differ from the settings. If no TorchServe server is running, the target consists of
    only the registry.

    Raises:
        SettingsError: the target is ``kubernetes`` and the Kubernetes client is not
            installed.
    """
    if settings.target == "kubernetes":
        try:
            from evernear.deployment.kubernetes import KubernetesTarget
        except ModuleNotFoundError as error:
            if error.name != "kubernetes":
                raise
            raise SettingsError(
                "Target kubernetes needs the Kubernetes client; install evernear with its extra: evernear[pipeline]."
            ) from None
        return KubernetesTarget(settings)
    if settings.target == "local":
        target = LocalTarget(settings)
        if start_server:
            return target
        if target.is_running():
            return LocalTarget(at_running_server(settings))
    return RegistryTarget(settings)


@contextmanager
def _fetch_release(
    version: str, settings: RunSettings, registry: Registry
) -> Generator[tuple[DeploymentTarget, Path, ReleaseParts]]:
    """Lock the target. Yield the target, the archive of a published release, and the verified parts
    of this release."""
    registry.get(version)
    target = open_target(settings, start_server=False)
    with target.exclusive(), tempfile.TemporaryDirectory(prefix="evernear-release-") as temporary:
        archive = target.fetch(version, Path(temporary))
        yield target, archive, open_release(archive, Path(temporary) / "release")
