"""The pods behind a Service, to which the API server proxies requests."""

import random
from typing import Any

from tests.loopback.kubernetes import status
from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.calls import Call
from tests.loopback.kubernetes.controller_base import is_ready
from tests.loopback.kubernetes.kinds import POD, SERVICE
from tests.loopback.kubernetes.kubelet import Node
from tests.loopback.kubernetes.pod_lifecycle import Address

Object = dict[str, Any]


def address(api: Api, node: Node, call: Call) -> Address:
    """Resolve /services/NAME:PORT/proxy to an address.

    Raises:
        ApiError: 404, the service does not exist; 503, nothing listens there.
    """
    name, _, port_name = call.name.partition(":")
    service = api.get(SERVICE, call.namespace, name)
    port = next((item for item in service["spec"]["ports"] if item["name"] == port_name), None)
    labels = service["spec"]["selector"]
    pods = [
        pod
        for pod in api.store.all(POD, call.namespace)
        if labels.items() <= (pod["metadata"].get("labels") or {}).items()
        if is_ready(pod) and not pod["metadata"].get("deletionTimestamp")
    ]
    if port is None or not pods:
        raise status.unavailable(f'no endpoints available for service "{name}"')
    pod = random.choice(pods)
    number = _target_port(port["targetPort"], pod)
    if found := node.address(pod, number):
        return found
    ip = pod["status"]["podIP"]
    raise status.unavailable(f"error trying to reach service: dial tcp {ip}:{number}: connect: connection refused")


def _target_port(target: int | str, pod: Object) -> int:
    """Resolve the target port of a Service to the number of a container's port."""
    if isinstance(target, int):
        return target
    ports = (port for container in pod["spec"]["containers"] for port in container.get("ports") or ())
    return next(port["containerPort"] for port in ports if port.get("name") == target)
