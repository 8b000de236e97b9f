"""What proved itself last, as it was applied, kept in the cluster: the revision that a failed deployment puts back.

The registry knows which release that was, but not with which image and which settings it came up.
"""

import json
from dataclasses import dataclass
from typing import Any, cast

from evernear.deployment.kubernetes.cluster import Cluster, Tree
from evernear.deployment.kubernetes.objects import RELEASE
from evernear.settings import KubernetesSettings


@dataclass(frozen=True)
class Proven:
    """A revision: its release, and all its objects."""

    version: str
    objects: list[Tree]


def read_proven(cluster: Cluster, settings: KubernetesSettings) -> Proven | None:
    """The revision that proved itself last; None: there was none, or what is told of it cannot be read.

    Raises:
        ClusterError: the API server cannot be asked.
    """
    found = cluster.get("ConfigMap", proven_name(settings))
    try:
        data: dict[str, str] = (found or {})["data"]
        objects: Any = json.loads(data["objects.json"])
        return Proven(data["release"], [cast("Tree", manifest) for manifest in objects])
    except (KeyError, ValueError, TypeError):
        return None


def keep_proven(cluster: Cluster, settings: KubernetesSettings, revision: Proven) -> None:
    """Remember a revision.

    Raises:
        ClusterError: it cannot be written.
    """
    metadata = {
        "name": proven_name(settings),
        "namespace": settings.namespace,
        "labels": {"app.kubernetes.io/part-of": "evernear", "app.kubernetes.io/managed-by": "evernear"},
        "annotations": {RELEASE: revision.version},
    }
    data = {"release": revision.version, "objects.json": json.dumps(revision.objects)}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}, force=True)


def proven_name(settings: KubernetesSettings) -> str:
    """Of the ConfigMap that it is kept in."""
    return f"{settings.name}-proven"
