"""Authorization, and the proxy to services and pods."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes import config
from kubernetes.client import (
    ApiClient,
    ApiException,
    Configuration,
)

from tests.loopback.kubernetes import LoopbackCluster, NotReady, Ready, labeled
from tests.loopback.kubernetes.kubectl import NAMESPACE, Kubectl, config_map, deployment, error_of, is_rolled_out
from tests.waiting import until

DEPLOYER = f"{NAMESPACE}/deployer"
USER = f"system:serviceaccount:{NAMESPACE}:deployer"


def grant(kubectl: Kubectl, *rules: dict[str, Any]) -> None:
    """Bind a Role with these rules to the deployer."""
    kubectl.create({"kind": "Role", "metadata": {"name": "deployer"}, "rules": list(rules)})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "deployer"}
    subjects = [{"kind": "ServiceAccount", "name": "deployer", "namespace": NAMESPACE}]
    kubectl.create({"kind": "RoleBinding", "metadata": {"name": "deployer"}, "roleRef": role, "subjects": subjects})


def rule(group: str, resource: str, *verbs: str, names: tuple[str, ...] = ()) -> dict[str, Any]:
    granted = {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
    return granted | ({"resourceNames": list(names)} if names else {})


@pytest.fixture
def deployer(cluster: LoopbackCluster, kubectl: Kubectl) -> Iterator[Kubectl]:
    """A client of a service account without any Role."""
    with config.new_client_from_config(str(cluster.kubeconfig(DEPLOYER, namespace=NAMESPACE))) as client:
        yield Kubectl(client)


@pytest.fixture
def recognizer() -> Iterator[Any]:
    """A server that echoes its requests, acting as the process in a pod."""

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            echo = {"path": self.path, "body": body.decode(), "headers": sorted(map(str.lower, self.headers))}
            content = json.dumps(echo).encode()
            self.send_response(418 if self.path.startswith("/teapot") else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def proxied(path: str, service: str = "serve:http") -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/services/{service}/proxy{path}"


def serve(kubectl: Kubectl) -> None:
    """A Service on port 80 in front of two pods that listen on 8080."""
    ports = [{"name": "http", "port": 80, "targetPort": 8080}]
    kubectl.create(
        {"kind": "Service", "metadata": {"name": "serve"}, "spec": {"selector": {"app": "serve"}, "ports": ports}}
    )
    kubectl.create(deployment())


def test_unknown_token_is_rejected(kubectl: Kubectl) -> None:
    known = kubectl.client.configuration
    for key in ({}, {"authorization": "Bearer guessed"}):
        unauthenticated = Configuration(host=known.host, api_key=key)
        unauthenticated.ssl_ca_cert = known.ssl_ca_cert
        with ApiClient(unauthenticated) as client, pytest.raises(ApiException) as exc_info:
            Kubectl(client).list("Pod")
        assert error_of(exc_info.value) == (401, "Unauthorized")


def test_forbidden_message_names_user_verb_resource_and_namespace(deployer: Kubectl) -> None:
    with pytest.raises(ApiException) as exc_info:
        deployer.get("Deployment", "serve")
    assert error_of(exc_info.value) == (
        403,
        f'deployments.apps "serve" is forbidden: User "{USER}" cannot get resource "deployments" in API group "apps" '
        f'in the namespace "{NAMESPACE}"',
    )
    with pytest.raises(ApiException) as exc_info:
        deployer.call("GET", "/api/v1/namespaces")
    assert error_of(exc_info.value) == (
        403,
        f'namespaces is forbidden: User "{USER}" cannot list resource "namespaces" in API group "" at the cluster '
        "scope",
    )


def test_role_grants_its_verbs_and_names_in_its_namespace(kubectl: Kubectl, deployer: Kubectl) -> None:
    grant(kubectl, rule("", "configmaps", "get", "list", names=("settings",)))
    kubectl.create(config_map())
    kubectl.create(config_map("other"))
    assert deployer.get("ConfigMap", "settings")["kind"] == "ConfigMap"
    (chosen,) = deployer.list("ConfigMap", fieldSelector="metadata.name=settings")["items"]
    assert chosen["metadata"]["name"] == "settings"
    for forbidden in (
        lambda: deployer.get("ConfigMap", "other"),
        lambda: deployer.list("ConfigMap"),  # a list without a field selector has no name
        lambda: deployer.list("ConfigMap", fieldSelector="metadata.name!=settings"),
        lambda: deployer.delete("ConfigMap", "settings"),
        lambda: deployer.call("GET", "/api/v1/namespaces/default/configmaps/settings"),
    ):
        with pytest.raises(ApiException) as exc_info:
            forbidden()
        assert exc_info.value.status == 403


def test_applying_a_new_object_requires_create(kubectl: Kubectl, deployer: Kubectl) -> None:
    grant(kubectl, rule("", "configmaps", "patch", names=("settings",)))
    with pytest.raises(ApiException, match="cannot create resource") as exc_info:
        deployer.apply(config_map(color="blue"))
    assert exc_info.value.status == 403
    kubectl.apply(config_map(color="blue"))
    assert deployer.apply(config_map(color="blue"))["data"] == {"color": "blue"}


def test_self_subject_access_review_is_open_to_every_user(kubectl: Kubectl, deployer: Kubectl) -> None:
    grant(
        kubectl,
        rule("apps", "deployments", "patch"),
        rule("apps", "deployments", "get", names=("serve",)),
        rule("apps", "deployments/status", "get"),
    )

    def may(verb: str, **about: str) -> bool:
        about = {"namespace": NAMESPACE, "verb": verb, "group": "apps", "resource": "deployments"} | about
        review = {"kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": about}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return deployer.call("POST", path, review)["status"]["allowed"]

    assert (may("patch"), may("patch", name="serve"), may("delete")) == (True, True, False)
    assert (may("get", name="serve"), may("get", name="other"), may("get")) == (True, False, False)
    assert (may("get", subresource="status"), may("patch", subresource="status")) == (True, False)
    assert not may("patch", namespace="default")
    assert not may("patch", group="extensions")


def test_api_server_proxies_requests_to_a_service(cluster: LoopbackCluster, kubectl: Kubectl, recognizer: Any) -> None:
    cluster.set_pod_behavior(Ready(serves={8080: recognizer.server_address}))
    serve(kubectl)
    until(lambda: is_rolled_out(kubectl.get("Deployment", "serve")))
    for service in ("serve:http", "serve:80", "http:serve:http"):
        response = kubectl.call("POST", proxied("/predictions/embedding", service), b"image", "image/png", k="1")
        assert (response["path"], response["body"]) == ("/predictions/embedding?k=1", "image")
    assert "authorization" not in response["headers"]
    with pytest.raises(ApiException) as exc_info:
        kubectl.call("GET", proxied("/teapot"))
    assert exc_info.value.status == 418


def test_service_routes_requests_only_to_ready_pods(
    cluster: LoopbackCluster, kubectl: Kubectl, recognizer: Any
) -> None:
    cluster.set_pod_behavior(NotReady())
    serve(kubectl)
    until(lambda: len(kubectl.list("Pod")["items"]) == 2)
    with pytest.raises(ApiException) as exc_info:
        kubectl.call("GET", proxied("/ping"))
    assert error_of(exc_info.value) == (503, 'no endpoints available for service "serve"')
    with pytest.raises(ApiException, match="no service port 81 found") as exc_info:
        kubectl.call("GET", proxied("/ping", "serve:81"))
    assert exc_info.value.status == 503
    cluster.set_pod_behavior(Ready())  # ready, but nothing listens on the port

    def path_or_error() -> str:
        """The requested path, or the error body; endpoints lag behind the pods."""
        try:
            return kubectl.call("GET", proxied("/ping"))["path"]
        except ApiException as error:
            return str(error.body)

    until(lambda: "connect: connection refused" in path_or_error())
    cluster.set_pod_behavior(Ready(serves={8080: recognizer.server_address}), labeled("version", "1"))
    until(lambda: path_or_error() == "/ping")


def test_proxy_requires_services_proxy_with_the_name_in_the_path(
    cluster: LoopbackCluster, kubectl: Kubectl, deployer: Kubectl, recognizer: Any
) -> None:
    grant(kubectl, rule("", "services/proxy", "create", names=("serve:http",)), rule("", "services", "get"))
    cluster.set_pod_behavior(Ready(serves={8080: recognizer.server_address}))
    serve(kubectl)
    until(lambda: is_rolled_out(kubectl.get("Deployment", "serve")))
    assert deployer.call("POST", proxied("/x"), b"image", "image/png")["body"] == "image"
    for method, service in (("GET", "serve:http"), ("POST", "serve:80")):
        with pytest.raises(ApiException, match='resource \\\\"services/proxy\\\\"') as exc_info:
            deployer.call(method, proxied("/x", service))
        assert exc_info.value.status == 403
