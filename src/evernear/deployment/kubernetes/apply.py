"""Bring objects into the cluster, or out of it: all of them or, where one is refused, none."""

from collections.abc import Iterable

from evernear.deployment.kubernetes.cluster import Cluster, Tree


def require_applicable(cluster: Cluster, objects: Iterable[Tree], *, force: bool = False) -> None:
    """Ask the API server what it would say to `apply`; nothing changes.

    Raises:
        ObjectConflict: somebody else set a field to something else.
        ClusterError: an object is refused (no permission, no quota, no such field), or there is no answer.
    """
    for manifest in objects:
        cluster.apply(manifest, force=force, dry_run=True)


def apply(cluster: Cluster, objects: Iterable[Tree], *, force: bool = False) -> None:
    """Apply objects in their order; to do so again changes nothing. Raises as `require_applicable`."""
    for manifest in objects:
        cluster.apply(manifest, force=force)


def remove(cluster: Cluster, objects: Iterable[Tree]) -> None:
    """Delete objects, what was applied last first.

    Raises:
        ClusterError: one cannot be deleted, or there is no answer.
    """
    for manifest in reversed(list(objects)):
        cluster.delete(manifest["kind"], manifest["metadata"]["name"])
