"""Credentials, and one sentence for each error of the API server."""

import http.server
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.config import incluster_config

from evernear.deployment.kubernetes import cluster as module
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.service import service_client
from evernear.errors import ClusterError, SettingsError
from tests.loopback.kubernetes import LoopbackCluster, too_many_requests
from tests.real.deployment.kubernetes.deployer import MakeSettings
from tests.real.serving.fake_servers import http_server


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without any cluster configuration."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_missing_credentials_error_names_the_kubeconfig(bare: Path) -> None:
    with pytest.raises(ClusterError, match=rf"{bare}/\.kube/config does not exist; set KUBECONFIG"):
        Cluster.of("evernear")
    (bare / ".kube").mkdir()
    for nonsense in ("nonsense: true", "", "[a", "a:\n\t- b", "- a", "text", "\0"):
        (bare / ".kube" / "config").write_text(nonsense)
        with pytest.raises(ClusterError, match=rf"^The kubeconfig {bare}/\.kube/config cannot be used: .*\.$"):
            Cluster.of("evernear")


def test_pod_uses_its_service_account_unless_kubeconfig_is_set(
    loopback: LoopbackCluster, bare: Path, monkeypatch: pytest.MonkeyPatch, make_settings: MakeSettings
) -> None:
    kubeconfig = loopback.kubeconfig("evernear/evernear-deployer", namespace="evernear")
    kubeconfig_tree = yaml.safe_load(kubeconfig.read_text())
    (bare / "token").write_text(kubeconfig_tree["users"][0]["user"]["token"])
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(bare / "token"))
    authority = kubeconfig_tree["clusters"][0]["cluster"]["certificate-authority"]
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", authority)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", loopback.url.rpartition(":")[2])
    cluster = Cluster.of("evernear")
    assert (cluster.inside, cluster.host) == (True, loopback.url)
    assert cluster.get("Deployment", "evernear-serving") is None
    settings = make_settings(token_secret="token")  # inside the cluster, the client can send a token
    client: Any = service_client(cluster, settings)
    assert client._target.url == "http://evernear-serving.evernear.svc:8080"
    (bare / "namespace").write_text("team\n")
    monkeypatch.setattr(module, "NAMESPACE_FILE", bare / "namespace")
    assert Cluster.of().namespace == "team"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))  # takes precedence: a CI runner may be a pod of another cluster
    outside = Cluster.of()
    assert (outside.inside, outside.namespace) == (False, "evernear"), "the namespace of the current context"


def test_token_from_outside_requires_a_service_url(
    loopback: LoopbackCluster, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster.of("evernear")
    with pytest.raises(SettingsError, match=r"set the environment variable EVERNEAR_SERVICE_URL="):
        service_client(cluster, make_settings(token_secret="token"))
    monkeypatch.setenv("EVERNEAR_TOKEN", "secret")
    requests: list[str] = []

    def answer(handler: Any) -> None:
        requests.append(handler.headers["Authorization"])
        http.server.BaseHTTPRequestHandler.send_error(handler, 401)

    with http_server(do_POST=answer) as port:
        monkeypatch.setenv("EVERNEAR_SERVICE_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(Exception, match=r"refuses the token; set EVERNEAR_TOKEN"):
            service_client(cluster, make_settings(token_secret="token")).predict(b"image")
    assert requests == ["Bearer secret"]
    for url in ("evernear.example", "http://evernear:port", "http://[evernear", "http://evernear/path"):
        monkeypatch.setenv("EVERNEAR_SERVICE_URL", url)
        with pytest.raises(SettingsError, match=r"^EVERNEAR_SERVICE_URL='.*' is not of the form https://host:port\.$"):
            service_client(cluster, make_settings())


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)


def test_unknown_token_is_rejected(loopback: LoopbackCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig = loopback.kubeconfig()
    tree = yaml.safe_load(kubeconfig.read_text())
    tree["users"][0]["user"]["token"] = "another"
    kubeconfig.write_text(yaml.safe_dump(tree))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    with pytest.raises(ClusterError, match=rf"^The API server at {loopback.url} does not accept the credentials \("):
        Cluster.of("evernear").get("Deployment", "x")


@pytest.mark.usefixtures("quick_retries")
def test_retries_are_limited(loopback: LoopbackCluster) -> None:
    loopback.fail(too_many_requests(), times=module.MAX_ATTEMPTS - 1)
    cluster = Cluster.of("evernear")
    assert cluster.get("Deployment", "evernear-serving") is None
    loopback.fail(too_many_requests(retry_after_s=3600), times=module.MAX_ATTEMPTS)
    with pytest.raises(ClusterError, match="still fails after 5 attempts: 429"):
        cluster.get("Deployment", "evernear-serving")


@pytest.fixture
def foreign_server(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A kubeconfig whose server is not a Kubernetes API server."""

    def welcome(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'{"hello": "world"}' if handler.path.endswith("/pods?") else b"<html>Welcome</html>")

    with http_server(do_GET=welcome) as port:
        url = f"http://127.0.0.1:{port}"
        tree = {
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            "users": [{"name": "c", "user": {"token": "t"}}],
            "current-context": "c",
        }
        (bare / "config").write_text(yaml.safe_dump(tree))
        monkeypatch.setenv("KUBECONFIG", str(bare / "config"))
        yield url


def test_request_without_credentials_names_the_kubeconfig(
    loopback: LoopbackCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client logs why the kubeconfig's command failed, and goes on without a token."""
    refused = {"kind": "Status", "code": 403, "message": 'x is forbidden: User "system:anonymous" cannot get x'}
    body = json.dumps(refused).encode()

    def refuse(handler: Any) -> None:
        handler.send_response(403)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    tree = yaml.safe_load(loopback.kubeconfig().read_text())
    tree["users"][0]["user"] = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-plugin"}}
    with http_server(do_GET=refuse) as port:
        tree["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        kubeconfig = loopback.kubeconfig()
        kubeconfig.write_text(yaml.safe_dump(tree))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        with pytest.raises(ClusterError, match=r"no credentials: check the kubeconfig's user and the command"):
            Cluster.of("evernear").get("Deployment", "x")


@pytest.mark.usefixtures("quick_retries")
def test_foreign_and_unreachable_servers_are_reported(foreign_server: str, bare: Path) -> None:
    cluster = Cluster.of("evernear")
    with pytest.raises(ClusterError, match=rf"^The server at {foreign_server} is not a Kubernetes API server\.$"):
        cluster.get("Deployment", "x")
    with pytest.raises(ClusterError, match=r"is not a Kubernetes API server\.$"):
        cluster.list("Pod")
    kubeconfig = bare / "config"
    kubeconfig.write_text(kubeconfig.read_text().replace(foreign_server, "http://127.0.0.1:1"))
    cluster = Cluster.of("evernear")
    with pytest.raises(ClusterError, match=r"^The API server at http://127\.0\.0\.1:1 cannot be reached: .*refused"):
        cluster.get("Deployment", "x")


def test_default_client_configuration_is_unchanged(loopback: LoopbackCluster) -> None:
    """Other clients of the process, such as KFP's, keep their configuration."""
    Cluster.of("evernear")
    from kubernetes.client import Configuration

    assert Configuration.get_default_copy().host != loopback.url
