"""The user of a container, as the kubelet verifies it before it creates the container
(``verifyRunAsNonRoot`` in ``pkg/kubelet/kuberuntime/security_context.go``)."""

import copy
import re
from typing import Any

Object = dict[str, Any]
OURS = re.compile(r"(?:.*/)?evernear-(?:train|serve|prep|kserve|triggers)(?:[:@].*)?|replaced-by-the-step")
"""Images whose Dockerfile names a user. All other images run as root, as the images of Katib's
collectors and of several service meshes do."""


def config_error(spec: Object, container: Object) -> str | None:
    """Why the kubelet does not create a container of a pod (``CreateContainerConfigError``), or
    None."""
    pod, own = spec.get("securityContext") or {}, container.get("securityContext") or {}

    def effective(field: str) -> Any:
        return own.get(field, pod.get(field))

    if not effective("runAsNonRoot"):
        return None
    user = effective("runAsUser")
    if user == 0:
        return "container's runAsUser breaks non-root policy"
    if user is None and not OURS.fullmatch(container.get("image", "evernear-train")):
        return "container has runAsNonRoot and image will run as root"
    return None


def config_errors(spec: Object) -> dict[str, str]:
    """The `config_error` of each container that has one, by the container's name."""
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    errors = {container["name"]: config_error(spec, container) for container in containers}
    return {name: error for name, error in errors.items() if error}


def injected(spec: Object, name: str, image: str) -> Object:
    """A copy of a pod's spec with a container that a webhook adds without a securityContext, as
    Katib's ``inject_webhook.go`` does."""
    changed = copy.deepcopy(spec)
    changed["containers"].append({"name": name, "image": image})
    return changed
