"""What the verbs do: create, get, list, replace, patch, apply, delete; without HTTP and without asking who may."""

import base64
import json
import random
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from loopback.kubernetes import defaults, patches, pod_security, selectors, status, validation
from loopback.kubernetes.fields import Fields, Manager, Merge, Undeclared, decode, encode
from loopback.kubernetes.kinds import DEPLOYMENT, NAMESPACE, POD, SERVICE, SERVICE_ACCOUNT, Kind
from loopback.kubernetes.schemas import schemas
from loopback.kubernetes.status import Cause
from loopback.kubernetes.store import Store, copied

Object = dict[str, Any]
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # letters of generated names, as a real server draws them
_ANONYMOUS = Manager("unknown", "Update", "")


class Api:
    """The objects of one server and what may be done to them."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.schemas = schemas(version)
        self.store = Store()
        self._addresses, self._node_ports = iter(range(1, 250)), iter(range(30000, 32768))
        for name in ("default", "kube-system"):
            self.create(NAMESPACE, {"metadata": {"name": name}})

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """One object.

        Raises:
            ApiError: 404.
        """
        found = self.store.get(kind, namespace, name)
        if found is None:
            raise status.not_found(kind, name)
        return found

    def listing(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        label_selector: str = "",
        field_selector: str = "",
        limit: int = 0,
        continue_: str = "",
    ) -> Object:
        """A list object; with ``limit``, a part of it and the token for the next part.

        Raises:
            ApiError: 400 for a selector that cannot be read, 410 for a token that is too old.
        """
        chosen_by = (selectors.labels(label_selector), selectors.fields(kind, field_selector))
        with self.store.changed:
            after = _read_token(continue_, self.store.oldest) if continue_ else None
            found = [
                subject
                for subject in self.store.all(kind, namespace)
                if all(chosen(subject) for chosen in chosen_by) and (after is None or _place(subject) > after)
            ]
            metadata: Object = {"resourceVersion": str(self.store.version)}
            if limit and len(found) > limit:
                metadata["continue"] = _token(self.store.version, _place(found[limit - 1]))
                if not (label_selector or field_selector):
                    metadata["remainingItemCount"] = len(found) - limit
                found = found[:limit]
        items = [{k: v for k, v in item.items() if k not in ("kind", "apiVersion")} for item in found]
        return {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}

    def create(
        self,
        kind: Kind,
        subject: Object,
        namespace: str = "",
        *,
        manager: Manager = _ANONYMOUS,
        dry_run: bool = False,
        trusted: bool = False,
    ) -> Object:
        """Keep a new object; ``trusted``: it comes from one of the server's own controllers, and is only admitted.

        Raises:
            ApiError: 400 and 422 for a faulty object, 403 for one that the namespace does not admit, 404 for a
                namespace that is not there, 409 for a name that is taken.
        """
        subject = self._incoming(kind, subject, namespace)
        metadata = subject["metadata"]
        if metadata.get("resourceVersion"):
            raise status.bad_request("resourceVersion should not be set on objects to be created")
        if not metadata.get("name"):
            prefix = metadata.get("generateName")
            if not prefix:
                cause = Cause("metadata.name", "Required value: name or generateName is required", "FieldValueRequired")
                raise status.invalid(kind.name, kind.group, "", [cause])
            metadata["name"] = prefix[:58] + "".join(random.choices(_SUFFIX, k=5))
        with self.store.changed:
            self._require_namespace(kind, metadata)
            if self.store.get(kind, metadata.get("namespace", ""), metadata["name"]):
                raise status.already_exists(kind, metadata["name"])
            return self._write(kind, None, subject, manager, dry_run=dry_run, trusted=trusted)

    def replace(
        self,
        kind: Kind,
        subject: Object,
        namespace: str,
        name: str,
        *,
        subresource: str = "",
        manager: Manager = _ANONYMOUS,
        dry_run: bool = False,
    ) -> Object:
        """Put an object in the place of the one of its name.

        Raises:
            ApiError: as `create`; 409 if it has been modified since the caller read it.
        """
        subject = self._incoming(kind, subject, namespace)
        if subject["metadata"].setdefault("name", name) != name:
            given = subject["metadata"]["name"]
            raise status.bad_request(f"the name of the object ({given}) does not match the name on the URL ({name})")
        with self.store.changed:
            live = self.get(kind, namespace, name)
            if not subject["metadata"].get("resourceVersion") and not kind.unconditional_update:
                cause = Cause("metadata.resourceVersion", "Invalid value: 0: must be specified for an update")
                raise status.invalid(kind.name, kind.group, name, [cause])
            _require_same(kind, live, subject["metadata"])
            return self._write(kind, live, subject, manager, subresource=subresource, dry_run=dry_run)

    def patch(
        self,
        kind: Kind,
        patch: Object,
        namespace: str,
        name: str,
        *,
        strategic: bool,
        subresource: str = "",
        manager: Manager = _ANONYMOUS,
        dry_run: bool = False,
    ) -> Object:
        """A merge patch (RFC 7386), or a strategic one.

        Raises:
            ApiError: as `replace`.
        """
        with self.store.changed:
            live = self.get(kind, namespace, name)
            if strategic:
                new = patches.strategic(self.schemas, self.schemas.of(kind), live, patch)
            else:
                new = patches.merge(live, patch)
            _require_same(kind, live, new["metadata"])
            new = self._incoming(kind, new, namespace)
            return self._write(kind, live, new, manager, subresource=subresource, dry_run=dry_run)

    def apply(
        self,
        kind: Kind,
        config: Object,
        namespace: str,
        name: str,
        *,
        manager: Manager,
        force: bool = False,
        subresource: str = "",
        dry_run: bool = False,
    ) -> tuple[Object, bool]:
        """Server-side apply; also says whether the object is new.

        Raises:
            ApiError: as `create`; 409 for a field that another manager owns, unless ``force``; 500, as a real
                server has it, for an object that does not fit the schema.
        """
        config = _without_nulls(config)
        if config.get("apiVersion") != kind.api_version or config.get("kind") != kind.name:
            have = f"{config.get('apiVersion')}, Kind={config.get('kind')}"
            raise status.bad_request(f"Incorrect version specified in apply patch. Specified patch version: {have}")
        metadata = config.setdefault("metadata", {})
        if metadata.get("managedFields") is not None:
            raise status.bad_request("metadata.managedFields must be nil")
        if metadata.setdefault("name", name) != name:
            raise status.bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
            )
        if kind.namespaced and metadata.setdefault("namespace", namespace) != namespace:
            raise _wrong_namespace(metadata["namespace"], namespace)
        merge = Merge(self.schemas, self.schemas.of(kind))
        with self.store.changed:
            live = self.store.get(kind, namespace, name)
            if live is None:
                self._require_namespace(kind, metadata)
                if metadata.get("resourceVersion"):
                    raise status.conflict(kind, name)
            else:
                _require_same(kind, live, metadata)
            base = copied(live) if live else {"metadata": {"name": name}}
            managers = _managers(base["metadata"].pop("managedFields", []))
            config = _writable(kind, config, subresource)
            try:
                new, managers = merge.apply(base, config, managers, manager, force=force)
            except Undeclared as error:
                subject = f"{namespace}/{name}; {kind.group}/{kind.version}, Kind={kind.name}"
                raise status.ApiError(500, "", f"failed to create typed patch object ({subject}): {error}") from None
            new["metadata"]["managedFields"] = self._entries(live, managers)
            return self._write(kind, live, new, None, subresource=subresource, dry_run=dry_run), live is None

    def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        propagation: str = "",
        preconditions: Object | None = None,
        grace_period_s: int | None = None,
        dry_run: bool = False,
    ) -> Object:
        """Remove an object: a ``Status`` where it is gone, the object where its end takes a while.

        Raises:
            ApiError: 404; 409 for preconditions that do not hold.
        """
        with self.store.changed:
            live = self.get(kind, namespace, name)
            for field, held in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
                wanted = (preconditions or {}).get(field)
                if wanted and wanted != live["metadata"][field]:
                    have = live["metadata"][field]
                    why = f"Precondition failed: {held} in precondition: {wanted}, {held} in object meta: {have}"
                    raise status.conflict(kind, name, why)
            metadata = live["metadata"]
            if propagation == "Foreground" and "foregroundDeletion" not in metadata.get("finalizers", []):
                metadata.setdefault("finalizers", []).append("foregroundDeletion")
            if propagation == "Orphan":
                self._orphan(metadata["uid"])
            graceful = kind is POD and grace_period_s != 0
            if not (graceful or kind is NAMESPACE or metadata.get("finalizers")):
                return status.success(kind, live if dry_run else self.store.remove(kind, live))
            if metadata.get("deletionTimestamp") is None:
                metadata["deletionTimestamp"] = now()
                if graceful:
                    default = live["spec"].get("terminationGracePeriodSeconds", 30)
                    metadata["deletionGracePeriodSeconds"] = default if grace_period_s is None else grace_period_s
                if kind is NAMESPACE:
                    live["status"]["phase"] = "Terminating"
                live = live if dry_run else self.store.put(kind, live)
            return live

    def finish(self, kind: Kind, subject: Object) -> None:
        """Remove an object whose end was waited for; no error if it is gone."""
        with self.store.changed:
            metadata = subject["metadata"]
            if self.store.get(kind, metadata.get("namespace", ""), metadata["name"]):
                self.store.remove(kind, subject)

    def edit(self, kind: Kind, subject: Object, *, manager: str, subresource: str = "") -> Object:
        """A write of one of the server's own controllers, which need no validation."""
        with self.store.changed:
            metadata = subject["metadata"]
            live = self.get(kind, metadata.get("namespace", ""), metadata["name"])
            who = Manager(manager, "Update", kind.api_version, subresource)
            return self._write(kind, live, subject, who, subresource=subresource, trusted=True)

    def _incoming(self, kind: Kind, subject: Object, namespace: str) -> Object:
        subject = _without_nulls(subject)
        for field, expected in (("apiVersion", kind.api_version), ("kind", kind.name)):
            if subject.setdefault(field, expected) != expected:
                raise status.bad_request(
                    f"the API version in the data ({subject.get('apiVersion')}, Kind={subject.get('kind')}) "
                    f"does not match the expected API version ({kind.api_version}, Kind={kind.name})"
                )
        metadata = subject.setdefault("metadata", {})
        if kind.namespaced and metadata.setdefault("namespace", namespace) != namespace:
            raise _wrong_namespace(metadata["namespace"], namespace)
        return subject

    def _require_namespace(self, kind: Kind, metadata: Object) -> None:
        if not kind.namespaced:
            return
        name = metadata["namespace"]
        namespace = self.store.get(NAMESPACE, "", name)
        if namespace is None:
            raise status.not_found(NAMESPACE, name)
        if namespace["status"]["phase"] == "Terminating":
            why = f"unable to create new content in namespace {name} because it is being terminated"
            raise status.forbidden(kind, metadata["name"], why)

    def _write(
        self,
        kind: Kind,
        live: Object | None,
        new: Object,
        manager: Manager | None,
        *,
        subresource: str = "",
        dry_run: bool = False,
        trusted: bool = False,
    ) -> Object:
        """Complete, check and keep an object; ``manager`` is None where ``managedFields`` are settled already."""
        new = _keep_what_is_the_servers(kind, live, copied(new), subresource)
        if not trusted:
            self.schemas.check(kind, new)
        defaults.fill(kind, new)
        self._allot(kind, live, new)
        if not trusted:
            causes = validation.faults(kind, new, live)
            if causes:
                raise status.invalid(kind.name, kind.group, new["metadata"]["name"], causes)
        self._admit(kind, live, new)
        if manager is not None:
            new["metadata"]["managedFields"] = self._owned_after_update(kind, live, new, manager)
        if live is not None and _same(live, new):
            return live
        if live is not None and kind.counts_generations and _counts(kind, live) != _counts(kind, new):
            new["metadata"]["generation"] = live["metadata"]["generation"] + 1
        if dry_run:
            return new
        ends = new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers")
        if live is not None and ends and kind not in (POD, NAMESPACE):
            return self.store.remove(kind, self.store.put(kind, new))
        return self.store.put(kind, new)

    def _owned_after_update(self, kind: Kind, live: Object | None, new: Object, manager: Manager) -> list[Object]:
        before = copied(live) if live else {}
        after = copied(new)
        managers = _managers(before.get("metadata", {}).pop("managedFields", []))
        after["metadata"].pop("managedFields", None)
        manager = manager._replace(api_version=kind.api_version)
        merge = Merge(self.schemas, self.schemas.of(kind))
        return self._entries(live, merge.update(before, after, managers, manager))

    @staticmethod
    def _entries(live: Object | None, managers: dict[Manager, Fields]) -> list[Object]:
        """``managedFields``; an entry keeps its time unless its fields change."""
        old = {_manager(entry): entry for entry in live["metadata"].get("managedFields", [])} if live else {}
        entries: list[Object] = []
        for who, owned in managers.items():
            fields = encode(owned)
            held = old.get(who, {})
            entry = {
                "manager": who.name,
                "operation": who.operation,
                "apiVersion": who.api_version,
                "time": held["time"] if held.get("fieldsV1") == fields else now(),
                "fieldsType": "FieldsV1",
                "fieldsV1": fields,
            }
            entries.append(entry | ({"subresource": who.subresource} if who.subresource else {}))
        return sorted(entries, key=lambda entry: (entry["operation"], entry["time"], entry["manager"]))

    def _allot(self, kind: Kind, live: Object | None, new: Object) -> None:
        """What the server hands out: an address for a Service, and ports of the nodes."""
        if kind is SERVICE and new["spec"].get("type") != "ExternalName" and not new["spec"].get("clusterIP"):
            have = (live or {}).get("spec", {}).get("clusterIP")
            new["spec"]["clusterIP"] = have or f"10.96.0.{next(self._addresses)}"
            new["spec"]["clusterIPs"] = [new["spec"]["clusterIP"]]
        if kind is SERVICE and new["spec"].get("type") == "NodePort":
            held = {port["port"]: port.get("nodePort") for port in (live or {}).get("spec", {}).get("ports", ())}
            for port in new["spec"]["ports"]:
                port.setdefault("nodePort", held.get(port["port"]) or next(self._node_ports))

    def _admit(self, kind: Kind, live: Object | None, new: Object) -> None:
        """The admission plugins that a cluster has switched on: service accounts, Pod Security."""
        if kind is not POD or live is not None:
            return
        metadata = new["metadata"]
        account = new["spec"]["serviceAccountName"]
        if self.store.get(SERVICE_ACCOUNT, metadata["namespace"], account) is None:
            where = f"{metadata['namespace']}/{account}"
            why = f'error looking up service account {where}: serviceaccount "{account}" not found'
            raise status.forbidden(kind, metadata["name"], why)
        namespace = self.get(NAMESPACE, "", metadata["namespace"])
        level = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce")
        if violations := pod_security.violations(level, new["spec"]):
            why = f'violates PodSecurity "{level}:latest": {", ".join(violations)}'
            raise status.forbidden(kind, metadata["name"], why)

    def _orphan(self, uid: str) -> None:
        for kind, subject in self.store.everything():
            owners = subject["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners):
                subject["metadata"]["ownerReferences"] = [owner for owner in owners if owner["uid"] != uid]
                self.store.put(kind, subject)


def now() -> str:
    """The time as objects have it, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _keep_what_is_the_servers(kind: Kind, live: Object | None, new: Object, subresource: str) -> Object:
    """Fields that no client sets, and the part of the object that this request is not about."""
    metadata = new["metadata"]
    if live is None:
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        for field in ("deletionTimestamp", "deletionGracePeriodSeconds"):
            metadata.pop(field, None)
        if kind.counts_generations:
            metadata["generation"] = 1
        if kind.has_status:
            new.pop("status", None)
        return new
    held = live["metadata"]
    if subresource == "status":
        new = copied(live) | {"status": new.get("status", {}), "metadata": metadata}
    elif kind.has_status:
        new = {field: value for field, value in new.items() if field != "status"}
        new |= {"status": copied(live["status"])} if "status" in live else {}
    for field in ("uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp"):
        metadata.pop(field, None)
        metadata |= {field: held[field]} if field in held else {}
    return new


def _writable(kind: Kind, config: Object, subresource: str) -> Object:
    """The part of a configuration that this endpoint writes; a strategy's reset fields are nobody's."""
    if subresource == "status":
        return {field: value for field, value in config.items() if field != "spec"}
    return {field: value for field, value in config.items() if not (kind.has_status and field == "status")}


def _counts(kind: Kind, subject: Object) -> Any:
    """What a new generation counts; for a Deployment the annotations too."""
    rest = {field: value for field, value in subject.items() if field not in ("metadata", "status")}
    return (rest, subject["metadata"].get("annotations") if kind is DEPLOYMENT else None)


def _same(old: Object, new: Object) -> bool:
    return _without_times(old) == _without_times(new)


def _without_times(subject: Object) -> Object:
    metadata = {
        **subject["metadata"],
        "managedFields": [{**entry, "time": ""} for entry in subject["metadata"].get("managedFields", [])],
    }
    return {**subject, "metadata": metadata}


def _require_same(kind: Kind, live: Object, metadata: Object) -> None:
    """The object is still what the writer read, if the writer says what that was."""
    held = live["metadata"]
    if metadata.get("uid") and metadata["uid"] != held["uid"]:
        why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {held['uid']}"
        raise status.conflict(kind, held["name"], why)
    if metadata.get("resourceVersion") and metadata["resourceVersion"] != held["resourceVersion"]:
        raise status.conflict(kind, held["name"])


def _wrong_namespace(given: str, wanted: str) -> status.ApiError:
    return status.bad_request(
        f"the namespace of the provided object does not match the namespace sent on the request ({given}, {wanted})"
    )


def _managers(entries: Iterable[Object]) -> dict[Manager, Fields]:
    return {_manager(entry): decode(entry["fieldsV1"]) for entry in entries}


def _manager(entry: Object) -> Manager:
    return Manager(entry["manager"], entry["operation"], entry["apiVersion"], entry.get("subresource", ""))


def _place(subject: Object) -> list[str]:
    return [subject["metadata"].get("namespace", ""), subject["metadata"]["name"]]


def _token(version: int, after: list[str]) -> str:
    return base64.urlsafe_b64encode(json.dumps({"rv": version, "start": after}).encode()).decode()


def _read_token(token: str, oldest: int) -> list[str]:
    try:
        found = json.loads(base64.urlsafe_b64decode(token))
        version, after = found["rv"], found["start"]
    except (ValueError, KeyError, TypeError):
        raise status.bad_request("continue key is not valid: " + token) from None
    if version < oldest:
        raise status.expired(
            "The provided continue parameter is too old to display a consistent list result. You can start a new list "
            "without the continue parameter."
        )
    return after


def _without_nulls(value: Any) -> Any:
    """A field that is null is not there, as when JSON becomes a Go struct."""
    if isinstance(value, dict):
        return {name: _without_nulls(child) for name, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value
