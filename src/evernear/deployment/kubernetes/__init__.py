"""The Deployment that serves in a cluster: bring a release up, prove it, or put back what was there.

Read `deploy` first, then `_Site.roll_out`. The objects are in `objects`, what is asked of the API server in `cluster`.
The registry's champion is the truth: whatever a killed deployment left, the next one makes the cluster agree with it.
"""

import contextlib
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from evernear.deployment.kubernetes import objects
from evernear.deployment.kubernetes.apply import apply, remove, require_applicable
from evernear.deployment.kubernetes.cluster import Cluster, Tree
from evernear.deployment.kubernetes.last_known_good import Proven, keep_proven, read_proven
from evernear.deployment.kubernetes.lease import Held, held
from evernear.deployment.kubernetes.objects import ServedRelease, serving_objects
from evernear.deployment.kubernetes.rbac_check import require_rights
from evernear.deployment.kubernetes.rollout import await_rollout, is_complete
from evernear.deployment.kubernetes.service import prove, service_client, service_host
from evernear.deployment.promotion_policy import Deployment, admit, unrecorded
from evernear.errors import ClusterError, EvernearError, StoreError, TransientStoreError
from evernear.release.archive_reader import ARCHIVE_FILE, ReleaseParts, open_release
from evernear.release.registry import Cause, Champion, Registry
from evernear.settings import RunSettings
from evernear.store import open_store


def require_deployable(settings: RunSettings) -> Cluster:
    """Ask the API server whether a deployment could work: rights first, since a refused apply names only one.

    Raises:
        SettingsError: a setting that it needs is missing, such as the image.
        ClusterError: the API server cannot be reached, a right is missing, or it would refuse the objects.
    """
    objects = serving_objects(settings, ServedRelease("preflight", archive_sha256=64 * "0", manifest_sha256=64 * "0"))
    cluster = Cluster.of(settings.kubernetes)
    require_rights(cluster, objects, settings)
    require_applicable(cluster, objects, force=settings.kubernetes.force_conflicts)
    return cluster


def deploy(archive: Path, verdict_file: Path, settings: RunSettings, cause: Cause | None = None) -> Deployment:
    """Roll a release out in the cluster of ``settings.kubernetes``.

    What serves goes on until the new pods are ready. The release becomes the champion when the Service answered its
    stored queries with it. If anything fails before that, the revision before it is put back, and the error says so.
    A store that cannot be reached after that changes nothing in the cluster: the release stays, and the error says so.

    Raises:
        IntegrityError, ConflictError: it may not serve, see `evernear.deployment.promotion_policy.admit`.
        ClusterError: the API server cannot be reached, it refuses, or the rollout does not come up.
        ServingError: the Service does not answer as the release did when it was archived.
        SettingsError: a setting that it needs is missing.
        StoreError: the registry cannot be reached, or another release became champion meanwhile.
        TransientStoreError: the release is live and proved, and may not be recorded as the champion.
        BusyError: another deployment into the namespace is under way.
    """
    registry = Registry(open_store(settings.store_uri))
    with _site(settings, registry) as site, tempfile.TemporaryDirectory(prefix="evernear-release-") as temporary:
        champion = registry.champion()
        parts = admit(archive, verdict_file, champion, Path(temporary) / "release")
        version = parts.manifest.version
        registry.publish(archive)  # pods fetch it from there

        def commit() -> Champion:
            if champion is not None and champion.version == version:  # the same step again
                return champion
            return registry.set_champion(version, champion, cause=cause)

        return site.roll_out(parts, commit)


def move(
    version: str,
    settings: RunSettings,
    registry: Registry,
    vet: Callable[[ReleaseParts], None],
    commit: Callable[[], Champion],
) -> Deployment:
    """Roll a release of the registry out, as `deploy` does.

    ``vet`` may refuse it, ``commit`` moves the champion's pointer to it. Raises as `deploy`.
    """
    with _site(settings, registry) as site, tempfile.TemporaryDirectory(prefix="evernear-release-") as temporary:
        archive = Path(temporary) / ARCHIVE_FILE
        registry.fetch(version, archive)
        parts = open_release(archive, Path(temporary) / "release")
        vet(parts)
        return site.roll_out(parts, commit)


def render(version: str | None, settings: RunSettings) -> list[Tree]:
    """The objects that a deployment of a published release applies; None: of the champion.

    Raises:
        StoreError: there is no such release, or none was promoted yet.
        SettingsError: a setting that they need is missing.
    """
    registry = Registry(open_store(settings.store_uri))
    if version is None:
        champion = registry.champion()
        if champion is None:
            raise StoreError(f"No release has been promoted in {registry.uri} yet; name one with --release.")
        version = champion.version
    return serving_objects(settings, ServedRelease.of(registry.get(version)))


