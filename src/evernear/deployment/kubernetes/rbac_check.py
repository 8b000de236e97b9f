"""What a deployment asks of the API server, as rights; deploy/base/deployer.yaml is the Role that gives them.

A dry run finds some of them missing. The others are first used in the middle of a deployment: to hold the Lease, to
follow the rollout, to tell why it stalls, to put back what was there.
"""

from collections.abc import Iterable, Iterator

from evernear.deployment.kubernetes.cluster import RESOURCES, Cluster, Tree
from evernear.deployment.kubernetes.last_known_good import proven_name
from evernear.errors import ClusterError
from evernear.settings import RunSettings

Right = tuple[tuple[str, ...], str, str]
"""Verbs, a kind (with ``/`` and a subresource, where it is one), and the object's name; without one, of all objects."""


def require_rights(cluster: Cluster, objects: Iterable[Tree], settings: RunSettings) -> None:
    """Ask the API server whether these credentials may all that a deployment of ``objects`` does.

    Raises:
        ClusterError: something is missing, each named; or there is no answer.
    """
    missing: list[str] = []
    for verbs, kind, name in _needed(cluster, objects, settings):
        refused = [verb for verb in verbs if not cluster.may(verb, kind, name)]
        if refused:
            missing.append(f"{', '.join(refused)} {_resource(kind)} {name}".rstrip())
    if missing:
        raise ClusterError(
            f"The credentials may not, in namespace {cluster.namespace}: {'; '.join(missing)}. "
            "docs/kubernetes.md has the Role that is needed."
        )


def _needed(cluster: Cluster, objects: Iterable[Tree], settings: RunSettings) -> Iterator[Right]:
    name = settings.kubernetes.name
    for manifest in objects:
        yield ("create", "patch", "delete"), manifest["kind"], manifest["metadata"]["name"]
    yield ("get", "create", "patch"), "ConfigMap", proven_name(settings.kubernetes)
    yield ("get", "watch"), "Deployment", name
    yield ("get", "update"), "Lease", name
    yield ("create",), "Lease", ""  # by POST, which has no name yet
    yield ("list",), "Pod", ""
    yield ("list",), "Event", ""
    yield ("get",), "Pod/log", ""
    served_without = settings.kubernetes.service_url or settings.kubernetes.token_secret
    if not (cluster.inside or served_without):  # as `service_client` has it
        yield ("create",), "Service/proxy", f"{name}:http"


def _resource(kind: str) -> str:
    """As a Role names it."""
    kind, slash, subresource = kind.partition("/")
    return f"{RESOURCES[kind][1]}{slash}{subresource}"
