"""Field ownership for server-side apply, after structured-merge-diff and KEP-555.

A set of fields is a Python set of paths; an element of a path is ("f", name of a field), ("k", keys
of a list item) or ("v", value in a set).
"""

import copy
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.loopback.kubernetes.schemas import Schema, Schemas, is_atomic, key_of
from tests.loopback.kubernetes.status import ApiError

Object = dict[str, Any]
Path = tuple[tuple[str, Any], ...]
Fields = set[Path]
# System fields without an owner (stripMeta in the API machinery).
_OWNERLESS: Fields = {(("f", "apiVersion"),), (("f", "kind"),)} | {
    (("f", "metadata"), ("f", name))
    for name in ("name", "namespace", "creationTimestamp", "selfLink", "uid", "generation", "managedFields")
}
_OWNERLESS.add((("f", "metadata"), ("f", "resourceVersion")))


class Manager(NamedTuple):
    """A field manager, as in an entry of ``metadata.managedFields``."""

    name: str
    operation: str  # Apply | Update
    api_version: str
    subresource: str = ""

    def __str__(self) -> str:
        via = f' with subresource "{self.subresource}"' if self.subresource else ""
        using = f" using {self.api_version}" if self.operation == "Update" else ""
        return f'"{self.name}"{via}{using}'


@dataclass
class Difference:
    """The fields that a write adds, modifies and removes."""

    added: Fields = field(default_factory=set)
    modified: Fields = field(default_factory=set)
    removed: Fields = field(default_factory=set)


class UndeclaredFieldError(Exception):
    """The object has a field that its schema does not declare, or a list item without its keys."""


class Merge:
    """Merge semantics and field ownership, from the schema of one kind."""

    def __init__(self, schemas: Schemas, schema: Schema) -> None:
        self._schemas, self._schema = schemas, schema

    def apply(
        self, live: Object, config: Object, managers: dict[Manager, Fields], manager: Manager, *, force: bool
    ) -> tuple[Object, dict[Manager, Fields]]:
        """Return ``live`` with the configuration of ``manager`` applied, and the resulting
        owners.

        Raises:
            ApiError: 409, another manager owns a field that would change,
                and ``force`` is not set.
            UndeclaredFieldError: ``config`` does not match the schema.
        """
        before = managers.get(manager, set())
        own = self.fields(config) - _OWNERLESS
        managers = managers | {manager: own}
        merged = self._prune(self._merge(self._schema, live, config), before, managers)
        difference = self.compare(live, merged)
        return merged, _resolve_ownership(managers, manager, difference, force=force)

    def update(
        self, live: Object, new: Object, managers: dict[Manager, Fields], manager: Manager
    ) -> dict[Manager, Fields]:
        """Return the owners after a create, replace or patch:
        the writer owns the fields that it changed."""
        difference = self.compare(live, new)
        managers = _resolve_ownership(managers, manager, difference, force=True)
        own = (managers.get(manager, set()) | difference.modified | difference.added) - difference.removed
        return {name: owned for name, owned in (managers | {manager: own - _OWNERLESS}).items() if owned}

    def fields(self, subject: Object) -> Fields:
        """Return all fields that an object sets."""
        result: Fields = set()
        self._collect(self._schema, subject, (), result)
        return result

    def compare(self, old: Object, new: Object) -> Difference:
        """Return the fields in which two objects differ, except system fields."""
        difference = Difference()
        self._compare(self._schema, old, new, (), difference)
        return Difference(*(fields - _OWNERLESS for fields in vars(difference).values()))

    def _prune(self, merged: Object, before: Fields, managers: dict[Manager, Fields]) -> Object:
        """Remove the fields that the manager no longer applies and that have no other owner."""
        owned = set().union(*managers.values())
        removed = (_with_parents(before) & _with_parents(self.fields(merged))) - _with_parents(owned)
        return self._remove(self._schema, merged, (), removed) if removed else merged

    def _children(self, schema: Schema, value: Any) -> dict[tuple[str, Any], tuple[Schema, Any]]:
        """The individually merged children of a map or list, by path element."""
        if isinstance(value, dict):
            children = {}
            for name, child in value.items():
                child_schema = self._schemas.field(schema, name)
                if child_schema is None:
                    raise UndeclaredFieldError(f".{name}: field not declared in schema")
                children["f", name] = (child_schema, child)
            return children
        items: dict[tuple[str, Any], tuple[Schema, Any]] = {}
        for position, item in enumerate(value):
            try:
                key = key_of(schema, item)
            except KeyError as missing:
                reason = f"associative list with keys has an element that omits key field {missing}"
                raise UndeclaredFieldError(f": element {position}: {reason}") from None
            if key in items:
                raise UndeclaredFieldError(f": duplicate entries for key {_format_element(key)}")
            items[key] = (self._schemas.item(schema), item)
        return items

    def _collect(self, schema: Schema, value: Any, path: Path, result: Fields) -> None:
        if is_atomic(schema) or not isinstance(value, dict | list):
            result.add(path)
            return
        try:
            children = self._children(schema, value)
        except UndeclaredFieldError as error:
            raise UndeclaredFieldError(text(path) + str(error)) from None
        for element, (child_schema, child) in children.items():
            self._collect(child_schema, child, (*path, element), result)
            if element[0] != "f" or "properties" not in schema or child is None or child == {}:
                result.add((*path, element))

    def _compare(self, schema: Schema, old: Any, new: Any, path: Path, difference: Difference) -> None:
        if is_atomic(schema) or not (isinstance(old, dict | list | None) and isinstance(new, dict | list | None)):
            if old == new:  # both may be null: the autoscaler's status.currentMetrics
                return
            if old is None:
                difference.added.add(path)
            elif new is None:
                difference.removed.add(path)
            else:
                difference.modified.add(path)
            return
        was = self._children(schema, old) if old is not None else {}
        now = self._children(schema, new) if new is not None else {}
        for element in was.keys() | now.keys():
            child_schema, _ = now.get(element) or was[element]
            _, child_was = was.get(element, (None, None))
            _, child_now = now.get(element, (None, None))
            self._compare(child_schema, child_was, child_now, (*path, element), difference)
        if "properties" not in schema or (path and path[-1][0] != "f"):
            if old is None and new is not None:
                difference.added.add(path)
            elif new is None and old is not None:
                difference.removed.add(path)

    def _merge(self, schema: Schema, live: Any, config: Any) -> Any:
        if live is None or config is None or is_atomic(schema) or not isinstance(config, dict | list):
            return copy.deepcopy(live if config is None else config)
        have, want = self._children(schema, live), self._children(schema, config)
        merged = {
            element: self._merge(child_schema, have.get(element, (None, None))[1], want.get(element, (None, None))[1])
            for element, (child_schema, _) in (have | want).items()
        }
        if isinstance(config, dict):
            return {name: value for (_, name), value in merged.items()}
        # Applied items follow the order of the configuration; other items keep their positions.
        applied = iter(want)
        order = [next(applied) if element in want else element for element in have]
        return [merged[element] for element in [*order, *applied]]

    def _remove(self, schema: Schema, value: Any, path: Path, removed: Fields) -> Any:
        if is_atomic(schema) or not isinstance(value, dict | list):
            return value
        children = {
            element: self._remove(child_schema, child, (*path, element), removed)
            for element, (child_schema, child) in self._children(schema, value).items()
            if (*path, element) not in removed
        }
        return (
            {name: child for (_, name), child in children.items()}
            if isinstance(value, dict)
            else list(children.values())
        )


