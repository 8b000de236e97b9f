"""A temporary namespace in a cluster, with the objects that a deployment needs in production."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes import config, utils
from kubernetes.client import (
    ApiClient,
    ApiException,
    AuthenticationV1TokenRequest,
    CoreV1Api,
    V1TokenRequestSpec,
)

from evernear.settings import Settings, parse
from tests import ROOT

Object = dict[str, Any]
DEPLOY = ROOT / "deploy"
DEPLOYER = "evernear-deployer"
PARTS = DEPLOY / "components" / "many-machines"
RUNNER = "pipeline-runner"
MISSING_IMAGE = "registry.invalid/evernear-serve@sha256:" + "0" * 64  # .invalid never resolves, RFC 6761
_TOKEN_LIFETIME_S = 3600
_LEVELS = ("enforce", "audit", "warn")


@dataclass(frozen=True)
class Sandbox:
    """Environment of a scenario."""

    namespace: str
    image: str
    store: str  # s3://...; the environment has its endpoint and keys, and the deployer's KUBECONFIG
    egress_ports: tuple[int, ...]
    admin: ApiClient
    rollout_timeout_s: int

    def settings(self, **kubernetes: Any) -> Settings:
        """Settings of a small deployment into the namespace."""
        chosen = {
            "namespace": self.namespace,
            "image": self.image,
            "replicas_min": 1,
            "replicas_max": 1,
            "cpu": "500m",
            "egress_ports": self.egress_ports,
            "rollout_timeout_s": self.rollout_timeout_s,
        }
        return parse(Settings, {"store": self.store, "target": "kubernetes", "kubernetes": chosen | kubernetes})


@contextmanager
def temporary_namespace(admin: ApiClient) -> Iterator[str]:
    """Create a namespace with Pod Security *restricted*, and delete it at exit."""
    name = f"evernear-test-{secrets.token_hex(4)}"
    labels = {f"pod-security.kubernetes.io/{level}": "restricted" for level in _LEVELS}
    core = CoreV1Api(admin)
    core.create_namespace({"metadata": {"name": name, "labels": labels | {"app.kubernetes.io/part-of": "evernear"}}})
    try:
        until(lambda: _exists(core.read_namespaced_service_account, "default", name), timeout_s=60)
        yield name
    finally:
        core.delete_namespace(name, propagation_policy="Foreground")
        until(lambda: not _exists(core.read_namespace, name), timeout_s=300)


def install_deployer(admin: ApiClient, namespace: str) -> None:
    """Create the deployer of `deploy/base`, with the one extra right that it needs from outside the
    cluster."""
    create(admin, namespace, *_manifests(DEPLOY / "base" / "deployer.yaml"))
    rule = {
        "apiGroups": [""],
        "resources": ["services/proxy"],
        "resourceNames": ["evernear-serving:http"],
        "verbs": ["create"],
    }
    group = "rbac.authorization.k8s.io"
    metadata = {"apiVersion": f"{group}/v1", "metadata": {"name": "from-outside"}}
    role = {"apiGroup": group, "kind": "Role", "name": "from-outside"}
    binding = {"roleRef": role, "subjects": [{"kind": "ServiceAccount", "name": DEPLOYER}]}
    create(
        admin, namespace, {**metadata, "kind": "Role", "rules": [rule]}, {**metadata, "kind": "RoleBinding", **binding}
    )


def install_store_secret(admin: ApiClient, namespace: str, environment: dict[str, str]) -> None:
    """Create the Secret with which init containers access the object store."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "evernear-s3-reader"}}
    create(admin, namespace, secret | {"stringData": environment})


