"""Addresses of the services that the API server proxies to."""

import random
from typing import Any

from tests.loopback.kubernetes import status
from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.calls import Call
from tests.loopback.kubernetes.endpoints import is_endpoint, selected, target_port
from tests.loopback.kubernetes.kinds import SERVICE
from tests.loopback.kubernetes.kubelet import Node
from tests.loopback.kubernetes.pod_lifecycle import Address

Object = dict[str, Any]


def address(api: Api, node: Node, call: Call) -> Address:
    """Resolve /services/[SCHEME:]NAME[:PORT]/proxy to an address.

    Raises:
        ApiError: 404, the service does not exist; 503, nothing listens there.
    """
    parts = call.name.split(":")
    name, port = (parts[1], parts[2]) if len(parts) == 3 else (*parts, "")[:2]
    service = api.get(SERVICE, call.namespace, name)
    ports = service["spec"].get("ports") or []
    if port.isdigit():
        chosen = next((item for item in ports if item["port"] == int(port)), None)
        if chosen is None:
            raise status.unavailable(f'no service port {port} found for service "{name}"')
    else:
        chosen = next((item for item in ports if item.get("name", "") == port), None)
    pods = [pod for pod in selected(api, service) if is_endpoint(pod)]
    if not pods:
        raise status.unavailable(f'no endpoints available for service "{name}"')
    pod = random.choice(pods)
    number = target_port(chosen, pod) if chosen else None
    if number is None:
        raise status.unavailable(f'no endpoints available for service "{call.name}"')
    return _endpoint(node, pod, number)


def _endpoint(node: Node, pod: Object, port: int) -> Address:
    address = node.address(pod, port)
    if address is None:
        ip = pod.get("status", {}).get("podIP", "")
        raise status.unavailable(f"error trying to reach service: dial tcp {ip}:{port}: connect: connection refused")
    return address
