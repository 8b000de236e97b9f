"""The subresource ``scale`` of a Deployment, which autoscalers write."""

from typing import Any

from loopback.kubernetes.api import Api
from loopback.kubernetes.calls import Call
from loopback.kubernetes.fields import Manager
from loopback.kubernetes.kinds import DEPLOYMENT

Object = dict[str, Any]


def scale_of(deployment: Object) -> Object:
    """Return the ``Scale`` of a Deployment."""
    metadata, status_ = deployment["metadata"], deployment.get("status", {})
    identity = {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")}
    labels = deployment["spec"]["selector"].get("matchLabels", {})
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": identity,
        "spec": {"replicas": deployment["spec"]["replicas"]},
        "status": {
            "replicas": status_.get("replicas", 0),
            "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
        },
    }


def write_scale(api: Api, call: Call, scale: Object, manager: Manager, *, dry_run: bool) -> Object:
    """Replace or patch the scale. Raises the errors of `Api.replace`."""
    with api.store.changed:
        live = api.get(DEPLOYMENT, call.namespace, call.name)
        resource_version = scale.get("metadata", {}).get("resourceVersion")
        live["spec"]["replicas"] = scale.get("spec", {}).get("replicas", live["spec"]["replicas"])
        if resource_version:
            live["metadata"]["resourceVersion"] = resource_version
        manager = manager._replace(operation="Update", subresource="scale")
        return scale_of(api.replace(DEPLOYMENT, live, call.namespace, call.name, manager=manager, dry_run=dry_run))
