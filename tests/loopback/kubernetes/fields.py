"""Who owns which field: server-side apply, after structured-merge-diff and KEP-555.

A set of fields is a Python set of paths; an element of a path is ("f", name of a field), ("k", keys of a list item)
or ("v", value in a set).
"""

import copy
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loopback.kubernetes.schemas import Schema, Schemas, is_atomic, key_of
from loopback.kubernetes.status import ApiError

Object = dict[str, Any]
Path = tuple[tuple[str, Any], ...]
Fields = set[Path]
# Fields of the system, which nobody owns (stripMeta in the API machinery).
_OWNERLESS: Fields = {(("f", "apiVersion"),), (("f", "kind"),)} | {
    (("f", "metadata"), ("f", name))
    for name in ("name", "namespace", "creationTimestamp", "selfLink", "uid", "generation", "managedFields")
}
_OWNERLESS.add((("f", "metadata"), ("f", "resourceVersion")))


class Manager(NamedTuple):
    """Who wrote: an entry of ``metadata.managedFields``, without its fields and time."""

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
    """What a write does to an object."""

    added: Fields = field(default_factory=set)
    modified: Fields = field(default_factory=set)
    removed: Fields = field(default_factory=set)


class Undeclared(Exception):
    """The object holds what its schema does not know, or a list without its keys."""


class Merge:
    """Merging and owning by the schema of one kind."""

    def __init__(self, schemas: Schemas, schema: Schema) -> None:
        self._schemas, self._schema = schemas, schema

    def apply(
        self, live: Object, config: Object, managers: dict[Manager, Fields], manager: Manager, *, force: bool
    ) -> tuple[Object, dict[Manager, Fields]]:
        """``live`` with what ``manager`` applies, and who owns what then.

        Raises:
            ApiError: 409, somebody else owns a field that would change, and ``force`` is not given.
            Undeclared: ``config`` does not fit the schema.
        """
        before = managers.get(manager, set())
        mine = self.fields(config) - _OWNERLESS
        managers = managers | {manager: mine}
        merged = self._prune(self._merge(self._schema, live, config), before, managers)
        difference = self.compare(live, merged)
        return merged, _settle(managers, manager, difference, force=force)

    def update(
        self, live: Object, new: Object, managers: dict[Manager, Fields], manager: Manager
    ) -> dict[Manager, Fields]:
        """Who owns what after a create, replace or patch: the writer takes over what it changed."""
        difference = self.compare(live, new)
        managers = _settle(managers, manager, difference, force=True)
        mine = (managers.get(manager, set()) | difference.modified | difference.added) - difference.removed
        return {who: owned for who, owned in (managers | {manager: mine - _OWNERLESS}).items() if owned}

    def fields(self, subject: Object) -> Fields:
        """All fields that an object sets."""
        found: Fields = set()
        self._collect(self._schema, subject, (), found)
        return found

    def compare(self, old: Object, new: Object) -> Difference:
        """The fields in which two objects differ, without those of the system."""
        difference = Difference()
        self._compare(self._schema, old, new, (), difference)
        return Difference(*(fields - _OWNERLESS for fields in vars(difference).values()))

    def _prune(self, merged: Object, before: Fields, managers: dict[Manager, Fields]) -> Object:
        """Without what the manager applied before, no longer applies, and nobody else owns."""
        owned = set().union(*managers.values())
        gone = (_with_parents(before) & _with_parents(self.fields(merged))) - _with_parents(owned)
        return self._remove(self._schema, merged, (), gone) if gone else merged

    def _children(self, schema: Schema, value: Any) -> dict[tuple[str, Any], tuple[Schema, Any]]:
        """The parts of a map or list that merge one by one, by their path elements."""
        if isinstance(value, dict):
            children = {}
            for name, child in value.items():
                child_schema = self._schemas.field(schema, name)
                if child_schema is None:
                    raise Undeclared(f".{name}: field not declared in schema")
                children["f", name] = (child_schema, child)
            return children
        items: dict[tuple[str, Any], tuple[Schema, Any]] = {}
        for position, item in enumerate(value):
            try:
                key = key_of(schema, item)
            except KeyError as missing:
                why = f"associative list with keys has an element that omits key field {missing}"
                raise Undeclared(f": element {position}: {why}") from None
            if key in items:
                raise Undeclared(f": duplicate entries for key {_words(key)}")
            items[key] = (self._schemas.item(schema), item)
        return items

    def _collect(self, schema: Schema, value: Any, path: Path, found: Fields) -> None:
        if is_atomic(schema) or not isinstance(value, dict | list):
            found.add(path)
            return
        try:
            children = self._children(schema, value)
        except Undeclared as error:
            raise Undeclared(text(path) + str(error)) from None
        for element, (child_schema, child) in children.items():
            self._collect(child_schema, child, (*path, element), found)
            if element[0] != "f" or "properties" not in schema or child is None or child == {}:
                found.add((*path, element))

    def _compare(self, schema: Schema, old: Any, new: Any, path: Path, difference: Difference) -> None:
        if is_atomic(schema) or not (isinstance(old, dict | list | None) and isinstance(new, dict | list | None)):
            if old == new:  # null both may be: the autoscaler's status.currentMetrics
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
        # The applied items stand in the order of the configuration, those of others where they were.
        ours = iter(want)
        order = [next(ours) if element in want else element for element in have]
        return [merged[element] for element in [*order, *ours]]

    def _remove(self, schema: Schema, value: Any, path: Path, gone: Fields) -> Any:
        if is_atomic(schema) or not isinstance(value, dict | list):
            return value
        kept = {
            element: self._remove(child_schema, child, (*path, element), gone)
            for element, (child_schema, child) in self._children(schema, value).items()
            if (*path, element) not in gone
        }
        return {name: child for (_, name), child in kept.items()} if isinstance(value, dict) else list(kept.values())


