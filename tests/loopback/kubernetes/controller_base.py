"""The base class of controllers: dependents, statuses and events."""

from typing import Any

from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.kinds import Kind
from tests.loopback.kubernetes.kubelet import record
from tests.loopback.kubernetes.pod_lifecycle import Event

Object = dict[str, Any]


class Controller:
    """Base class of a controller."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def owned(self, kind: Kind, owner: Object) -> list[Object]:
        """Return the dependents of an object."""
        return [
            item
            for item in self.api.store.all(kind, owner["metadata"]["namespace"])
            if any(ref["uid"] == owner["metadata"]["uid"] for ref in item["metadata"].get("ownerReferences") or ())
        ]

    def create(self, kind: Kind, subject: Object, namespace: str) -> Object:
        """Create an object. Raises the errors of `Api.create`."""
        return self.api.create(kind, subject, namespace, trusted=True)

    def set_status(self, kind: Kind, subject: Object, status: Object) -> bool:
        """Update a status; return whether it changed."""
        metadata = subject["metadata"]
        live = self.api.store.get(kind, metadata.get("namespace", ""), metadata["name"])
        if live is None or live.get("status") == status:
            return False
        self.api.edit(kind, live | {"status": status})
        return True

    def warn(self, kind: Kind, subject: Object, reason: str, message: str) -> None:
        """Record a warning, as ``kubectl describe`` shows it."""
        record(self.api, kind, subject, Event(reason, message, "Warning"))


def is_ready(pod: Object) -> bool:
    """Whether a pod's ``Ready`` condition is true."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def reference(kind: Kind, owner: Object) -> Object:
    """Return the owner reference to ``owner``."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
