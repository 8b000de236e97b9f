"""The fake API server refuses what a real one refuses, in its words. Tests of deployments rely on
what it accepts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.loopback.kubernetes import pod_security, rbac
from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.fields import Manager
from tests.loopback.kubernetes.kinds import KINDS
from tests.loopback.kubernetes.status import ApiError

Object = dict[str, Any]
USER = "system:serviceaccount:evernear:deployer"


@pytest.fixture
def api() -> Api:
    """A server with the namespace evernear and the objects that `deployment` and `lease` return."""
    api = Api("1.34")
    api.create(KINDS["Namespace"], {"metadata": {"name": "evernear"}})
    return api


def deployment(version: str = "1", **spec: Any) -> Object:
    labels = {"app": "serve"}
    container = {"name": "serve", "image": f"example.com/serve:{version}", "ports": [{"containerPort": 8080}]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    chosen = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template} | spec
    return copy.deepcopy({"kind": "Deployment", "metadata": {"name": "serve"}, "spec": chosen})


def lease(**spec: str) -> Object:
    return {"kind": "Lease", "metadata": {"name": "serve"}, "spec": {"holderIdentity": "one"} | spec}


def data(**values: str) -> Object:
    return {"kind": "ConfigMap", "metadata": {"name": "serve"}, "data": values}


def create(api: Api, subject: Object) -> Object:
    return api.create(KINDS[subject["kind"]], subject, "evernear")


def replace(api: Api, subject: Object) -> Object:
    return api.replace(KINDS[subject["kind"]], subject, "evernear", "serve")


def apply(api: Api, subject: Object, manager: str = "me", **options: bool) -> Object:
    by = Manager(manager, "Apply", "v1")
    return api.apply(KINDS[subject["kind"]], subject, "evernear", "serve", manager=by, **options)[0]


def misspell(subject: Object) -> Object:
    subject["spec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    return subject


def bind(api: Api, *rules: Object) -> None:
    """Grant rights to the service account deployer."""
    metadata = {"name": "deployer", "namespace": "evernear"}
    api.create(KINDS["Role"], {"metadata": metadata, "rules": [*rules]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "deployer"}
    subjects = [{"kind": "ServiceAccount", **metadata}]
    api.create(KINDS["RoleBinding"], {"metadata": metadata, "roleRef": role, "subjects": subjects})


@pytest.mark.parametrize(
    ("write", "code", "message"),
    [
        (lambda api: create(api, deployment(replicaz=1)), 400, 'strict decoding error: unknown field "spec.replicaz"'),
        (lambda api: create(api, deployment(replicas="two")), 400, "json: cannot unmarshal string into Go struct"),
        (lambda api: create(api, deployment(replicas=-1)), 422, "spec.replicas: Invalid value: -1: must be greater"),
        (lambda api: create(api, deployment(selector={"matchLabels": {"app": "x"}})), 422, "`selector` does not match"),
        (lambda api: create(api, deployment(strategy={"type": "Rolling"})), 422, 'Unsupported value: "Rolling"'),
        (lambda api: create(api, lease(renewTime="2026-01-01T00:00:00Z")), 400, "must match the regular expression"),
        (lambda api: [create(api, lease()), replace(api, lease())], 422, "must be specified for an update"),
        (lambda api: [create(api, data()), create(api, data())], 409, 'configmaps "serve" already exists'),
        (lambda api: api.create(KINDS["ConfigMap"], data(), "absent"), 404, 'namespaces "absent" not found'),
        (
            lambda api: apply(api, misspell(deployment())),
            500,
            "failed to create typed patch object (evernear/serve; apps/v1, Kind=Deployment): "
            '.spec.template.spec.containers[name="serve"].imagePulPolicy: field not declared in schema',
        ),
        (
            lambda api: api.list_objects(KINDS["ConfigMap"], field_selector="data.color=blue"),
            400,
            "field label not supported: data.color",
        ),
    ],
)
def test_invalid_request_is_refused(api: Api, write: Callable[[Api], object], code: int, message: str) -> None:
    with pytest.raises(ApiError) as raised:
        write(api)
    assert raised.value.code == code
    assert message in raised.value.message


def test_stale_replace_is_a_conflict(api: Api) -> None:
    read = create(api, data(color="blue"))
    replace(api, read | {"data": {"color": "red"}})
    with pytest.raises(ApiError, match="the object has been modified; please apply your changes to the latest version"):
        replace(api, read | {"data": {"color": "green"}})


def test_applied_fields_have_owners(api: Api) -> None:
    apply(api, data(color="blue", size="8"), "one")
    apply(api, data(shape="round"), "two")
    assert apply(api, data(color="blue"), "one")["data"] == {"color": "blue", "shape": "round"}, "a dropped field"
    apply(api, data(color="blue", size="8"), "one")
    with pytest.raises(ApiError) as raised:
        apply(api, data(color="red", size="9", shape="flat"), "three")
    assert raised.value.message == (
        'Apply failed with 3 conflicts: conflicts with "one":\n- .data.color\n- .data.size\n'
        'conflicts with "two":\n- .data.shape'
    )
    forced = apply(api, data(color="red"), "three", force=True)
    assert forced["data"] == {"color": "red", "size": "8", "shape": "round"}
    with pytest.raises(ApiError, match=r'conflict with "three": \.data\.color'):
        apply(api, data(color="blue", size="8"), "one")


def test_defaults_are_those_of_a_real_server(api: Api) -> None:
    created = create(api, deployment())
    container = created["spec"]["template"]["spec"]["containers"][0]
    assert created["metadata"]["generation"] == 1
    assert created["spec"]["progressDeadlineSeconds"] == 600
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["ports"] == [{"containerPort": 8080, "protocol": "TCP"}]
    assert replace(api, created)["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("verb", "kind", "namespace", "name", "message"),
    [
        ("get", "ConfigMap", "evernear", "serve", ""),
        ("get", "ConfigMap", "evernear", "other", 'configmaps "other" is forbidden: User '),
        ("list", "ConfigMap", "evernear", "", f'configmaps is forbidden: User "{USER}" cannot list resource'),
        ("get", "ConfigMap", "default", "serve", 'in the namespace "default"'),
        ("delete", "ConfigMap", "evernear", "serve", "cannot delete resource"),
        ("list", "Namespace", "", "", 'cannot list resource "namespaces" in API group "" at the cluster scope'),
        ("get", "Deployment", "evernear", "serve", 'resource "deployments" in API group "apps" in the namespace'),
    ],
)
def test_role_grants_its_verbs_and_names_in_its_namespace(
    api: Api, verb: str, kind: str, namespace: str, name: str, message: str
) -> None:
    bind(api, {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"], "resourceNames": ["serve"]})
    attempt = rbac.Attempt(USER, verb, KINDS[kind], namespace, name)
    if not message:
        rbac.authorize(api.store, attempt)
        return
    with pytest.raises(ApiError) as raised:
        rbac.authorize(api.store, attempt)
    assert raised.value.code == 403
    assert message in raised.value.message


def test_restricted_standard_names_each_violation() -> None:
    context = {"privileged": True, "runAsUser": 0, "capabilities": {"add": ["SYS_ADMIN"], "drop": ["ALL"]}}
    pod = {
        "hostNetwork": True,
        "volumes": [{"hostPath": {}}],
        "containers": [{"name": "a", "securityContext": context}],
    }
    named = [violation.removesuffix(' (container "a")') for violation in pod_security.violations("restricted", pod)]
    assert named == [
        "host namespaces (hostNetwork=true)",
        "restricted volume types",
        "privileged",
        "allowPrivilegeEscalation != false",
        "unrestricted capabilities",
        "runAsNonRoot != true",
        "runAsUser=0",
        "seccompProfile",
    ]
    assert pod_security.violations("baseline", pod) == []
