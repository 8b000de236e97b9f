"""JSON merge patches (RFC 7386) and strategic merge patches, which merge lists by key."""

import copy
from typing import Any

from loopback.kubernetes.schemas import Schema, Schemas

Object = dict[str, Any]


def merge(live: Any, patch: Any) -> Any:
    """Apply a JSON merge patch to ``live``."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(live) if isinstance(live, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def strategic(schemas: Schemas, schema: Schema, live: Object, patch: Object) -> Object:
    """Apply a strategic merge patch to ``live``; supports the directives ``$patch: replace`` and ``delete``."""
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    merged = dict(live)
    for name, value in patch.items():
        if name.startswith(("$setElementOrder/", "$retainKeys", "$patch")):
            continue
        if value is None:
            merged.pop(name, None)
            continue
        child = schemas.field(schema, name) or {}
        key = child.get("x-kubernetes-patch-merge-key")
        if isinstance(value, dict):
            merged[name] = strategic(schemas, child, merged.get(name) or {}, value)
        elif isinstance(value, list) and key:
            merged[name] = _by_key(schemas, schemas.item(child), key, merged.get(name) or [], value)
        elif isinstance(value, list) and child.get("x-kubernetes-patch-strategy") == "merge":
            current = merged.get(name) or []
            merged[name] = current + [item for item in value if item not in current]
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _by_key(schemas: Schemas, schema: Schema, key: str, live: list[Object], patch: list[Object]) -> list[Object]:
    merged = {item[key]: item for item in live}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = strategic(schemas, schema, merged.get(item[key], {}), item)
    return list(merged.values())
