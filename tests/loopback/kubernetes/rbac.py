"""The RBAC authorizer, which evaluates the Roles and RoleBindings on the server."""

from dataclasses import dataclass
from typing import Any

from tests.loopback.kubernetes.kinds import KINDS, NAMESPACE, ROLE, ROLE_BINDING, Kind
from tests.loopback.kubernetes.status import ApiError, forbidden
from tests.loopback.kubernetes.store import Store

Object = dict[str, Any]
ADMIN = "kubernetes-admin"


@dataclass(frozen=True)
class Attempt:
    """The attributes of one request that authorization depends on."""

    user: str
    verb: str
    kind: Kind
    namespace: str
    name: str
    subresource: str = ""

    @property
    def resource(self) -> str:
        """The resource with its subresource, such as ``deployments/status``."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


def authorize(store: Store, attempt: Attempt) -> None:
    """Allow the administrator everything, and other users what a Role in the namespace allows.

    Raises:
        ApiError: 403.
    """
    if not _may(store, attempt):
        raise _denied(attempt)


def review(store: Store, user: str, request: Object) -> Object:
    """Answer a SelfSubjectAccessReview, which every user may create."""
    about = request["spec"]["resourceAttributes"]
    group, plural = about.get("group", ""), about.get("resource", "")
    kind = next((item for item in KINDS.values() if (item.group, item.plural) == (group, plural)), None)
    kind = kind or Kind(group, about.get("version", ""), plural, plural)
    place = (about.get("namespace", ""), about.get("name", ""), about.get("subresource", ""))
    allowed = _may(store, Attempt(user, about.get("verb", ""), kind, *place))
    return request | {"metadata": {}, "status": {"allowed": allowed}}


def _may(store: Store, attempt: Attempt) -> bool:
    # A namespace object belongs to itself, so a Role in the namespace can grant access to it.
    namespace = attempt.name if attempt.kind is NAMESPACE else attempt.namespace
    return attempt.user == ADMIN or any(_allows(rule, attempt) for rule in _rules(store, attempt.user, namespace))


def _rules(store: Store, user: str, namespace: str) -> list[Object]:
    if not namespace:
        return []  # cluster-wide requests need ClusterRoles, which this server does not support
    rules: list[Object] = []
    for binding in store.all(ROLE_BINDING, namespace):
        if any(_is(subject, user, namespace) for subject in binding.get("subjects") or ()):
            role = store.get(ROLE, namespace, binding["roleRef"]["name"])
            rules += (role or {}).get("rules") or []
    return rules


def _is(subject: Object, user: str, namespace: str) -> bool:
    return user == f"system:serviceaccount:{subject.get('namespace', namespace)}:{subject['name']}"


def _allows(rule: Object, attempt: Attempt) -> bool:
    def has(field: str, value: str) -> bool:
        values = rule.get(field) or ()
        return "*" in values or value in values

    resources = rule.get("resources") or ()
    in_resources = has("resources", attempt.resource) or (
        bool(attempt.subresource) and f"*/{attempt.subresource}" in resources
    )
    names = rule.get("resourceNames") or ()
    return (
        has("verbs", attempt.verb)
        and has("apiGroups", attempt.kind.group)
        and in_resources
        and (not names or attempt.name in names)
    )


def _denied(attempt: Attempt) -> ApiError:
    where = f'in the namespace "{attempt.namespace}"' if attempt.namespace else "at the cluster scope"
    reason = (
        f'User "{attempt.user}" cannot {attempt.verb} resource "{attempt.resource}" '
        f'in API group "{attempt.kind.group}" {where}'
    )
    return forbidden(attempt.kind, attempt.name, reason)