def status(settings: RunSettings) -> dict[str, Any]:
    """What serves in the cluster and what should, for people and programs.

    ``server`` is ``up``, ``rolling out`` (or stuck in that), or ``down`` (there is no Deployment, or no pod is ready).

    Raises:
        ClusterError: the API server cannot be asked.
        StoreError: the registry cannot be reached.
    """
    cluster = Cluster.of(settings.kubernetes)
    champion = Registry(open_store(settings.store_uri)).champion()
    found = cluster.get("Deployment", settings.kubernetes.name)
    told: dict[str, Any] = {
        "server": "down",
        "url": None,
        "release": None,
        "ready_pods": 0,
        "image": None,
        "champion": champion.version if champion else None,
        "store": settings.store_uri,
    }
    if found is None:
        return told
    ready = (found.get("status") or {}).get("readyReplicas", 0)
    return told | {
        "server": ("up" if is_complete(found) else "rolling out") if ready else "down",
        "url": _url(settings),
        "release": found["metadata"].get("annotations", {}).get(objects.RELEASE),
        "ready_pods": ready,
        "image": found["spec"]["template"]["spec"]["containers"][0]["image"],
    }


class _Site:
    """One Deployment, for as long as this process holds its Lease."""

    def __init__(self, settings: RunSettings, registry: Registry, cluster: Cluster, lease: Held) -> None:
        self._settings = settings
        self._registry = registry
        self._cluster = cluster
        self._lease = lease

    def roll_out(self, parts: ReleaseParts, commit: Callable[[], Champion]) -> Deployment:
        """Bring a published release up, prove it and ``commit`` to it; or put back what was there.

        Once it is proved, only a store that refuses puts the old release back, not one that cannot be reached.
        """
        version = parts.manifest.version
        wanted = self._revision(version)
        require_applicable(self._cluster, wanted.objects, force=self._settings.kubernetes.force_conflicts)
        client = service_client(self._cluster, self._settings)
        self._lease.require()
        try:
            apply(self._cluster, wanted.objects, force=self._settings.kubernetes.force_conflicts)
            await_rollout(self._cluster, self._settings.kubernetes)
            queries = prove(client, self._settings.kubernetes, parts)
            self._lease.require()
        except EvernearError as error:
            raise self._undone(wanted, error) from None
        except BaseException:
            self._put_back(wanted)
            raise
        try:
            champion = commit()
        except TransientStoreError as error:
            raise unrecorded(version, error) from None
        except EvernearError as error:
            raise self._undone(wanted, error) from None
        with contextlib.suppress(ClusterError):  # what is remembered is then older than the champion, and not used
            keep_proven(self._cluster, self._settings.kubernetes, wanted)
        return Deployment(
            version=champion.version, previous=champion.previous, url=_url(self._settings), smoke_queries=queries
        )

    def _undone(self, failed: Proven, error: EvernearError) -> EvernearError:
        """Restore what served before; the error that says so."""
        sentence = f"Release {failed.version} was not deployed: {str(error).rstrip('.')}. {self._put_back(failed)}"
        return type(error)(sentence)

    def _put_back(self, failed: Proven) -> str:
        """Restore what served before, or remove what was made where nothing did; tells what was done."""
        try:
            self._lease.require()
            before = self._before()
            if before is None:
                remove(self._cluster, failed.objects)
                return "Nothing served before it, so all that was made for it was removed."
            apply(self._cluster, before.objects, force=self._settings.kubernetes.force_conflicts)
            await_rollout(self._cluster, self._settings.kubernetes)
        except EvernearError as error:
            return f"What served before was not put back: {error}"
        return f"Release {before.version} was put back and serves."

    def _before(self) -> Proven | None:
        """The revision that the champion proved itself with, or, where that is not known, it with today's settings."""
        proven = read_proven(self._cluster, self._settings.kubernetes)
        champion = self._registry.champion()
        if champion is None or (proven is not None and proven.version == champion.version):
            return proven
        return self._revision(champion.version)

    def _revision(self, version: str) -> Proven:
        release = ServedRelease.of(self._registry.get(version))
        return Proven(version, serving_objects(self._settings, release))


@contextlib.contextmanager
def _site(settings: RunSettings, registry: Registry) -> Generator[_Site]:
    """The Deployment of ``settings``, for one deployment at a time."""
    cluster = Cluster.of(settings.kubernetes)
    with held(cluster, settings.kubernetes.name, settings.kubernetes.lease_s) as lease:
        yield _Site(settings, registry, cluster, lease)


def _url(settings: RunSettings) -> str:
    """Where the pods of the cluster ask."""
    return (
        f"http://{service_host(settings)}:{settings.serving.inference_port}/predictions/{settings.serving.model_name}"
    )
