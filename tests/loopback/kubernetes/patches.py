"""Strategic merge patches, which the generated client sends."""

import copy
from typing import Any

from tests.loopback.kubernetes.schemas import Schema, Schemas

Object = dict[str, Any]


def strategic(schemas: Schemas, schema: Schema, live: Object, patch: Object) -> Object:
    """Apply a strategic merge patch to ``live``.

    Raises:
        NotImplementedError: it changes a list that is merged by key,
            or has a directive.
    """
    merged = dict(live)
    for name, value in patch.items():
        child = schemas.field(schema, name) or {}
        if name.startswith("$") or child.get("x-kubernetes-patch-strategy", "").startswith("merge"):
            raise NotImplementedError(f"a strategic merge patch of {name}")
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            merged[name] = strategic(schemas, child, merged.get(name) or {}, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged
