"""The published schemas of one Kubernetes version: the fields of each kind, and how its lists and
maps merge."""

import json
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.loopback.kubernetes.kinds import Kind
from tests.loopback.kubernetes.status import ApiError, Cause, bad_request, invalid

Schema = dict[str, Any]
_TRAINER = Path(__file__).with_name("trainer.schema.json")
_META = "io.k8s.apimachinery.pkg.apis.meta.v1."
_CORE = "io.k8s.api.core.v1."
# Constraints of the server's Go types that the published schemas omit.
_PATTERNS = {
    _META + "Time": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$",
    _META + "MicroTime": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)$",
}
_PATTERNS["io.k8s.apimachinery.pkg.api.resource.Quantity"] = (
    r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?$"
)
_ENUMS = {
    (_CORE + "Container", "imagePullPolicy"): ("Always", "IfNotPresent", "Never"),
    (_CORE + "Container", "terminationMessagePolicy"): ("FallbackToLogsOnError", "File"),
    (_CORE + "ContainerPort", "protocol"): ("SCTP", "TCP", "UDP"),
    (_CORE + "HTTPGetAction", "scheme"): ("HTTP", "HTTPS"),
    (_CORE + "PodSpec", "dnsPolicy"): ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    (_CORE + "SeccompProfile", "type"): ("Localhost", "RuntimeDefault", "Unconfined"),
    (_CORE + "ServicePort", "protocol"): ("SCTP", "TCP", "UDP"),
    (_CORE + "ServiceSpec", "type"): ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort"),
    (_CORE + "Toleration", "operator"): ("Equal", "Exists"),
    (_CORE + "TopologySpreadConstraint", "whenUnsatisfiable"): ("DoNotSchedule", "ScheduleAnyway"),
    ("io.k8s.api.apps.v1.DeploymentStrategy", "type"): ("Recreate", "RollingUpdate"),
}
_KEY_DEFAULTS = {"protocol": "TCP"}  # optional list keys and their defaults, from the OpenAPI document


class Schemas:
    """Schemas of Kubernetes ``version`` (1.34), from the package kubernetes-validate, and of
    Kubeflow Trainer."""

    def __init__(self, version: str) -> None:
        path = f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json"
        self._document = json.loads((resources.files("kubernetes_validate") / path).read_text())
        self._definitions: dict[str, Schema] = self._document["$defs"]
        self._definitions.update(json.loads(_TRAINER.read_text())["$defs"])
        for name, pattern in _PATTERNS.items():
            self._definitions[name]["pattern"] = pattern
        for (name, field), values in _ENUMS.items():
            self._definitions[name]["properties"][field]["enum"] = [*values, None]
        self._registry = Resource.from_contents(self._document) @ Registry()

    @cached_property
    def _by_kind(self) -> dict[tuple[str, str, str], str]:
        return {
            (kind["group"], kind["version"], kind["kind"]): name
            for name, definition in self._definitions.items()
            for kind in definition.get("x-kubernetes-group-version-kind", ())
            if len(definition["x-kubernetes-group-version-kind"]) == 1
        }

    def of(self, kind: Kind) -> Schema:
        """Return the schema of a kind."""
        return self._definitions[self._by_kind[kind.group, kind.version, kind.name]]

    def resolve(self, schema: Schema) -> Schema:
        """Resolve a ``$ref``; keys next to the reference take precedence."""
        if "$ref" not in schema:
            return schema
        target = self._definitions[schema["$ref"].rpartition("/")[2]]
        return target | {key: value for key, value in schema.items() if key.startswith("x-kubernetes")}

    def field(self, schema: Schema, name: str) -> Schema | None:
        """Return the schema of a field of a struct or a map, or None for an unknown field."""
        properties = schema.get("properties", {})
        field_schema = properties.get(name, schema.get("additionalProperties"))
        return self.resolve(field_schema) if isinstance(field_schema, dict) else None

    def item(self, schema: Schema) -> Schema:
        """Return the schema of a list's items."""
        return self.resolve(schema["items"])

    def check(self, kind: Kind, subject: dict[str, Any]) -> None:
        """Reject an object that violates its schema, like ``fieldValidation=Strict``.

        Raises:
            ApiError: 400 for an unknown field or a wrong type,
                422 for a missing field or an unsupported value.
        """
        name = self._by_kind[kind.group, kind.version, kind.name]
        validator = Draft202012Validator({"$ref": f"{self._document['$id']}#/$defs/{name}"}, registry=self._registry)
        causes: list[Cause] = []
        for error in validator.iter_errors(subject):
            path = dotted(error.absolute_path)
            if error.validator == "required":
                field = next(name for name in error.validator_value if name not in error.instance)
                causes.append(Cause(f"{path}.{field}".lstrip("."), "Required value"))
            elif error.validator == "enum":
                allowed = ", ".join(json.dumps(value) for value in error.validator_value if value)
                message = f"Unsupported value: {json.dumps(error.instance)}: supported values: {allowed}"
                causes.append(Cause(path, message))
            else:
                raise _undecodable(kind, path, error)
        if causes:
            raise invalid(kind, subject.get("metadata", {}).get("name", ""), causes)


@cache
def schemas(version: str) -> Schemas:
    """Load the schemas of a version once."""
    return Schemas(version)


def is_atomic(schema: Schema) -> bool:
    """Whether a value is owned and replaced as a unit."""
    if "items" in schema:
        return schema.get("x-kubernetes-list-type", "atomic") == "atomic"
    is_map = "properties" in schema or isinstance(schema.get("additionalProperties"), dict)
    return not is_map or schema.get("x-kubernetes-map-type") == "atomic"


def key_of(schema: Schema, item: Any) -> tuple[str, Any]:
    """Return the identity of an item in a merged list: ("k", its key fields) or, in a set, ("v",
    the item).

    Raises:
        KeyError: A key field is missing.
    """
    if schema["x-kubernetes-list-type"] == "set":
        return ("v", item)
    keys = schema["x-kubernetes-list-map-keys"]
    return ("k", tuple(sorted((key, item[key] if key in item else _KEY_DEFAULTS[key]) for key in keys)))


def dotted(path: Any) -> str:
    """``spec.containers[0].name``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _undecodable(kind: Kind, path: str, error: Any) -> ApiError:
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        field = next(name for name in error.instance if name not in known)
        reason = f'strict decoding error: unknown field "{".".join(filter(None, [path, field]))}"'
    elif error.validator == "pattern":
        reason = f'"{error.instance}" must match the regular expression {error.validator_value!r}'
    else:
        reason = f"json: cannot unmarshal {_go_type(error.instance)} into Go struct field {kind.name}.{path}"
    return bad_request(f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: {reason}')


def _go_type(value: Any) -> str:
    names = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
