"""Label and field selectors in query strings and objects."""

import re
from collections.abc import Callable
from typing import Any

from tests.loopback.kubernetes.kinds import EVENT, Kind
from tests.loopback.kubernetes.status import ApiError, bad_request

Object = dict[str, Any]
Predicate = Callable[[Object], bool]
_EQUAL = re.compile(r"^(?P<key>[^\s!=,()]+)\s*(?P<how>==|=|!=)\s*(?P<value>[^\s!=,()]*)$")
# In addition to metadata.name; only those that these tests need.
_FIELDS = {EVENT: ("involvedObject.name", "type")}


def labels(text: str) -> Predicate:
    """Parse ``labelSelector=`` with equalities.

    Raises:
        ApiError: 400, the selector is invalid.
    """
    tests = [_label_test(part.strip()) for part in text.split(",") if part.strip()]
    return lambda subject: all(test(subject["metadata"].get("labels") or {}) for test in tests)


def fields(kind: Kind, text: str) -> Predicate:
    """Parse ``fieldSelector=``; supports only the fields that a real server indexes.

    Raises:
        ApiError: 400, the kind does not support the field.
    """
    tests: list[tuple[str, bool, str]] = []
    for part in filter(None, text.split(",")):
        match = _EQUAL.match(part.strip())
        if not match:
            raise bad_request(f"invalid selector: '{part}'; can't understand '{part}'")
        if match["key"] not in ("metadata.name", *_FIELDS.get(kind, ())):
            raise ApiError(400, f"field label not supported: {match['key']}")
        tests.append((match["key"], match["how"] != "!=", match["value"]))
    return lambda subject: all((_at(subject, path) == value) is equal for path, equal, value in tests)


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether labels match the ``matchLabels`` of a workload's selector."""
    return selector["matchLabels"].items() <= labels.items()


def _label_test(part: str) -> Callable[[dict[str, str]], bool]:
    if match := _EQUAL.match(part):
        return lambda have: (have.get(match["key"]) == match["value"]) is (match["how"] != "!=")
    raise bad_request(f'unable to parse requirement: found "{part}"')


def _at(subject: Object, path: str) -> str:
    value: Any = subject
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else str(value)
