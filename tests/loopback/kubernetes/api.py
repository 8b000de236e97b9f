"""The verbs create, get, list, replace, patch, apply and delete, without HTTP and authorization."""

import random
import uuid
from datetime import UTC, datetime
from typing import Any

from tests.loopback.kubernetes import defaults, pod_security, selectors, status, validation, webhooks
from tests.loopback.kubernetes.fields import Fields, Manager, Merge, UndeclaredFieldError
from tests.loopback.kubernetes.kinds import (
    DEPLOYMENT,
    NAMESPACE,
    POD,
    SERVICE,
    SERVICE_ACCOUNT,
    TRAIN_JOB,
    TRAINING_RUNTIME,
    Kind,
)
from tests.loopback.kubernetes.schemas import Schema, Schemas, schemas
from tests.loopback.kubernetes.status import Cause
from tests.loopback.kubernetes.store import Store, deep_copy

Object = dict[str, Any]
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # the alphabet that a real server uses for generated names
_ANONYMOUS = Manager("unknown", "Update", "")


class Api:
    """The objects of one server and the operations on them."""

    def __init__(self, version: str) -> None:
        self.schemas = schemas(version)
        self.store = Store()
        self._owners: dict[str, dict[Manager, Fields]] = {}  # by UID; no client reads ``managedFields``
        self._addresses = iter(range(1, 250))
        for name in ("default", "kube-system"):
            self.create(NAMESPACE, {"metadata": {"name": name}})

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return one object.

        Raises:
            ApiError: 404.
        """
        subject = self.store.get(kind, namespace, name)
        if subject is None:
            raise status.not_found(kind, name)
        return subject

    def list_objects(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        label_selector: str = "",
        field_selector: str = "",
    ) -> Object:
        """Return a list object.

        Raises:
            ApiError: 400 for an invalid selector.
        """
        chosen_by = (selectors.labels(label_selector), selectors.fields(kind, field_selector))
        with self.store.changed:
            found = self.store.all(kind, namespace)
            subjects = [subject for subject in found if all(chosen(subject) for chosen in chosen_by)]
            metadata: Object = {"resourceVersion": str(self.store.version)}
        items = [{k: v for k, v in item.items() if k not in ("kind", "apiVersion")} for item in subjects]
        return {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}

    def create(
        self,
        kind: Kind,
        subject: Object,
        namespace: str = "",
        *,
        manager: Manager | None = None,
        trusted: bool = False,
    ) -> Object:
        """Store a new object. ``trusted`` objects, from the server's controllers, skip validation
        but not admission.

        Raises:
            ApiError: 400 and 422 for an invalid object, 403 if admission rejects it,
                404 for an unknown namespace, 409 if the name already exists.
        """
        subject = self._incoming(kind, subject, namespace)
        metadata = subject["metadata"]
        if "name" not in metadata:
            metadata["name"] = metadata["generateName"][:58] + "".join(random.choices(_SUFFIX, k=5))
        with self.store.changed:
            self._require_namespace(kind, metadata)
            if self.store.get(kind, metadata.get("namespace", ""), metadata["name"]):
                raise status.already_exists(kind, metadata["name"])
            return self._write(kind, None, subject, manager, trusted=trusted)

    def replace(
        self, kind: Kind, subject: Object, namespace: str, name: str, *, manager: Manager = _ANONYMOUS
    ) -> Object:
        """Replace the object with the same name.

        Raises:
            ApiError: as `create`; 409 if it has been modified since the caller read it.
        """
        subject = self._incoming(kind, subject, namespace)
        subject["metadata"].setdefault("name", name)
        with self.store.changed:
            live = self.get(kind, namespace, name)
            if not subject["metadata"].get("resourceVersion") and not kind.unconditional_update:
                cause = Cause("metadata.resourceVersion", "Invalid value: 0: must be specified for an update")
                raise status.invalid(kind, name, [cause])
            _check_preconditions(kind, live, subject["metadata"])
            return self._write(kind, live, subject, manager)

    def patch(self, kind: Kind, patch: Object, namespace: str, name: str, *, manager: Manager = _ANONYMOUS) -> Object:
        """Apply a strategic merge patch.

        Raises:
            ApiError: as `replace`.
        """
        with self.store.changed:
            live = self.get(kind, namespace, name)
            new = _strategic(self.schemas, self.schemas.of(kind), live, patch)
            _check_preconditions(kind, live, new["metadata"])
            new = self._incoming(kind, new, namespace)
            return self._write(kind, live, new, manager)

    def apply(
        self,
        kind: Kind,
        config: Object,
        namespace: str,
        name: str,
        *,
        manager: Manager,
        force: bool = False,
        dry_run: bool = False,
    ) -> tuple[Object, bool]:
        """Apply ``config`` on the server side; also return whether the object is new.

        Raises:
            ApiError: as `create`; 409 for a field that another manager owns, unless
                ``force``; 500, as on a real server, for an object that does not match
                the schema.
        """
        config = _without_nulls(config)
        metadata = config.setdefault("metadata", {})
        metadata.setdefault("name", name)
        if kind.namespaced:
            metadata.setdefault("namespace", namespace)
        merge = Merge(self.schemas, self.schemas.of(kind))
        with self.store.changed:
            live = self.store.get(kind, namespace, name)
            if live is None:
                self._require_namespace(kind, metadata)
            else:
                _check_preconditions(kind, live, metadata)
            base = deep_copy(live) if live else {"metadata": {"name": name}}
            if kind.has_status:
                config.pop("status", None)
            try:
                new, owners = merge.apply(base, config, self._owners_of(live), manager, force=force)
            except UndeclaredFieldError as error:
                subject = f"{namespace}/{name}; {kind.group}/{kind.version}, Kind={kind.name}"
                raise status.ApiError(500, f"failed to create typed patch object ({subject}): {error}") from None
            applied = self._write(kind, live, new, None, dry_run=dry_run)
            if not dry_run:
                self._owners[applied["metadata"]["uid"]] = owners
            return applied, live is None

    def delete(self, kind: Kind, namespace: str, name: str) -> Object:
        """Delete an object. Return a ``Status`` if it is gone, or the object if its deletion takes
        time.

        Raises:
            ApiError: 404.
        """
        with self.store.changed:
            live = self.get(kind, namespace, name)
            if kind is not POD:
                return {"kind": "Status", "status": "Success", "metadata": self.store.remove(kind, live)["metadata"]}
            live["metadata"].setdefault("deletionTimestamp", now())
            return self.store.put(kind, live)

    def finish(self, kind: Kind, subject: Object) -> None:
        """Remove an object that was marked for deletion; ignore one that is already gone."""
        with self.store.changed:
            metadata = subject["metadata"]
            if self.store.get(kind, metadata.get("namespace", ""), metadata["name"]):
                self.store.remove(kind, subject)

    def edit(self, kind: Kind, subject: Object) -> Object:
        """Store a write of a controller of the server, which is trusted and owns no fields."""
        with self.store.changed:
            metadata = subject["metadata"]
            return self._put(kind, self.get(kind, metadata.get("namespace", ""), metadata["name"]), subject)

    def _incoming(self, kind: Kind, subject: Object, namespace: str) -> Object:
        subject = _without_nulls(subject)
        subject = {"apiVersion": kind.api_version, "kind": kind.name} | subject
        metadata = subject.setdefault("metadata", {})
        if kind.namespaced:
            metadata.setdefault("namespace", namespace)
        return subject

    def _require_namespace(self, kind: Kind, metadata: Object) -> None:
        if not kind.namespaced:
            return
        name = metadata["namespace"]
        if self.store.get(NAMESPACE, "", name) is None:
            raise status.not_found(NAMESPACE, name)

    def _write(
        self,
        kind: Kind,
        live: Object | None,
        new: Object,
        manager: Manager | None,
        *,
        dry_run: bool = False,
        trusted: bool = False,
    ) -> Object:
        """Fill in defaults, validate and store; ``manager`` then owns what it changed."""
        new = _preserve_server_fields(kind, live, deep_copy(new))
        if not trusted:
            self.schemas.check(kind, new)
        defaults.fill(kind, new)
        self._allocate(kind, live, new)
        if not trusted:
            causes = validation.faults(kind, new, live)
            if causes:
                raise status.invalid(kind, new["metadata"]["name"], causes)
        self._admit(kind, live, new)
        if manager is not None:
            owners = Merge(self.schemas, self.schemas.of(kind)).update(live or {}, new, self._owners_of(live), manager)
            self._owners[new["metadata"]["uid"]] = owners
        return new if dry_run else self._put(kind, live, new)

    def _owners_of(self, live: Object | None) -> dict[Manager, Fields]:
        return self._owners.get(live["metadata"]["uid"], {}) if live else {}

    def _put(self, kind: Kind, live: Object | None, new: Object) -> Object:
        if live == new:
            return live
        if live is not None and kind.counts_generations and _versioned(kind, live) != _versioned(kind, new):
            new["metadata"]["generation"] = live["metadata"]["generation"] + 1
        return self.store.put(kind, new)

    def _allocate(self, kind: Kind, live: Object | None, new: Object) -> None:
        """Allocate a cluster IP for a Service."""
        if kind is SERVICE and new["spec"].get("type") != "ExternalName" and not new["spec"].get("clusterIP"):
            have = (live or {}).get("spec", {}).get("clusterIP")
            new["spec"]["clusterIP"] = have or f"10.96.0.{next(self._addresses)}"
            new["spec"]["clusterIPs"] = [new["spec"]["clusterIP"]]

    def _admit(self, kind: Kind, live: Object | None, new: Object) -> None:
        """Run the admission plugins: webhooks, service accounts and Pod Security."""
        if live is not None:
            return
        self._call_webhooks(kind, new)
        if kind is not POD:
            return
        metadata = new["metadata"]
        account = new["spec"]["serviceAccountName"]
        if self.store.get(SERVICE_ACCOUNT, metadata["namespace"], account) is None:
            where = f"{metadata['namespace']}/{account}"
            reason = f'error looking up service account {where}: serviceaccount "{account}" not found'
            raise status.forbidden(kind, metadata["name"], reason)
        namespace = self.get(NAMESPACE, "", metadata["namespace"])
        level = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce")
        if violations := pod_security.violations(level, new["spec"]):
            reason = f'violates PodSecurity "{level}:latest": {", ".join(violations)}'
            raise status.forbidden(kind, metadata["name"], reason)

    def _call_webhooks(self, kind: Kind, new: Object) -> None:
        webhook, reasons = "", []
        if kind is TRAINING_RUNTIME:
            webhook, reasons = webhooks.TRAINING_RUNTIME, webhooks.training_runtime(new)
        elif kind is TRAIN_JOB:
            namespace, reference = new["metadata"]["namespace"], new["spec"]["runtimeRef"]
            runtime = self.store.get(TRAINING_RUNTIME, namespace, reference["name"])
            webhook, reasons = webhooks.TRAIN_JOB, webhooks.train_job(new, runtime)
        if reasons:
            raise status.ApiError(403, webhooks.denial(webhook, reasons))


def now() -> str:
    """Return the current time in the format of object metadata, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _preserve_server_fields(kind: Kind, live: Object | None, new: Object) -> Object:
    """Restore the fields that clients cannot set and those that this endpoint does not write."""
    metadata = new["metadata"]
    if live is None:
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if kind.counts_generations:
            metadata["generation"] = 1
        if kind.has_status:
            new.pop("status", None)
        return new
    current = live["metadata"]
    if kind.has_status:
        new = {field: value for field, value in new.items() if field != "status"}
        new |= {"status": deep_copy(live["status"])} if "status" in live else {}
    for field in ("uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp"):
        metadata.pop(field, None)
        metadata |= {field: current[field]} if field in current else {}
    return new


def _strategic(schemas: Schemas, schema: Schema, live: Object, patch: Object) -> Object:
    """Apply a strategic merge patch that changes no list by key and has no directive."""
    merged = dict(live)
    for name, value in patch.items():
        child = schemas.field(schema, name) or {}
        if name.startswith("$") or child.get("x-kubernetes-patch-strategy", "").startswith("merge"):
            raise NotImplementedError(f"a strategic merge patch of {name}")
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            merged[name] = _strategic(schemas, child, merged.get(name) or {}, value)
        else:
            merged[name] = value
    return merged


def _versioned(kind: Kind, subject: Object) -> Any:
    """The fields whose change increments the generation; a Deployment includes its annotations."""
    rest = {field: value for field, value in subject.items() if field not in ("metadata", "status")}
    return (rest, subject["metadata"].get("annotations") if kind is DEPLOYMENT else None)


def _check_preconditions(kind: Kind, live: Object, metadata: Object) -> None:
    """Check the resourceVersion that the writer sent, if any."""
    current = live["metadata"]
    if metadata.get("resourceVersion") and metadata["resourceVersion"] != current["resourceVersion"]:
        raise status.conflict(kind, current["name"])


def _without_nulls(value: Any) -> Any:
    """Drop null fields, as decoding JSON into a Go struct does."""
    if isinstance(value, dict):
        return {name: _without_nulls(child) for name, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value
