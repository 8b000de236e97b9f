"""The endpoints of a Service."""

from typing import Any

from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.controller_base import Controller, is_ready, reference
from tests.loopback.kubernetes.kinds import ENDPOINT_SLICE, POD, SERVICE

Object = dict[str, Any]


class Endpoints(Controller):
    """The EndpointSlice controller."""

    def __init__(self, api: Api) -> None:
        super().__init__(api, "endpoint-slice-controller")

    def step(self) -> bool:
        """Update the slices; return whether anything was written."""
        changed = False
        for service in self.api.store.all(SERVICE):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            if not service["spec"].get("selector"):
                continue
            pods = [pod for pod in selected(self.api, service) if pod.get("status", {}).get("podIP")]
            endpoint_slice = next(
                (
                    endpoint_slice
                    for endpoint_slice in self.api.store.all(ENDPOINT_SLICE, namespace)
                    if endpoint_slice["metadata"]["labels"].get("kubernetes.io/service-name") == name
                ),
                None,
            )
            content = {
                "addressType": "IPv4",
                "endpoints": [_endpoint(pod) for pod in pods],
                "ports": _endpoint_ports(service, pods),
            }
            if endpoint_slice is None:
                metadata = {
                    "generateName": f"{name}-",
                    "labels": {
                        "kubernetes.io/service-name": name,
                        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                    },
                    "ownerReferences": [reference(SERVICE, service)],
                }
                self.create(ENDPOINT_SLICE, {"metadata": metadata} | content, namespace)
                changed = True
            elif any(endpoint_slice.get(field) != value for field, value in content.items()):
                self.edit(ENDPOINT_SLICE, endpoint_slice | content)
                changed = True
        return changed


def selected(api: Api, service: Object) -> list[Object]:
    """The pods that a Service selects."""
    labels = service["spec"].get("selector") or {}
    return [
        pod
        for pod in api.store.all(POD, service["metadata"]["namespace"])
        if labels and labels.items() <= (pod["metadata"].get("labels") or {}).items()
    ]


def is_endpoint(pod: Object) -> bool:
    """Whether a Service sends requests to the pod."""
    return is_ready(pod) and not pod["metadata"].get("deletionTimestamp")


def target_port(port: Object, pod: Object) -> int | None:
    """Resolve the target port of a Service port to a container port number."""
    target = port["targetPort"]
    if isinstance(target, int):
        return target
    named = (p for c in pod["spec"]["containers"] for p in c.get("ports") or () if p.get("name") == target)
    return next((p["containerPort"] for p in named), None)


def _endpoint(pod: Object) -> Object:
    metadata, ready = pod["metadata"], is_ready(pod)
    ending = "deletionTimestamp" in metadata
    target = {"kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]}
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": ready and not ending, "serving": ready, "terminating": ending},
        "nodeName": pod["spec"]["nodeName"],
        "targetRef": target,
    }


def _endpoint_ports(service: Object, pods: list[Object]) -> list[Object]:
    ports = []
    for port in service["spec"]["ports"]:
        number = target_port(port, pods[0]) if pods else None
        if number:
            ports.append({"name": port.get("name", ""), "port": number, "protocol": port["protocol"]})
    return ports
