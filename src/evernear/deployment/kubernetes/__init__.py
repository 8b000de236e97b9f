"""Deploy to Kubernetes: roll out and verify a release, or restore the previous one.

Read `KubernetesTarget.rollout` first. `objects` builds the objects to apply, and `cluster` is the
client of the API server. The registry's champion is authoritative: after a killed deployment, the
next one makes the cluster serve it again.
"""

import contextlib
from collections.abc import Callable, Generator
from functools import cached_property
from pathlib import Path
from typing import Any

from evernear.common.lease import Lease
from evernear.common.store import open_store
from evernear.deployment.kubernetes.cluster import RELEASE, Cluster, Tree
from evernear.deployment.kubernetes.lease import LEASE_S, KubernetesRecord
from evernear.deployment.kubernetes.objects import serving_objects
from evernear.deployment.kubernetes.pod_template import ServedRelease
from evernear.deployment.kubernetes.revision import (
    Revision,
    apply_revision,
    check_permissions,
    load_last_known_good,
    remove,
    save_last_known_good,
)
from evernear.deployment.kubernetes.rollout import await_rollout, is_complete
from evernear.deployment.kubernetes.service import service_client, service_url, verify
from evernear.deployment.target import VerifiedRollout, unrecorded_error
from evernear.errors import ClusterError, EvernearError, StoreError, TransientStoreError
from evernear.release.archive_reader import ARCHIVE_FILE, ReleaseParts
from evernear.release.registry import Registry
from evernear.settings import RunSettings


class KubernetesTarget:
    """The Deployment of ``settings.kubernetes``. Every method may raise `ClusterError`."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._kubernetes = settings.kubernetes
        self._registry = Registry(open_store(settings.store_uri))

    @cached_property
    def cluster(self) -> Cluster:
        """The Kubernetes namespace, accessed with the credentials of this process."""
        return Cluster.of(self._kubernetes.namespace)

    @cached_property
    def _lease(self) -> Lease:
        return Lease(KubernetesRecord(self.cluster, self._kubernetes.name, LEASE_S))

    def require_deployable(self) -> None:
        """Check all permissions (a dry run names only one), then validate with a dry run."""
        preflight = ServedRelease("preflight", archive_sha256=64 * "0", manifest_sha256=64 * "0")
        own = serving_objects(self._settings, preflight)  # refuses settings before it asks the cluster
        service_client(self.cluster, self._settings)  # refuses a token that cannot reach the Service
        check_permissions(self.cluster, own, self._settings)
        apply_revision(self.cluster, self._objects(preflight), dry_run=True)

    def exclusive(self) -> Lease:
        """The Lease of the Deployment. A `BusyError` names its holder."""
        return self._lease

    def fetch(self, version: str, directory: Path) -> Path:
        self._registry.fetch(version, directory / ARCHIVE_FILE)
        return directory / ARCHIVE_FILE

    @contextlib.contextmanager
    def rollout(self, archive: Path, parts: ReleaseParts) -> Generator[VerifiedRollout]:
        """Roll out a release, and verify it through its Service. After the body completes, save it
        as the last known good revision.

        The previous pods serve requests until the new ones are ready. If the rollout or the body
        fails, the previous revision is restored, and the error message says so. A
        `TransientStoreError` of the body leaves the release live.
        """
        revision = self._revision(parts.manifest.version)
        apply_revision(self.cluster, revision.objects, dry_run=True)
        client = service_client(self.cluster, self._settings)
        self._lease.require()
        try:
            apply_revision(self.cluster, revision.objects)
            await_rollout(self.cluster, self._kubernetes)
            queries = verify(client, self._kubernetes, parts)
            self._lease.require()
            yield VerifiedRollout(service_url(self._settings), queries)
        except TransientStoreError as error:
            raise unrecorded_error(revision.version, error) from None
        except EvernearError as error:
            reason = f"Release {revision.version} was not deployed: {str(error).rstrip('.')}."
            raise type(error)(f"{reason} {self._restore_previous(revision)}") from None
        except BaseException:
            self._restore_previous(revision)
            raise
        with contextlib.suppress(ClusterError):  # the saved revision is then older than the champion, and ignored
            save_last_known_good(self.cluster, self._kubernetes, revision)

    def render(self, version: str | None, warn: Callable[[str], None]) -> list[Tree]:
        """The objects to apply when a published release (default: the champion) is deployed.

        Without credentials for a cluster, they lack its PodTemplate's additions. ``warn`` says so.
        """
        if version is None:
            champion = self._registry.champion()
            if champion is None:
                raise StoreError(f"No release has been promoted in {self._registry.uri} yet; name one with --release.")
            version = champion.version
        release = ServedRelease.of(self._registry.get(version))
        try:
            _ = self.cluster
        except ClusterError as error:
            warn(f"Rendered without the additions of a PodTemplate {self._kubernetes.name}: {error}")
            return serving_objects(self._settings, release)
        return self._objects(release)

    def status(self) -> dict[str, Any]:
        """The state of the Deployment and of the registry.

        ``server`` is ``up``, ``rolling out`` (which includes a stuck rollout), or ``down`` (the
        Deployment does not exist, or no pod is ready).
        """
        deployment = self.cluster.get("Deployment", self._kubernetes.name)
        champion = self._registry.champion()
        state: dict[str, Any] = {
            "server": "down",
            "url": None,
            "release": None,
            "ready_pods": 0,
            "image": None,
            "champion": champion.version if champion else None,
            "store": self._settings.store_uri,
        }
        if deployment is None:
            return state
        ready = (deployment.get("status") or {}).get("readyReplicas", 0)
        return state | {
            "server": ("up" if is_complete(deployment) else "rolling out") if ready else "down",
            "url": service_url(self._settings),
            "release": deployment["metadata"].get("annotations", {}).get(RELEASE),
            "ready_pods": ready,
            "image": deployment["spec"]["template"]["spec"]["containers"][0]["image"],
        }

    def _restore_previous(self, failed: Revision) -> str:
        """Restore the previous revision, or remove the objects of a failed first release. Returns a
        sentence that says which."""
        try:
            self._lease.require()
            previous = self._previous()
            if previous is None:
                remove(self.cluster, failed.objects)
                return "No release was live before it, so its objects were removed."
            apply_revision(self.cluster, previous.objects)
            await_rollout(self.cluster, self._kubernetes)
        except EvernearError as error:
            return f"The previous release was not restored: {error}"
        return f"Release {previous.version} was restored and is live."

    def _previous(self) -> Revision | None:
        """The last known good revision if it is the champion's, else one with current settings."""
        saved = load_last_known_good(self.cluster, self._kubernetes)
        champion = self._registry.champion()
        if champion is None or (saved is not None and saved.version == champion.version):
            return saved
        return self._revision(champion.version)

    def _revision(self, version: str) -> Revision:
        return Revision(version, self._objects(ServedRelease.of(self._registry.get(version))))

    def _objects(self, release: ServedRelease) -> list[Tree]:
        owners = self.cluster.get("PodTemplate", self._kubernetes.name)
        return serving_objects(self._settings, release, owners)
