"""Deploy releases: check the promotion policy, publish, start, verify, and make champion.

`open_target` chooses the target, whose interface `evernear.deployment.target` defines.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from evernear.common.disk import sha256_bytes
from evernear.common.plugins import champion_moved
from evernear.common.store.current import current_store
from evernear.deployment.local import LocalTarget, at_running_server, serve_local
from evernear.deployment.target import Deployment, DeploymentTarget, RegistryTarget
from evernear.errors import ConflictError, IntegrityError, SettingsError, StoreError
from evernear.evaluation.verdict import Verdict
from evernear.index.description import describe_index
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.bake import Breaches
from evernear.release.manifest import VERDICT_FILE
from evernear.release.promotions import Cause, Champion
from evernear.release.registry import Registry
from evernear.settings import RunSettings


def deploy_release(archive: Path, verdict_file: Path, settings: RunSettings, cause: Cause | None = None) -> Deployment:
    """Deploy an archived release to ``settings.target``, and make it the champion.

    Deploying the champion again repeats the verification and changes nothing else, as does every
    other function here that a pipeline run calls again (Argo does after a lost node). ``cause`` is
    recorded in the promotion history. Default: the user and host of this process.

    Raises:
        IntegrityError, ConflictError: the promotion policy rejects the release (see
            `check_candidate`), or a bake rolled it back (`evernear.release.bake`).
        ServingError, ClusterError: the release does not start, or its predictions are wrong. The
            previous release is live.
        StoreError: the registry is unreachable, or the champion changed during the deployment.
        TransientStoreError: the release is live and verified, but may not be recorded as the
            champion.
        BusyError: a different deployment to the same target is in progress.
    """
    store = current_store(settings.store_uri)
    registry = Registry(store)
    target = open_target(settings)
    with target.exclusive(), tempfile.TemporaryDirectory(prefix="evernear-release-") as temporary:
        _made_before(registry, cause)
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
    champion_moved(registry.store, champion and champion.version)
    return deployed


def promote_release(
    version: str, settings: RunSettings, *, force: bool = False, cause: Cause | None = None
) -> Deployment:
    """Make a release live at ``settings.target``, then make it the champion. If it is already,
    `apply` the settings to it.

    ``force`` overrules a hold verdict and requires a reason in ``cause``. A release that a bake
    rolled back may be promoted again.

    Raises:
        IntegrityError: the archive is damaged, or the release has a hold verdict without ``force``.
        SettingsError: ``force`` has no reason, or the target cannot apply settings to the champion.
        EvernearError: for the same reasons as in `deploy_release`.
    """
    if force:
        require_reason(cause.why if cause else "")
    registry = Registry(current_store(settings.store_uri))
    if (made := _made_before(registry, cause)) is not None:
        return _finish(made, settings, registry)
    champion = registry.champion()  # read before the lock is taken, so that one of two concurrent promotions fails
    if champion is not None and champion.version == version:
        return apply(settings, cause=cause)

    def record() -> Champion:
        Breaches(registry.store).overrule(version, cause)
        return registry.set_champion(version, champion, "force" if force else "promote", cause)

    deployed = _roll_out(version, settings, registry, record, lambda parts: check_promotable(parts, force=force))
    champion_moved(registry.store, champion and champion.version)
    return deployed


def require_reason(why: str) -> None:
    """Check the reason of a promotion that overrules the verdict."""
    if not why.strip():
        option = "--why 'the reason' (in the promote pipeline: --set reason='the reason')"
        raise SettingsError(f"Promoting against a verdict needs a reason; add {option}.")


def apply(settings: RunSettings, *, cause: Cause | None = None) -> Deployment:
    """Roll out the champion again with ``settings``, and record this in the promotion history.

    Raises:
        SettingsError: the target cannot apply settings to a live release.
        EvernearError: for the same reasons as in `promote_release`. The previous settings are live.
    """
    registry = Registry(current_store(settings.store_uri))
    if (made := _made_before(registry, cause)) is not None:
        return _finish(made, settings, registry)
    champion = registry.require_champion()
    if settings.target != "kubernetes":
        raise SettingsError(
            f"Release {champion.version} is already the champion, and target {settings.target} applies no settings to "
            "it: only kubernetes does (--set target=kubernetes). TorchServe reads its settings when it starts; run "
            "`evernear stop`, then `evernear serve`."
        )
    return _roll_out(champion.version, settings, registry, lambda: registry.record_settings(champion, cause))


def roll_back(settings: RunSettings, *, cause: Cause | None = None, expected: str | None = None) -> Deployment:
    """Roll back to the previous champion. If ``expected`` is set, it must be the current one.

    Raises:
        ConflictError: the champion is not ``expected``.
        StoreError: no previous champion exists, or it was pruned, or the registry is unreachable.
        EvernearError: for the same reasons as in `promote_release`.
    """
    registry = Registry(current_store(settings.store_uri))
    if (made := _made_before(registry, cause)) is not None:
        return _finish(made, settings, registry)
    champion = registry.champion()
    if champion is None:
        raise StoreError(f"There is nothing to roll back to: no release was promoted in {settings.store_uri} yet.")
    if expected not in (None, champion.version):
        raise ConflictError(f"The champion is now {champion.version}, not {expected}; check it and decide again.")
    target = champion.rollback_target()
    deployed = _roll_out(target, settings, registry, lambda: registry.roll_back(champion, cause))
    champion_moved(registry.store, champion.version)
    return deployed


def _made_before(registry: Registry, cause: Cause | None) -> Champion | None:
    """The champion, if an earlier attempt of the same pipeline run made it.

    Raises:
        ConflictError: another release became the champion since.
    """
    made = registry.pointer.made_by(cause.run) if cause else None
    if made is None:
        return None
    champion = registry.require_champion()
    if champion.version != made.version or champion.pointer.number != made.number:
        raise ConflictError(
            f"This run has already made release {made.version} the champion, and someone has changed the champion since"
            f" ({champion.version} now), so nothing was done; see `evernear registry list --history`."
        )
    return champion


def _finish(champion: Champion, settings: RunSettings, registry: Registry) -> Deployment:
    """What an earlier attempt may not have done: verify the champion, and tell the integrations."""
    deployed = _roll_out(champion.version, settings, registry, lambda: champion)
    champion_moved(registry.store, champion.previous)
    return deployed


def forget_releases(settings: RunSettings) -> None:
    """If TorchServe is running in ``workdir``, unload all releases that the registry lacks."""
    if settings.target == "local" and LocalTarget(settings).is_running():
        serve_local(at_running_server(settings))


def open_target(settings: RunSettings, *, start_server: bool = True) -> DeploymentTarget:
    """The target that ``settings.target`` names.

    If ``start_server`` is not set, the ``local`` target is the running TorchServe server, even if
    its ports differ from the settings, or only the registry if none is running.
    """
    if settings.target == "kubernetes":
        from evernear.deployment.kubernetes import KubernetesTarget

        return KubernetesTarget(settings)
    if settings.target == "local":
        target = LocalTarget(settings)
        if start_server:
            return target
        if target.is_running():
            return LocalTarget(at_running_server(settings))
    return RegistryTarget(settings)


def _roll_out(
    version: str,
    settings: RunSettings,
    registry: Registry,
    record: Callable[[], Champion],
    check: Callable[[ReleaseParts], None] = lambda _: None,
) -> Deployment:
    """Roll out a published release that passes ``check``. ``record`` moves the pointer to it."""
    registry.get(version)
    target = open_target(settings, start_server=False)
    with target.exclusive(), tempfile.TemporaryDirectory(prefix="evernear-release-") as temporary:
        archive = target.fetch(version, Path(temporary))
        parts = open_release(archive, Path(temporary) / "release")
        check(parts)
        with target.rollout(archive, parts) as rollout:
            return Deployment.of(record(), rollout)


def check_candidate(
    archive: Path, verdict_file: Path, champion: Champion | None, out_dir: Path
) -> tuple[ReleaseParts, str | None]:
    """The promotion policy, which rejects in case of doubt: unpack ``archive`` into ``out_dir``,
    and check that it may replace ``champion``.

    Return the release's parts and the verdict's anchor. This is None if the verdict has none, if no
    champion exists, or if the release is already the champion.

    Raises:
        IntegrityError: the archive is damaged, or its verdict is missing, says hold, or was issued
            for a different network, index or champion.
        ConflictError: the release was measured against a different champion or anchor.
    """
    parts = open_release(archive, out_dir)
    manifest = parts.manifest
    verdict = _read_verdict(verdict_file, parts)
    if not verdict.promote:
        raise _hold_error(parts, verdict)
    current = champion.version if champion else None
    if current not in (manifest.parent, manifest.version):
        raise ConflictError(
            f"Release {manifest.version} was measured against {manifest.parent or 'no champion'}, "
            f"but {current or 'none'} is the champion now; run again."
        )
    measured = verdict.anchor
    if measured is None or champion is None or current == manifest.version:
        return parts, None
    if champion.anchor not in (measured.version, measured.former):
        raise ConflictError(
            f"Release {manifest.version} was measured against the anchor {measured.former or measured.version}, but "
            f"{champion.anchor} is the anchor now; run again."
        )
    return parts, measured.version


def check_promotable(parts: ReleaseParts, *, force: bool) -> None:
    """Check that a release may be promoted manually, regardless of the champion that it was
    compared with. ``force`` overrules a hold verdict."""
    verdict = Verdict.from_json(parts.read(VERDICT_FILE), f"{VERDICT_FILE} of release {parts.manifest.version}")
    if not verdict.promote and not force:
        raise IntegrityError(f"{_hold_error(parts, verdict)} To promote it anyway, add --force and --why.")


def _read_verdict(path: Path, parts: ReleaseParts) -> Verdict:
    """Check that the verdict is the archived one and applies to the archive's parts."""
    manifest = parts.manifest
    try:
        data = path.read_bytes()
    except OSError:
        raise IntegrityError(f"{path} cannot be read, so the release has no verdict and is not deployed.") from None
    if sha256_bytes(data) != manifest.verdict_sha256:
        raise IntegrityError(f"{path} is not the verdict that the release was archived with.")
    verdict = Verdict.from_json(data, path)
    measured = (verdict.candidate.network_sha256, verdict.candidate.index_digest)
    if measured != (manifest.network_sha256, describe_index(parts.directory).digest):
        raise IntegrityError(
            f"The verdict {path} is about another network or index than release {manifest.version}'s. Run again."
        )
    if (verdict.champion.name if verdict.champion else None) != manifest.parent:
        raise IntegrityError(
            f"The verdict {path} is against another champion than {manifest.parent or 'none'}, which release "
            f"{manifest.version} names; run again."
        )
    return verdict


def _hold_error(parts: ReleaseParts, verdict: Verdict) -> IntegrityError:
    reasons = " ".join(verdict.reasons)
    return IntegrityError(f"The verdict on release {parts.manifest.version} is hold: {reasons}")
