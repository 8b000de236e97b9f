"""The contract equals the published API."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.loopback.kfp import contract

SWAGGER = os.environ.get("EVERNEAR_TEST_KFP_SWAGGER")
"""kfp_api_single_file.swagger.json of KFP 2.17.0: backend/api/v2beta1/swagger in
github.com/kubeflow/pipelines."""


@pytest.mark.skipif(not SWAGGER, reason="EVERNEAR_TEST_KFP_SWAGGER does not name a copy of the Swagger file")
def test_contract_equals_the_swagger_file() -> None:
    swagger = json.loads(Path(SWAGGER or "").read_text())
    published = {(o.method, o.path): o for o in contract.operations()}
    stated = {(m.upper(), path): o for path, methods in swagger["paths"].items() for m, o in methods.items()}
    assert set(published) == set(stated)
    for key, operation in stated.items():
        parameters = operation.get("parameters", [])
        assert published[key].query == {p["name"] for p in parameters if p["in"] == "query"}, key
        assert published[key].files == {p["name"] for p in parameters if p["in"] == "formData"}, key
        bodies = [_name(p["schema"]["$ref"]) for p in parameters if p["in"] == "body" and "$ref" in p["schema"]]
        assert [published[key].body] == bodies or not bodies, key
        schema = operation["responses"]["200"]["schema"]
        assert published[key].answer == (_name(schema["$ref"]) if "$ref" in schema else "object"), key
        assert _name(operation["responses"]["default"]["schema"]["$ref"]) == contract.ERROR, key
    definitions = contract.definitions()
    for name, schema in swagger["definitions"].items():
        if name != "protobufAny":
            assert definitions[_class(name)] == _as_ours(schema), name


def _as_ours(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return {"$ref": f"#/$defs/{_name(schema['$ref'])}"}
    if "enum" in schema:
        return {"enum": schema["enum"]}
    match schema.get("type"):
        case "array":
            return {"type": "array", "items": _as_ours(schema["items"])}
        case "object" if "properties" in schema:
            properties = {name: _as_ours(inner) for name, inner in schema["properties"].items()}
            return {"type": "object", "properties": properties, "additionalProperties": False}
        case "object" if "additionalProperties" in schema:
            return {"type": "object", "additionalProperties": _as_ours(schema["additionalProperties"])}
        case "string" if schema.get("format") == "date-time":
            return {"type": "string", "format": "date-time"}
        case "object" | None:
            return {}
        case kind:
            return {"type": kind}


def _name(reference: str) -> str:
    return _class(reference.rsplit("/", 1)[-1])


def _class(name: str) -> str:
    """Return the generated class of a definition."""
    return "".join(part[0].upper() + part[1:] for part in name.split(".") if part)
