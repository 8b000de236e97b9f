"""The local overlay on a loopback cluster: its pods become ready, and the deployer has exactly the
rights in use."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config

from evernear.common.lease import Lease
from evernear.deployment.kubernetes import rollout
from evernear.deployment.kubernetes.cluster import VERSION, Cluster
from evernear.deployment.kubernetes.lease import KubernetesRecord
from evernear.deployment.kubernetes.objects import serving_objects
from evernear.deployment.kubernetes.pod_template import ServedRelease
from evernear.deployment.kubernetes.revision import (
    Revision,
    apply_revision,
    load_last_known_good,
    remove,
    save_last_known_good,
)
from evernear.deployment.kubernetes.rollout import await_rollout
from evernear.errors import ClusterError
from evernear.settings import Settings
from tests.loopback.kubernetes import CrashLoop, LoopbackCluster, NotReady, labeled
from tests.loopback.kubernetes.calls import Call
from tests.loopback.kubernetes.kinds import KINDS
from tests.repository.deploy.rendered import DEPLOY, DIGEST, Object, named, objects, settings_of
from tests.waiting import until

LOCAL = objects("local")
SECRETS = [*yaml.safe_load_all((DEPLOY / "secrets.example.yaml").read_text())]
OLD, SLOW, NEW = (f"2026010{day}.000000.00000000" for day in (1, 2, 3))


@pytest.fixture
def overlay_cluster(tmp_path: Path) -> Iterator[LoopbackCluster]:
    """A cluster with the local overlay and every Secret except the inference token."""
    with LoopbackCluster(tmp_path, second_s=1.0) as running:
        kubeflow = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kubeflow"}}
        filled = [
            secret | {"stringData": dict.fromkeys(secret["stringData"], "x")}
            for secret in SECRETS
            if secret["metadata"]["name"] != "evernear-token"
        ]
        for manifest in sorted([kubeflow, *filled, *LOCAL], key=lambda item: item["kind"] != "Namespace"):
            own_account = manifest["kind"] == "ServiceAccount" and manifest["metadata"]["name"] == "default"
            if manifest["kind"] in KINDS and not own_account:
                running.create(manifest)
        yield running


def test_every_deployment_becomes_available_once_its_secrets_exist(overlay_cluster: LoopbackCluster) -> None:
    admin = config.new_client_from_config(str(overlay_cluster.kubeconfig()))
    apps, core = client.AppsV1Api(admin), client.CoreV1Api(admin)

    def up() -> set[str]:
        deployments = apps.list_namespaced_deployment("evernear").items
        return {item.metadata.name for item in deployments if item.status.available_replicas}

    expected = named(LOCAL, "Deployment").keys()
    until(lambda: up() == expected - {"evernear-prep"})  # it mounts the token
    name = {"name": "evernear-token", "namespace": "evernear"}
    (token,) = (secret for secret in SECRETS if secret["metadata"] == name)
    core.create_namespaced_secret("evernear", token | {"stringData": {"token": "x"}})
    until(lambda: up() == expected)


def test_deployer_has_exactly_the_rights_that_it_uses(
    overlay_cluster: LoopbackCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "KUBECONFIG", str(overlay_cluster.kubeconfig("evernear/evernear-deployer", namespace="evernear"))
    )
    monkeypatch.setattr(rollout, "DIAGNOSIS_INTERVAL_S", 1)
    monkeypatch.setattr(rollout, "FAILURE_GRACE_S", 1)
    settings = _settings()
    api = Cluster.of(settings.kubernetes.namespace)
    before = len(overlay_cluster.calls)

    with Lease(KubernetesRecord(api, settings.kubernetes.name, 2)):
        owners = api.get("PodTemplate", settings.kubernetes.name)
        old = serving_objects(settings, ServedRelease(OLD, "b" * 64, "c" * 64), owners)
        apply_revision(api, old, dry_run=True)
        apply_revision(api, old)
        await_rollout(api, settings.kubernetes)
        save_last_known_good(api, settings.kubernetes, Revision(OLD, old))
        assert load_last_known_good(api, settings.kubernetes) is not None
    with Lease(KubernetesRecord(api, settings.kubernetes.name, 2)):
        overlay_cluster.set_pod_behavior(
            NotReady("not yet"), labeled(VERSION, SLOW)
        )  # so that the deployer reads its events
        apply_revision(api, serving_objects(settings, ServedRelease(SLOW, "b" * 64, "c" * 64)))
        with pytest.raises(ClusterError, match="probe"):
            await_rollout(api, settings.kubernetes.model_copy(update={"rollout_timeout_s": 4}))
        overlay_cluster.set_pod_behavior(CrashLoop("no Java\n"), labeled(VERSION, NEW))
        new = serving_objects(settings, ServedRelease(NEW, "b" * 64, "c" * 64))
        apply_revision(api, new)
        with pytest.raises(ClusterError, match="no Java"):
            await_rollout(api, settings.kubernetes)
        remove(api, new)

    used = {
        (call.kind.group, f"{call.kind.plural}/{call.subresource}".rstrip("/"), _name(call), call.verb)
        for call in overlay_cluster.calls[before:]
        if call.kind is not None
    }
    used |= {(*target, "create") for *target, verb in used if verb == "patch"}  # an apply may create the object
    assert used == _granted()


def test_deployer_has_no_other_rights(overlay_cluster: LoopbackCluster, tmp_path: Path) -> None:
    deployer = config.new_client_from_config(str(overlay_cluster.kubeconfig("evernear/evernear-deployer")))
    apps, core = client.AppsV1Api(deployer), client.CoreV1Api(deployer)
    forbidden: list[Callable[[], object]] = [
        lambda: core.read_namespaced_secret("evernear-s3", "evernear"),
        lambda: core.list_namespaced_secret("evernear"),
        lambda: core.list_namespaced_pod("kubeflow"),
        lambda: apps.read_namespaced_deployment("evernear-prep", "evernear"),
        lambda: apps.delete_namespaced_deployment("evernear-slack", "evernear"),
        lambda: core.list_namespace(),
    ]
    for attempt in forbidden:
        with pytest.raises(client.ApiException) as error:
            attempt()
        assert error.value.status == 403


def test_pipeline_runner_may_list_pods_of_the_namespace_only(overlay_cluster: LoopbackCluster) -> None:
    step = client.CoreV1Api(config.new_client_from_config(str(overlay_cluster.kubeconfig("kubeflow/pipeline-runner"))))
    step.list_namespaced_pod("evernear")
    for namespace in ("kubeflow", "default"):
        with pytest.raises(client.ApiException, match="Forbidden"):
            step.list_namespaced_pod(namespace)


def _settings() -> Settings:
    loaded = settings_of(LOCAL)
    chosen = {
        "image": f"registry.invalid/evernear-serve@{DIGEST}",
        "token_secret": "",
    }
    return loaded.model_copy(update={"kubernetes": loaded.kubernetes.model_copy(update=chosen)})


def _name(call: Call) -> str:
    """The object's name if a Role can restrict access to it; empty for pods, whose names are
    generated."""
    name = call.name or call.query.get("fieldSelector", "").removeprefix("metadata.name=")
    return name if name in ("evernear-serving", "evernear-serving-proven") else ""


def _granted() -> set[tuple[str, ...]]:
    """Rights of the Role: API group, resource, object name (empty for any) and verb."""
    role: Object = named(LOCAL, "Role")["evernear-deployer"]
    return {
        (group, resource, name, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }
