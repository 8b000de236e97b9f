"""Parsing of a request's method, path and query, like a real server's RequestInfo."""

import re
import urllib.parse
from dataclasses import dataclass, field

from tests.loopback.kubernetes import kinds, status
from tests.loopback.kubernetes.kinds import Kind

HEALTH = ("/healthz", "/livez", "/readyz")
REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True)
class Call:
    """One received request. Faults select requests by it, and tests inspect it afterwards."""

    method: str
    path: str
    verb: str = ""  # an RBAC verb: get list watch create update patch delete
    kind: Kind | None = None
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    rest: str = ""  # of the path, for the proxy
    query: dict[str, str] = field(default_factory=dict)
    user: str = ""


def parse(method: str, path: str, query: dict[str, str], user: str) -> Call:
    """Parse a path under /api/v1/... or /apis/GROUP/VERSION/..., like RequestInfo."""
    bare = Call(method, path, query=query, user=user)
    parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
    if path == REVIEW and method != "POST":
        raise status.method_not_allowed()
    if path == REVIEW or (path in HEALTH and method == "GET"):
        return bare
    if parts[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return bare
    if not rest:
        return bare
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = (*rest[:3], "", "", "")[:3]
    kind = kinds.find(group, version, plural)
    if kind is None or (subresource and subresource not in kind.subresources):
        raise status.no_such_path()
    if kind.namespaced and not namespace and (name or method != "GET"):
        raise status.method_not_allowed()
    return Call(
        method,
        path,
        _verb(method, name, subresource, query),
        kind,
        namespace,
        name,
        subresource,
        "/".join(urllib.parse.quote(part) for part in rest[3:]),
        query,
        user,
    )


def name_selected(call: Call) -> str:
    """Return the single name that a list or watch selects, which RBAC treats as the name of the
    request."""
    match = re.search(r"(?:^|,)metadata\.name==?([^,]+)", call.query.get("fieldSelector", ""))
    return match[1] if match and call.verb in ("list", "watch") else ""


def _verb(method: str, name: str, subresource: str, query: dict[str, str]) -> str:
    if method == "GET":
        if name:
            return "get"
        return "watch" if query.get("watch", "").lower() in ("true", "1") else "list"
    if method == "DELETE" and name:
        return "delete"
    if method not in _VERBS or (method != "POST" and not name) or (method == "POST" and name and not subresource):
        raise status.method_not_allowed()
    return _VERBS[method]
