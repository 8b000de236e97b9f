"""Before a deployment, check the permissions that it needs and the Role in
``deploy/base/deployer.yaml`` grants.

A dry run detects only some missing permissions. The others are used later: to hold the Lease, to
follow and diagnose the rollout, and to restore the previous revision.
"""

from collections.abc import Iterable, Iterator

from evernear.deployment.kubernetes.cluster import RESOURCES, Cluster, Tree
from evernear.deployment.kubernetes.revision import last_known_good_name
from evernear.errors import ClusterError
from evernear.settings import RunSettings

Permission = tuple[tuple[str, ...], str, str]
"""Verbs, a kind (``Pod``, or ``Pod/log`` for a subresource), and a name, or "" for all."""


def check_permissions(cluster: Cluster, objects: Iterable[Tree], settings: RunSettings) -> None:
    """Ask the API server about every permission. The error lists all that are missing."""
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
    yield ("get", "update"), "Lease", name
    yield ("create",), "Lease", ""  # a POST request names no object yet
    yield ("list",), "Pod", ""
    yield ("list",), "Event", ""
    yield ("get",), "Pod/log", ""
    if not (cluster.inside or settings.kubernetes.service_url or settings.kubernetes.token_secret):
        # Without a direct connection, `service_client` connects through the API server.
        yield ("create",), "Service/proxy", f"{name}:http"


def _resource(kind: str) -> str:
    """The resource name that a Role uses for a kind."""
    kind, slash, subresource = kind.partition("/")
    return f"{RESOURCES[kind][1]}{slash}{subresource}"