def install_store(admin: ApiClient, namespace: str) -> dict[str, str]:
    """Install the local overlay's SeaweedFS with an emptyDir, on a node port that pods and this
    process can reach.

    Returns the ``AWS_`` variables of its administrator.
    """
    key, secret = secrets.token_hex(10), secrets.token_hex(20)
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    admin_keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "evernear-s3-admin"}, "stringData": keys}
    files = {file.name: file.read_text() for file in (DEPLOY / "overlays/local/seaweedfs").iterdir()}
    setup = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "evernear-seaweedfs"}, "data": files}
    kinds = ("ServiceAccount", "Service", "Deployment")
    manifests = [item for item in _manifests(DEPLOY / "overlays/local/seaweedfs.yaml") if item["kind"] in kinds]
    for manifest in manifests:
        if manifest["kind"] == "Service":
            manifest["spec"]["type"] = "NodePort"
        elif manifest["kind"] == "Deployment":
            spec = manifest["spec"]["template"]["spec"]
            next(volume for volume in spec["volumes"] if volume["name"] == "data").pop("persistentVolumeClaim")
            next(volume for volume in spec["volumes"] if volume["name"] == "data")["emptyDir"] = {"sizeLimit": "1Gi"}
            (identities,) = spec["initContainers"]
            identities["command"] = [*identities["command"][:3], "admin"]
            identities["env"] = [variable for variable in identities["env"] if variable["name"].startswith("ADMIN_")]
    create(admin, namespace, admin_keys, setup, *manifests)
    core = CoreV1Api(admin)
    until(lambda: _is_ready(core, namespace, "app.kubernetes.io/name=seaweedfs"), timeout_s=300)
    port = core.read_namespaced_service("evernear-seaweedfs", namespace).spec.ports[0].node_port
    addresses = core.list_node().items[0].status.addresses
    host = next(address.address for address in addresses if address.type == "InternalIP")
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1",
        **keys,
    }


def install_parts(admin: ApiClient, namespace: str, environment: dict[str, str]) -> None:
    """Create the objects of `deploy/components/many-machines`, and the account of the pipeline's
    steps. The pods request little, so that three of them fit on a small node."""
    (template,) = _manifests(PARTS / "template.yaml")
    (container,) = template["template"]["spec"]["containers"]
    container["resources"]["requests"] = {"cpu": "100m", "memory": "256Mi"}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": RUNNER}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "evernear-s3"}, "stringData": environment}
    create(admin, namespace, account, secret, template, *_manifests(PARTS / "may-run-parts.yaml"))


def kubeconfig_of(account: str, admin: ApiClient, namespace: str, directory: Path) -> Path:
    """Write a kubeconfig for a ServiceAccount that is valid for an hour."""
    token_request = AuthenticationV1TokenRequest(
        spec=V1TokenRequestSpec(audiences=[], expiration_seconds=_TOKEN_LIFETIME_S)
    )
    issued = CoreV1Api(admin).create_namespaced_service_account_token(account, namespace, token_request)
    cluster = {"server": admin.configuration.host, "insecure-skip-tls-verify": not admin.configuration.verify_ssl}
    if admin.configuration.ssl_ca_cert:
        cluster["certificate-authority"] = str(Path(admin.configuration.ssl_ca_cert).resolve())
    path = directory / f"{account}.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "it", "cluster": cluster}],
                "users": [{"name": account, "user": {"token": issued.status.token}}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": account, "namespace": namespace}}],
                "current-context": "it",
            }
        )
    )
    return path


def administrator(kubeconfig: Path) -> ApiClient:
    """Create a client from a kubeconfig."""
    return config.new_client_from_config(str(kubeconfig))


def create(admin: ApiClient, namespace: str, *manifests: Object) -> None:
    """Create objects in the namespace, as kustomize's ``namespace:`` does."""
    for manifest in manifests:
        manifest["metadata"]["namespace"] = namespace
        for subject in manifest.get("subjects", ()):
            subject["namespace"] = namespace
        utils.create_from_dict(admin, manifest)


def until(condition: Callable[[], Any], timeout_s: float) -> Any:
    """Wait until ``condition`` returns a true value; returns that value."""
    end_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"the condition is not met within {timeout_s} s"
        time.sleep(0.1)
    return value


def _manifests(file: Path) -> list[Object]:
    return list(yaml.safe_load_all(file.read_text()))


def _exists(read: Callable[..., Any], *names: str) -> bool:
    try:
        read(*names)
    except ApiException as error:
        if error.status != 404:
            raise
        return False
    return True


def _is_ready(core: CoreV1Api, namespace: str, selector: str) -> bool:
    pods = core.list_namespaced_pod(namespace, label_selector=selector).items
    conditions = [item for pod in pods for item in pod.status.conditions or () if item.type == "Ready"]
    return bool(conditions) and all(item.status == "True" for item in conditions)
