"""Merge patches: RFC 7386, and Kubernetes' strategic one, which merges lists by key."""

import copy
from typing import Any

from loopback.kubernetes.schemas import Schema, Schemas

Object = dict[str, Any]


def merge(live: Any, patch: Any) -> Any:
    """``live`` after a JSON merge patch."""
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
    """``live`` after a strategic merge patch; of its directives, ``$patch: replace`` and ``delete``."""
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
            held = merged.get(name) or []
            merged[name] = held + [item for item in value if item not in held]
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