def text(path: Path) -> str:
    """``.spec.template.spec.containers[name="serve"].image``."""
    return "".join(f".{value}" if kind == "f" else _format_element((kind, value)) for kind, value in path)


def _resolve_ownership(
    managers: dict[Manager, Fields], manager: Manager, difference: Difference, *, force: bool
) -> dict[Manager, Fields]:
    """Transfer ownership of the changed fields, or raise a conflict."""
    changed = difference.added | difference.modified
    conflicts = {other: owned & changed for other, owned in managers.items() if other != manager and owned & changed}
    if conflicts and not force:
        raise _apply_conflict(conflicts)
    left = {
        other: owned if other == manager else owned - conflicts.get(other, set()) - difference.removed
        for other, owned in managers.items()
    }
    return {other: owned for other, owned in left.items() if owned or other == manager}


def _apply_conflict(conflicts: dict[Manager, Fields]) -> ApiError:
    by_words: dict[str, list[str]] = defaultdict(list)
    for manager, owned in conflicts.items():
        by_words[str(manager)] += sorted(text(path) for path in owned)
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {manager}", "field": path}
        for manager, paths in sorted(by_words.items())
        for path in paths
    ]
    if len(causes) == 1:
        reason = f"1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        lines = [
            line
            for manager, paths in sorted(by_words.items())
            for line in (f"conflicts with {manager}:", *(f"- {path}" for path in paths))
        ]
        reason = f"{len(causes)} conflicts: " + "\n".join(lines)
    return ApiError(409, f"Apply failed with {reason}", {"causes": causes})


def _with_parents(fields: Fields) -> Fields:
    """The fields and the structs and maps that contain them (EnsureNamedFieldsAreMembers)."""
    parents = {path[:end] for path in fields for end in range(1, len(path)) if path[end - 1][0] == "f"}
    return fields | parents


def _format_element(element: tuple[str, Any]) -> str:
    kind, value = element
    if kind == "v":
        return f"[={json.dumps(value)}]"
    return "[" + ",".join(f"{name}={json.dumps(key)}" for name, key in value) + "]"
