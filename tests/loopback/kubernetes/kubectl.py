"""A minimal kubectl on top of the real client, and sample objects."""

import copy
import json
from typing import Any

from kubernetes.client import ApiClient, ApiException

Object = dict[str, Any]
NAMESPACE = "recognizers"
PATHS = {
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "ReplicaSet": "/apis/apps/v1/namespaces/{}/replicasets",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Event": "/api/v1/namespaces/{}/events",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers",
    "EndpointSlice": "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
}


class Kubectl:
    """One method per verb, on top of the real client."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client

    def call(self, method: str, path: str, body: Any = None, media_type: str = "application/json", **query: Any) -> Any:
        """Send one request; keyword arguments are the query parameters."""
        return self.client.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": media_type},
            body=body,
            response_type="object",
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
        )

    def create(self, subject: Object, **query: Any) -> Object:
        return self.call("POST", PATHS[subject["kind"]].format(NAMESPACE), subject, **query)

    def get(self, kind: str, name: str) -> Object:
        return self.call("GET", f"{PATHS[kind].format(NAMESPACE)}/{name}")

    def list(self, kind: str, **query: Any) -> Object:
        return self.call("GET", PATHS[kind].format(NAMESPACE), **query)

    def replace(self, subject: Object, **query: Any) -> Object:
        return self.call("PUT", self._path(subject), subject, **query)

    def patch(self, subject: Object, media_type: str, **query: Any) -> Object:
        return self.call("PATCH", self._path(subject), subject, media_type, **query)

    def apply(self, subject: Object, manager: str = "me", **query: Any) -> Object:
        return self.patch(subject, "application/apply-patch+yaml", fieldManager=manager, **query)

    def delete(self, kind: str, name: str, **options: Any) -> Object:
        return self.call("DELETE", f"{PATHS[kind].format(NAMESPACE)}/{name}", options or None)

    @staticmethod
    def _path(subject: Object) -> str:
        return f"{PATHS[subject['kind']].format(NAMESPACE)}/{subject['metadata']['name']}"


def config_map(name: str = "settings", **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def deployment(version: str = "1", **spec: Any) -> Object:
    """A Deployment of two pods with ``maxUnavailable: 0``."""
    labels = {"app": "serve"}
    container = {"name": "serve", "image": f"example.com/serve:{version}", "ports": [{"containerPort": 8080}]}
    template = {"metadata": {"labels": labels | {"version": version}}, "spec": {"containers": [container]}}
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    return copy.deepcopy(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "serve"},
            "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "strategy": rolling, "template": template}
            | spec,
        }
    )


def is_rolled_out(subject: Object) -> bool:
    """Whether ``kubectl rollout status`` considers the Deployment rolled out."""
    status, desired = subject["status"], subject["spec"]["replicas"]
    counts = [status.get(name, 0) for name in ("updatedReplicas", "replicas", "availableReplicas")]
    return status.get("observedGeneration") == subject["metadata"]["generation"] and counts == [desired] * 3


def error_of(error: ApiException) -> tuple[int, str]:
    """Return the status code and the message of an API error."""
    return error.status, json.loads(error.body)["message"]
