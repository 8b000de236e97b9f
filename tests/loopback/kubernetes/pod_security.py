"""The Pod Security Standard *restricted*, limited to the fields that these tests use; other levels
are ignored."""

from collections.abc import Callable
from typing import Any

Object = dict[str, Any]
_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(level: str | None, spec: Object) -> list[str]:
    """The violations of a ``pod-security.kubernetes.io/enforce`` level, in the wording of a real
    server."""
    if level != "restricted":
        return []
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    pod = spec.get("securityContext") or {}

    def where(is_bad: Callable[[Object], bool]) -> list[str]:
        return [container["name"] for container in containers if is_bad(container.get("securityContext") or {})]

    def unset(field: str, good: Callable[[Any], bool]) -> list[str]:
        return where(lambda own: not good(own.get(field, pod.get(field))))

    result: list[str] = []
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            result.append(f"host namespaces ({field}=true)")
    if names := where(lambda own: own.get("privileged") is True):
        result.append(f"privileged ({_containers(names)} must not set securityContext.privileged=true)")
    if names := where(lambda own: own.get("allowPrivilegeEscalation") is not False):
        must = "must set securityContext.allowPrivilegeEscalation=false"
        result.append(f"allowPrivilegeEscalation != false ({_containers(names)} {must})")
    if names := where(lambda own: "ALL" not in ((own.get("capabilities") or {}).get("drop") or ())):
        must = 'must set securityContext.capabilities.drop=["ALL"]'
        result.append(f"unrestricted capabilities ({_containers(names)} {must})")
    for container in containers:
        added = set(((container.get("securityContext") or {}).get("capabilities") or {}).get("add") or ())
        if names := sorted(added - {"NET_BIND_SERVICE"}):
            subject, which = _containers([container["name"]]), ", ".join(f'"{name}"' for name in names)
            result.append(
                f"unrestricted capabilities ({subject} must not include {which} in securityContext.capabilities.add)"
            )
    if types := [volume["name"] for volume in spec.get("volumes") or () if not _VOLUMES & volume.keys()]:
        result.append(f"restricted volume types ({_several('volume', types)} uses a restricted volume type)")
    if names := unset("runAsNonRoot", lambda value: value is True):
        must = "must set securityContext.runAsNonRoot=true"
        result.append(f"runAsNonRoot != true (pod or {_containers(names)} {must})")
    if names := unset("runAsUser", lambda value: value != 0):
        result.append(f"runAsUser=0 ({_containers(names)} must not set runAsUser=0)")
    if names := unset("seccompProfile", lambda value: (value or {}).get("type") in ("RuntimeDefault", "Localhost")):
        must = 'must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
        result.append(f"seccompProfile (pod or {_containers(names)} {must})")
    return result


def _containers(names: list[str]) -> str:
    return _several("container", names)


def _several(noun: str, names: list[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"{noun}{'s' if len(names) > 1 else ''} {quoted}"