def text(path: Path) -> str:
    """``.spec.template.spec.containers[name="serve"].image``."""
    return "".join(f".{value}" if kind == "f" else _words((kind, value)) for kind, value in path)


def encode(fields: Fields) -> Object:
    """``fieldsV1`` of a ``managedFields`` entry."""
    tree: Object = {}
    for path in sorted(fields, key=repr):
        node = tree
        for element in path:
            node = node.setdefault(_name(element), {})
        node["."] = {}
    return _without_lone_dots(tree)


def decode(tree: Object) -> Fields:
    """The set of fields that ``fieldsV1`` means."""
    found: Fields = set()

    def walk(node: Object, path: Path) -> None:
        if path and (not node or "." in node):
            found.add(path)
        for name, child in node.items():
            if name != ".":
                walk(child, (*path, _element(name)))

    walk(tree, ())
    return found


def _settle(
    managers: dict[Manager, Fields], manager: Manager, difference: Difference, *, force: bool
) -> dict[Manager, Fields]:
    """Take changed fields from their other owners, or refuse."""
    changed = difference.added | difference.modified
    conflicts = {who: owned & changed for who, owned in managers.items() if who != manager and owned & changed}
    if conflicts and not force:
        raise _apply_conflict(conflicts)
    left = {
        who: owned if who == manager else owned - conflicts.get(who, set()) - difference.removed
        for who, owned in managers.items()
    }
    return {who: owned for who, owned in left.items() if owned or who == manager}


def _apply_conflict(conflicts: dict[Manager, Fields]) -> ApiError:
    by_words: dict[str, list[str]] = defaultdict(list)
    for who, owned in conflicts.items():
        by_words[str(who)] += sorted(text(path) for path in owned)
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {who}", "field": path}
        for who, paths in sorted(by_words.items())
        for path in paths
    ]
    if len(causes) == 1:
        why = f"1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        lines = [
            line
            for who, paths in sorted(by_words.items())
            for line in (f"conflicts with {who}:", *(f"- {path}" for path in paths))
        ]
        why = f"{len(causes)} conflicts: " + "\n".join(lines)
    return ApiError(409, "Conflict", f"Apply failed with {why}", {"causes": causes})


def _with_parents(fields: Fields) -> Fields:
    """The fields, and the structs and maps that they stand in (EnsureNamedFieldsAreMembers)."""
    parents = {path[:end] for path in fields for end in range(1, len(path)) if path[end - 1][0] == "f"}
    return fields | parents


def _words(element: tuple[str, Any]) -> str:
    kind, value = element
    if kind == "v":
        return f"[={json.dumps(value)}]"
    return "[" + ",".join(f"{name}={json.dumps(key)}" for name, key in value) + "]"


def _name(element: tuple[str, Any]) -> str:
    kind, value = element
    if kind == "f":
        return f"f:{value}"
    return f"{kind}:" + json.dumps(dict(value) if kind == "k" else value, separators=(",", ":"))


def _element(name: str) -> tuple[str, Any]:
    kind, _, rest = name.partition(":")
    if kind == "f":
        return ("f", rest)
    value = json.loads(rest)
    return (kind, tuple(sorted(value.items())) if kind == "k" else value)


def _without_lone_dots(tree: Object) -> Object:
    return {} if tree.keys() == {"."} else {name: _without_lone_dots(child) for name, child in tree.items()}
