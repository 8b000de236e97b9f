"""The discovery documents: the server's version and its kinds."""

from typing import Any

from loopback.kubernetes import status
from loopback.kubernetes.kinds import KINDS

Object = dict[str, Any]


def document(path: str, version: str) -> Object:
    """Return the discovery document at ``path``."""
    groups = sorted({(kind.group, kind.version) for kind in KINDS if kind.group})
    known: dict[str, Object] = {
        "/version": {
            "major": version.partition(".")[0],
            "minor": version.partition(".")[2],
            "gitVersion": f"v{version}.0",
            "gitCommit": "",
            "gitTreeState": "clean",
            "buildDate": "",
            "goVersion": "",
            "compiler": "gc",
            "platform": "linux/amd64",
        },
        "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*group) for group in groups]},
        "/api/v1": _resources("", "v1"),
    }
    for group, group_version in groups:
        known[f"/apis/{group}"] = {"kind": "APIGroup", "apiVersion": "v1"} | _group(group, group_version)
        known[f"/apis/{group}/{group_version}"] = _resources(group, group_version)
    if path.rstrip("/") not in known:
        raise status.no_such_path()
    return known[path.rstrip("/")]


def _group(group: str, version: str) -> Object:
    entry = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [entry], "preferredVersion": entry}


def _resources(group: str, version: str) -> Object:
    resources: list[Object] = []
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    for kind in KINDS:
        if (kind.group, kind.version) != (group, version):
            continue
        entry = {"name": kind.plural, "singularName": kind.name.lower(), "namespaced": kind.namespaced}
        resources.append(entry | {"kind": kind.name, "verbs": verbs})
        for subresource in ("status",) * kind.has_status + kind.subresources:
            resources.append(
                entry | {"name": f"{kind.plural}/{subresource}", "kind": kind.name, "verbs": ["get", "patch", "update"]}
            )
    group_version = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}
