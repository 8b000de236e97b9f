"""A revision: the objects that serve one release, applied as a whole and saved once verified.

The registry records which release is the champion, but not the image and the settings with which it
was live. These are stored in the last known good revision, a ConfigMap in the cluster, which is
restored if a deployment fails.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from evernear.deployment.kubernetes.cluster import COMMON_LABELS, RELEASE, RESOURCES, Cluster, Tree
from evernear.errors import ClusterError
from evernear.settings import KubernetesSettings, RunSettings
from evernear.settings.sources import SERVICE_URL_VARIABLE


@dataclass(frozen=True)
class Revision:
    """A release and all its Kubernetes objects, in the order in which they are applied."""

    version: str
    objects: list[Tree]


def apply_revision(cluster: Cluster, objects: Iterable[Tree], *, dry_run: bool = False) -> None:
    """Apply objects in order. The call is idempotent. If ``dry_run`` is set, the API server only
    validates the objects. Conflicts are as in `Cluster.apply`."""
    for manifest in objects:
        cluster.apply(manifest, dry_run=dry_run)


def remove(cluster: Cluster, objects: Iterable[Tree]) -> None:
    """Delete objects in reverse order."""
    for manifest in reversed(list(objects)):
        cluster.delete(manifest["kind"], manifest["metadata"]["name"])


def load_last_known_good(cluster: Cluster, settings: KubernetesSettings) -> Revision | None:
    """The revision that was verified last, or None if it is missing or unreadable."""
    stored = cluster.get("ConfigMap", last_known_good_name(settings))
    try:
        data: dict[str, str] = (stored or {})["data"]
        objects: Any = json.loads(data["objects.json"])
        return Revision(data["release"], [cast("Tree", manifest) for manifest in objects])
    except (KeyError, ValueError, TypeError):
        return None


def save_last_known_good(cluster: Cluster, settings: KubernetesSettings, revision: Revision) -> None:
    metadata = {
        "name": last_known_good_name(settings),
        "namespace": settings.namespace,
        "labels": COMMON_LABELS,
        "annotations": {RELEASE: revision.version},
    }
    data = {"release": revision.version, "objects.json": json.dumps(revision.objects)}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}, force=True)


def last_known_good_name(settings: KubernetesSettings) -> str:
    """The ConfigMap's name, to which ``deploy/base/deployer.yaml`` grants access."""
    return f"{settings.name}-proven"


Permission = tuple[tuple[str, ...], str, str]
"""Verbs, a kind (``Pod``, or ``Pod/log`` for a subresource), and a name, or "" for all."""


def check_permissions(cluster: Cluster, objects: Iterable[Tree], settings: RunSettings) -> None:
    """Ask the API server about every permission that a deployment needs and the Role in
    ``deploy/base/deployer.yaml`` grants. The error lists all that are missing.

    A dry run detects only some of them. The others are used later: to hold the Lease, to follow and
    diagnose the rollout, and to restore the previous revision.
    """
    missing: list[str] = []
    for verbs, kind, name in _needed(cluster, objects, settings):
        denied = [verb for verb in verbs if not cluster.is_allowed(verb, kind, name)]
        if denied:
            missing.append(f"{', '.join(denied)} {_resource(kind)} {name}".rstrip())
    if missing:
        raise ClusterError(
            f"The credentials lack permissions in namespace {cluster.namespace}: {'; '.join(missing)}. "
            "docs/kubernetes.md has the Role that is needed."
        )


def _needed(cluster: Cluster, objects: Iterable[Tree], settings: RunSettings) -> Iterator[Permission]:
    name = settings.kubernetes.name
    for manifest in objects:
        yield ("create", "patch", "delete"), manifest["kind"], manifest["metadata"]["name"]
    yield ("get", "create", "patch"), "ConfigMap", last_known_good_name(settings.kubernetes)
    yield ("get", "watch"), "Deployment", name
    yield ("get",), "PodTemplate", name
    yield ("get", "update"), "Lease", name
    yield ("create",), "Lease", ""  # a POST request names no object yet
    yield ("list",), "Pod", ""
    yield ("list",), "Event", ""
    yield ("get",), "Pod/log", ""
    if not (cluster.inside or os.environ.get(SERVICE_URL_VARIABLE) or settings.kubernetes.token_secret):
        # Without a direct connection, `service_client` connects through the API server.
        yield ("create",), "Service/proxy", f"{name}:http"


def _resource(kind: str) -> str:
    """The resource name that a Role uses for a kind."""
    kind, slash, subresource = kind.partition("/")
    return f"{RESOURCES[kind][1]}{slash}{subresource}"
