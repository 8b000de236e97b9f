"""Filtering, sorting and paging, as in the API server."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_plus

from tests.loopback.kfp import contract
from tests.loopback.kfp.state import ApiServerError, invalid

DEFAULT_PAGE_SIZE = 20
MAX_PAGE_SIZE = 200


def page(
    resources: Sequence[Mapping[str, Any]], query: Mapping[str, str], fields: Sequence[str], id_field: str
) -> tuple[list[Any], str, int]:
    """Return one page of ``resources``, the token of the next page, and the total number.

    ``fields`` are those that the server can filter and sort by.
    """
    field, _, direction = query.get("sort_by", "").lower().strip().partition(" ")
    if direction not in ("", "asc", "desc"):
        raise invalid(f'Received invalid sort by format "{query["sort_by"]}".')
    if field and field not in fields:
        raise invalid(f'Invalid sorting field: "{field}"')
    matches = [resource for resource in resources if _passes(resource, query.get("filter", ""), fields)]
    matches.sort(key=lambda r: (r.get(field or "created_at", ""), r[id_field]), reverse=direction == "desc")
    size = int(query.get("page_size") or 0)
    if size < 0:
        raise invalid(f"The page size should be greater than 0. Got {size}")
    start = _offset(query)
    end = start + min(size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    token = _token(end, query) if end < len(matches) else ""
    return list(matches[start:end]), token, len(matches)


def _passes(resource: Mapping[str, Any], encoded: str, fields: Sequence[str]) -> bool:
    if not encoded:
        return True
    try:
        tree = json.loads(unquote_plus(encoded))  # a second time after HTTP, like the API server
    except json.JSONDecodeError:
        raise invalid(f'failed to parse valid filter from "{encoded}"') from None
    if faults := contract.faults("V2beta1Filter", tree):
        raise invalid(f'failed to parse valid filter from "{encoded}": {faults[0]}')
    return all(_matches(resource, predicate, fields) for predicate in tree.get("predicates", []))


def _matches(resource: Mapping[str, Any], predicate: Mapping[str, Any], fields: Sequence[str]) -> bool:
    if predicate["key"] not in fields:
        raise invalid(f'no support for filtering on unrecognized field "{predicate["key"]}"')
    assert predicate["operation"] == "EQUALS", "the only operation that these tests need"
    # MySQL's default collation ignores case.
    return resource.get(predicate["key"], "").casefold() == predicate["string_value"].casefold()


def _token(offset: int, query: Mapping[str, str]) -> str:
    state = [offset, query.get("sort_by", ""), query.get("filter", "")]
    return base64.b64encode(json.dumps(state).encode()).decode()


def _offset(query: Mapping[str, str]) -> int:
    token = query.get("page_token", "")
    if not token:
        return 0
    try:
        offset, sort_by, encoded = json.loads(base64.b64decode(token))
    except ValueError:
        raise invalid("Invalid page token") from None
    if (query.get("sort_by", sort_by), query.get("filter", encoded)) != (sort_by, encoded):
        raise ApiServerError(3, "page token does not match the supplied sort by and/or filtering criteria.")
    return offset
