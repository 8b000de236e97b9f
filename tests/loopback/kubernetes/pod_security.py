"""The Pod Security Standard *restricted*, limited to the fields that these tests use; other levels
are ignored."""

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
    """The violations of a ``pod-security.kubernetes.io/enforce`` level."""
    if level != "restricted":
        return []
    result = [f"host namespaces ({field}=true)" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    if any(not _VOLUMES & volume.keys() for volume in spec.get("volumes") or ()):
        result.append("restricted volume types")
    pod = spec.get("securityContext") or {}
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        faults = _faults(pod | (container.get("securityContext") or {}))
        result += [f'{fault} (container "{container["name"]}")' for fault in faults]
    return result


def _faults(context: Object) -> list[str]:
    """The violations of a container's security context, with the values of its pod."""
    capabilities = context.get("capabilities") or {}
    found = {
        "privileged": context.get("privileged") is True,
        "allowPrivilegeEscalation != false": context.get("allowPrivilegeEscalation") is not False,
        "unrestricted capabilities": "ALL" not in (capabilities.get("drop") or ())
        or bool({*(capabilities.get("add") or ())} - {"NET_BIND_SERVICE"}),
        "runAsNonRoot != true": context.get("runAsNonRoot") is not True,
        "runAsUser=0": context.get("runAsUser") == 0,
        "seccompProfile": (context.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"),
    }
    return [fault for fault, is_found in found.items() if is_found]
