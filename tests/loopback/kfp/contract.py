"""JSON schemas of the v2beta1 API, taken from the published client, which is generated from the
Swagger file.

``kfp_server_api`` has a class for each definition of that file and a method for each operation.
Each method is called once with a recorder in place of the network, which records method, path,
query parameters, body and response.
"""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import kfp_server_api
from jsonschema import Draft202012Validator, FormatChecker

UNMENTIONED = ("async_req", "_preload_content", "_request_timeout", "_return_http_data_only")


@dataclass(frozen=True)
class Operation:
    """An HTTP method and path."""

    name: str
    method: str
    path: str
    query: frozenset[str]
    body: str | None
    files: frozenset[str]
    answer: str
    """Type of the 200 response."""

    def matches(self, method: str, path: str) -> dict[str, str] | None:
        """Return the path parameters if a request matches this operation, otherwise None."""
        if method != self.method:
            return None
        match = re.fullmatch(re.sub(r"{(\w+)[\w.]*}", r"(?P<\1>[^/:]+)", self.path), path)
        return match and match.groupdict()


class _Recorder:
    """Replaces the API client of the generated methods and records what they would send."""

    client_side_validation = False

    def select_header_accept(self, accepts: list[str]) -> str:
        return accepts[0]

    select_header_content_type = select_header_accept

    def call_api(
        self, path: str, method: str, path_params: Any, query_params: Any, header_params: Any, **rest: Any
    ) -> Any:
        return path, method, query_params, rest


@cache
def operations() -> list[Operation]:
    """Return every operation of the published client, those with a fixed path first."""
    unsorted = [
        _operation(name, method)
        for api in vars(kfp_server_api).values()
        if inspect.isclass(api) and api.__name__.endswith("ServiceApi")
        for name, method in inspect.getmembers(api(_Recorder()), inspect.ismethod)
        if name.endswith("_with_http_info")
    ]
    return sorted(unsorted, key=lambda operation: operation.path.count("{"))


def _operation(name: str, method: Any) -> Operation:
    types = dict(re.findall(r":type (\w+): (.+)", method.__doc__))
    arguments = {key: object() for key in types if key not in UNMENTIONED}
    path, verb, query, rest = method(**arguments)
    body = next((types[key] for key, value in arguments.items() if value is rest["body"]), None)
    return Operation(
        name=name.removesuffix("_with_http_info"),
        method=verb,
        path=path,
        query=frozenset(key for key, _ in query),
        body=body,
        files=frozenset(rest["files"]),
        answer=rest["response_type"],
    )


def faults(type_name: str, value: Any) -> list[str]:
    """Return the violations of the schema ``type_name`` in ``value``."""
    errors = _validator(type_name).iter_errors(value)
    return [f"{'/'.join(map(str, error.absolute_path)) or type_name}: {error.message}" for error in errors]


@cache
def definitions() -> dict[str, Any]:
    """Return every definition as a strict JSON schema."""
    models = {name: model for name, model in vars(kfp_server_api).items() if hasattr(model, "openapi_types")}
    return {name: _definition(model) for name, model in models.items()}


@cache
def _validator(type_name: str) -> Draft202012Validator:
    schema = {**_schema(type_name), "$defs": definitions()}
    return Draft202012Validator(schema, format_checker=FormatChecker(["date-time"]))


def _definition(model: Any) -> dict[str, Any]:
    if hasattr(model, "allowable_values"):
        return {"enum": list(model.allowable_values)}
    if model.__name__ == "ProtobufAny":  # allows arbitrary fields
        return {"type": "object"}
    properties = {model.attribute_map[name]: _schema(kind) for name, kind in model.openapi_types.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _schema(kind: str) -> dict[str, Any]:
    """Return the JSON schema of a type name of the generator."""
    if listed := re.fullmatch(r"list\[(.+)\]", kind):
        return {"type": "array", "items": _schema(listed[1])}
    if mapped := re.fullmatch(r"dict\(str, (.+)\)", kind):
        return {"type": "object", "additionalProperties": _schema(mapped[1])}
    simple = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
    if kind in simple:
        return {"type": simple[kind]}
    if kind == "datetime":
        return {"type": "string", "format": "date-time"}
    return {} if kind == "object" else {"$ref": f"#/$defs/{kind}"}
