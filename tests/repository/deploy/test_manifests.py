"""Every overlay, with the objects that the deploy step adds, meets rules on schemas, pods, RBAC and
names."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from fastapi.routing import APIRoute

from evernear import settings
from evernear.cli.app import app
from evernear.kubeflow import connection
from evernear.serving.http.app import SHUTDOWN_TIMEOUT_S
from evernear.serving.http.routes import router
from evernear.serving.pod import ENDPOINT_REMOVAL_S
from evernear.settings.serving import PREP_TIMEOUT_S
from tests.loopback.kubernetes.pod_security import violations
from tests.loopback.kubernetes.users import config_errors, injected
from tests.repository.deploy.rendered import (
    DEPLOY,
    DIGEST,
    FOREIGN,
    NEWEST,
    OLDEST,
    PARTS,
    ROOT,
    Object,
    containers,
    named,
    objects,
    pod_specs,
    serving,
    settings_of,
)

FOREIGN_ACCOUNTS = {"kubeflow/pipeline-runner"}
"""Accounts that a RoleBinding may name although evernear does not create them."""
SECRETS: dict[str, Object] = {
    secret["metadata"]["name"]: secret
    for secret in yaml.safe_load_all((DEPLOY / "secrets.example.yaml").read_text())
    if secret["metadata"]["namespace"] == "evernear"
}
OURS = re.compile(r"registry\.invalid/evernear-[a-z]+@")


@pytest.fixture(params=PARTS)
def manifests(request: pytest.FixtureRequest) -> list[Object]:
    """All objects of the namespace, including those of the deploy step."""
    rendered = objects(request.param)
    return [*rendered, *serving(rendered)]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_objects_are_valid_for_every_supported_kubernetes(version: str) -> None:
    rendered = [item for part in PARTS for item in [*objects(part), *serving(objects(part))]]
    distinct = {json.dumps(item): item for item in rendered if item["kind"] not in FOREIGN}
    assert len(distinct) > 50
    for item in distinct.values():
        kubernetes_validate.validate(item, version, strict=True)


def test_pods_meet_the_restricted_standard_with_a_read_only_root(manifests: list[Object]) -> None:
    for name, spec in (pod_specs(manifests) | pods_of_steps()).items():
        assert not violations("restricted", spec), name
        for container in containers(spec):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name


def test_pods_start_with_a_container_that_a_controller_adds(manifests: list[Object]) -> None:
    for name, spec in (pod_specs(manifests) | pods_of_steps()).items():
        for image in ("docker.io/istio/proxyv2:1.27.0", "ghcr.io/kserve/agent:v0.21.0"):
            assert config_errors(injected(spec, "injected", image)) == {}, name


def test_images_that_are_replaced_later_are_not_pulled_for_every_pod() -> None:
    """The API server stores Always with an image without a tag, even if a digest replaces the image
    later."""
    for path in DEPLOY.rglob("*.yaml"):
        for tree in yaml.safe_load_all(path.read_text()):
            for container in _containers_with_an_image(tree):
                if "@sha256:" not in container["image"]:
                    assert container["imagePullPolicy"] == "IfNotPresent", f"{path}: {container['name']}"


def pods_of_steps() -> dict[str, Object]:
    """The pods that a step starts."""
    paths = ("many-machines/template.yaml", "multi-node-training/runtime.yaml")
    return {path: _pod_spec(yaml.safe_load((DEPLOY / "components" / path).read_text())) for path in paths}


def _pod_spec(tree: Any) -> Object:
    """The spec of the first pod in a tree."""
    if "containers" in tree:
        return tree
    children = tree.values() if isinstance(tree, dict) else tree
    specs = (_pod_spec(child) for child in children if isinstance(child, dict | list))
    return next(filter(None, specs), {})


def _containers_with_an_image(tree: Any) -> Iterator[Object]:
    if isinstance(tree, dict):
        if isinstance(tree.get("image"), str) and "name" in tree:
            yield tree
        tree = list(tree.values())
    for child in tree if isinstance(tree, list) else ():
        yield from _containers_with_an_image(child)


def test_replaced_pod_answers_until_clients_have_left_it(manifests: list[Object]) -> None:
    """Clients reach a pod for some time after it is removed from its Service."""
    for deployment in (m for m in manifests if m["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        is_rolled = deployment["spec"].get("strategy", {}).get("type") != "Recreate"
        for container in pod["containers"]:
            if is_rolled and "ports" in container:
                program, delay_s = container["lifecycle"]["preStop"]["exec"]["command"]
                assert (program, int(delay_s)) == ("sleep", ENDPOINT_REMOVAL_S), deployment["metadata"]["name"]
                assert pod["terminationGracePeriodSeconds"] > ENDPOINT_REMOVAL_S + SHUTDOWN_TIMEOUT_S


def test_namespace_enforces_the_restricted_standard(manifests: list[Object]) -> None:
    (namespace,) = named(manifests, "Namespace").values()
    for mode in ("enforce", "audit", "warn"):
        assert namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] == "restricted"


def test_no_pod_has_a_kubernetes_api_token(manifests: list[Object]) -> None:
    assert all(
        account["automountServiceAccountToken"] is False for account in named(manifests, "ServiceAccount").values()
    )
    specs = pod_specs(manifests)
    for name, spec in (specs | pods_of_steps()).items():
        assert spec["automountServiceAccountToken"] is False, name
    for name, spec in specs.items():
        assert spec["serviceAccountName"] in named(manifests, "ServiceAccount"), name
        for volume in spec["volumes"]:
            for source in volume.get("projected", {}).get("sources", []):
                assert source["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org", name


def test_service_link_variables_are_disabled(manifests: list[Object]) -> None:
    """Kubernetes would set EVERNEAR_PREP_PORT=tcp://..., which is not a setting of evernear."""
    assert all(spec["enableServiceLinks"] is False for spec in (pod_specs(manifests) | pods_of_steps()).values())


def test_images_are_pinned_by_digest(manifests: list[Object]) -> None:
    for name, spec in pod_specs(manifests).items():
        for container in containers(spec):
            image = container["image"]
            assert re.fullmatch(r"[\w./:-]+@sha256:[0-9a-f]{64}", image), name
            assert OURS.match(image) or re.search(r":[\w.-]+@", image), f"{name}: {image} has no tag"


def test_containers_and_volumes_have_requests_and_limits(manifests: list[Object]) -> None:
    for name, spec in pod_specs(manifests).items():
        for container in containers(spec):
            for bound in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][bound].keys(), name
        for volume in spec["volumes"]:
            if "emptyDir" in volume and "evernear-serving" not in name:
                assert volume["emptyDir"]["sizeLimit"], name


def test_only_deployments_without_an_autoscaler_set_replicas(manifests: list[Object]) -> None:
    scaled = {
        scaler["spec"]["scaleTargetRef"]["name"] for scaler in named(manifests, "HorizontalPodAutoscaler").values()
    }
    assert scaled == named(manifests, "PodDisruptionBudget").keys()
    for name, deployment in named(manifests, "Deployment").items():
        if name in scaled:
            assert "replicas" not in deployment["spec"]
            assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        else:
            assert deployment["spec"]["replicas"] == 1
            assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_objects_have_a_namespace_and_a_part_of_label(manifests: list[Object]) -> None:
    for item in manifests:
        metadata = item["metadata"]
        if item["kind"] != "Namespace":
            component = metadata.get("labels", {}).get("app.kubernetes.io/component")
            in_kubeflow = component in ("scratch", "training", "parts")
            assert metadata["namespace"] == ("kubeflow" if in_kubeflow else "evernear"), metadata["name"]
        if item["kind"] not in ("ConfigMap", "NetworkPolicy") and metadata["name"] != "default":
            assert metadata["labels"]["app.kubernetes.io/part-of"] == "evernear", metadata["name"]


# RBAC and Secrets.


def test_roles_are_namespaced_and_minimal(manifests: list[Object]) -> None:
    assert not {"ClusterRole", "ClusterRoleBinding"} & {item["kind"] for item in manifests}
    for role in named(manifests, "Role").values():
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert not {"secrets", "roles", "rolebindings", "pods/exec"} & {*rule["resources"]}
    accounts = {f"{item['metadata']['namespace']}/{name}" for name, item in named(manifests, "ServiceAccount").items()}
    for binding in named(manifests, "RoleBinding").values():
        assert binding["roleRef"]["name"] in named(manifests, "Role")
        for subject in binding["subjects"]:
            assert subject["kind"] == "ServiceAccount"
            assert f"{subject.get('namespace', 'evernear')}/{subject['name']}" in accounts | FOREIGN_ACCOUNTS


def test_manifests_contain_no_secret_values(manifests: list[Object]) -> None:
    assert not named(manifests, "Secret")
    for secret in SECRETS.values():
        values = secret["stringData"]
        assert {*values.values()} == {""}, "the example contains a value"
    for spec in pod_specs(manifests).values():
        for variable in (variable for container in containers(spec) for variable in container.get("env", [])):
            if re.search(r"(KEY|KEY_ID|SECRET|PASSWORD|TOKEN)$", variable["name"]):
                assert variable.get("value", "/dev/null") == "/dev/null", variable["name"]


def test_references_of_pods_exist_or_are_documented(manifests: list[Object]) -> None:
    for name, spec in pod_specs(manifests).items():
        for kind, reference, key in _references(spec):
            available = SECRETS if kind == "Secret" else named(manifests, kind)
            assert reference in available, f"{name} needs {kind} {reference}"
            if key:
                data = available[reference].get("stringData") or available[reference]["data"]
                assert key in data, f"{name} reads {key} of {kind} {reference}"
    for ingress in named(manifests, "Ingress").values():
        assert all(tls["secretName"] in SECRETS for tls in ingress["spec"]["tls"])
    for account in named(manifests, "ServiceAccount").values():
        assert all(secret["name"] in SECRETS for secret in account.get("secrets", []))


def test_file_variables_point_into_mounted_secrets(manifests: list[Object]) -> None:
    files = 0
    for name, spec in pod_specs(manifests).items():
        mounted = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
        for container in containers(spec):
            mount_paths = {
                m["mountPath"]: mounted[m["name"]] for m in container["volumeMounts"] if m["name"] in mounted
            }
            for variable in container.get("env", []):
                if variable["name"].endswith("_FILE"):
                    folder, _, key = variable["value"].rpartition("/")
                    assert key in SECRETS[mount_paths[folder]]["stringData"], f"{name}: {variable['name']}"
                    files += 1
    assert files >= 3


def test_every_documented_secret_is_used() -> None:
    used = {"evernear-tls", "evernear-kserve-s3"}  # referenced by an Ingress and by a ServiceAccount
    for part in PARTS:
        rendered = objects(part)
        for spec in pod_specs([*rendered, *serving(rendered)]).values():
            used |= {reference for kind, reference, _ in _references(spec) if kind == "Secret"}
    assert used == SECRETS.keys()


# Stores Secrets as files of KEY=VALUE lines, and records every other command.
KUBECTL = """#!/bin/sh
namespace=$2
case "$*" in
  *" create secret generic "*)
    echo "$namespace/$6"
    for word; do case "$word" in --from-literal=*) echo "${word#--from-literal=}" ;; esac; done ;;
  "apply --filename -")
    read -r name
    case "$name" in */*) mkdir -p "$HERE/${name%/*}" && cat > "$HERE/$name" ;; esac ;;
  *" get secret "*)
    [ -z "$AWAY" ] || { echo "the API server is away" >&2; exit 1; }
    key=${8#*.data.} file=$HERE/$namespace/$5
    [ ! -f "$file" ] || sed -n "s/^${key%\\}}=//p" "$file" | tr -d '\\n' | base64 --wrap=0 ;;
  *) echo "$*" >> "$HERE/commands" ;;
esac
"""


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """``install()`` runs ``tests/cluster/install.sh`` with a fake kubectl, and returns the stored
    Secrets by name."""
    script, state = tmp_path / "tests/cluster/install.sh", tmp_path / "state"
    for folder in (script.parent, state, tmp_path / "deploy/overlays"):
        folder.mkdir(parents=True)
    script.write_text((ROOT / "tests/cluster/install.sh").read_text())
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    image = f"registry.invalid/any@{DIGEST}"
    environment = {"PREP_IMAGE": image, "TRIGGERS_IMAGE": image, "HERE": str(state)}

    def run(**changes: str) -> dict[str, str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        subprocess.run(["bash", str(script)], env=environment | {"PATH": path, "AWAY": ""} | changes, check=True)
        return {str(file.relative_to(state)): file.read_text() for file in state.glob("*/*")}

    return run


def test_nightly_install_creates_every_secret_that_its_pods_need(install: Callable[..., dict[str, str]]) -> None:
    """The bot is exempt because it is not started."""
    created = install()
    rendered = objects("local")
    for name, spec in pod_specs([*rendered, *serving(rendered)]).items():
        if name != "Deployment evernear-slack":
            required = {f"evernear/{reference}" for kind, reference, _ in _references(spec) if kind == "Secret"}
            assert required <= created.keys(), name
    assert created["kubeflow/evernear-s3"] == created["evernear/evernear-s3"]
    values = [line.partition("=")[2] for name in created for line in created[name].splitlines() if "KEY" in line]
    assert all(re.fullmatch(r"[0-9a-f]{40}", value) for value in values)
    assert len({*values}) == 2 * len([name for name in created if "s3" in name and name.startswith("evernear")])


def test_second_install_keeps_the_keys_of_the_store(install: Callable[..., dict[str, str]]) -> None:
    first = install()
    assert install() == first
    with pytest.raises(subprocess.CalledProcessError):
        install(AWAY="yes")
    assert install() == first


def _references(spec: Object) -> list[tuple[str, str, str | None]]:
    """Kind, name and key of every object that a pod reads."""
    references: list[tuple[str, str, str | None]] = []
    for container in containers(spec):
        for source in container.get("envFrom", []):
            (kind, reference) = source.popitem() if len(source) == 1 else pytest.fail("a prefix would hide a setting")
            references.append(({"secretRef": "Secret", "configMapRef": "ConfigMap"}[kind], reference["name"], None))
        for variable in container.get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                references.append(("Secret", reference["name"], reference["key"]))
    for volume in spec["volumes"]:
        if "secret" in volume:
            references.append(("Secret", volume["secret"]["secretName"], None))
        if "configMap" in volume:
            references.append(("ConfigMap", volume["configMap"]["name"], None))
        if "persistentVolumeClaim" in volume:
            references.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], None))
    return references


# Commands of the containers.


def test_containers_use_existing_settings_and_commands(manifests: list[Object]) -> None:
    for name, spec in pod_specs(manifests).items():
        for container in containers(spec):
            if not OURS.match(container["image"]) or container["command"][0] != "evernear":
                continue
            settings.load(environment=_environment(container, manifests))
            _require_command(container["command"][1:])
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if command := container.get(probe, {}).get("exec", {}).get("command"):
                    assert command[0] == "evernear", name
                    _require_command(command[1:])


def _environment(container: Object, manifests: list[Object]) -> dict[str, str]:
    values: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            values |= named(manifests, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    return values | {item["name"]: item["value"] for item in container.get("env", []) if "value" in item}


@pytest.mark.parametrize("part", PARTS)
def test_kfp_endpoint_accepts_the_mounted_token(part: str, tmp_path: Path) -> None:
    """The client sends a token over plain HTTP only to loopback and to Services of the cluster."""
    (tmp_path / "token").write_text("a pod's own")
    endpoint = settings_of(objects(part)).pipeline
    mounted = {"KF_PIPELINES_SA_TOKEN_PATH": str(tmp_path / "token")}
    assert connection.Connection(endpoint, mounted).url == endpoint.endpoint


def _require_command(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert not hasattr(command, "commands") or command.invoke_without_command, f"evernear has no command {words}"
    assert not words or words[0].startswith("-"), f"evernear has no command {words}"
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options


def test_ports_match_the_settings(manifests: list[Object]) -> None:
    specs = pod_specs(manifests)
    loaded = settings_of(manifests)
    expected = {"prep": {loaded.prep.port}, "watch": {loaded.watch.health_port}}
    if pods := named(manifests, "Service").get("evernear-serving-pods"):
        assert [port["port"] for port in pods["spec"]["ports"]] == [loaded.serving.grpc_inference_port]
    for component, ports in expected.items():
        if (name := f"Deployment evernear-{component}") in specs:
            assert {port["containerPort"] for port in specs[name]["containers"][0]["ports"]} == ports
    for name, spec in specs.items():
        for container in containers(spec):
            ports = {port["containerPort"] for port in container.get("ports", [])}
            names = {port.get("name") for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if get := container.get(probe, {}).get("httpGet"):
                    assert get["port"] in ports | names, name


def test_services_select_pods_and_monitors_select_services(manifests: list[Object]) -> None:
    specs = pod_specs(manifests)
    services = named(manifests, "Service")
    for name, service in services.items():
        selected = [spec for spec in specs.values() if service["spec"]["selector"].items() <= spec["labels"].items()]
        assert len(selected) == 1, name
        names = {port["name"] for port in selected[0]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names, name
    for monitor in named(manifests, "ServiceMonitor").values():
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        (port,) = (endpoint["port"] for endpoint in monitor["spec"]["endpoints"])
        chosen = [item for item in services.values() if labels <= item["metadata"]["labels"].items()]
        assert [port in {p["name"] for p in item["spec"]["ports"]} for item in chosen].count(True) == 1
    for monitor in named(manifests, "PodMonitor").values():
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        (port,) = (endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"])
        (pod,) = (spec for spec in specs.values() if labels <= spec["labels"].items())
        assert port in {p["name"] for p in pod["containers"][0]["ports"]}


def test_routes_expose_every_path_of_the_preprocessing_server_except_metrics() -> None:
    ingress = named(objects("production, ingress"), "Ingress")["evernear-prep"]["spec"]
    route = named(objects("production"), "HTTPRoute")["evernear-prep"]["spec"]
    by_ingress = {path["path"]: path["pathType"] for path in ingress["rules"][0]["http"]["paths"]}
    by_route = {m["path"]["value"]: m["path"]["type"].removeprefix("Path") for m in route["rules"][0]["matches"]}
    assert by_ingress == by_route
    served = {route.path for route in router.routes if isinstance(route, APIRoute)} - {"/metrics"}
    routed = {path for path in served for begin, how in by_ingress.items() if _matches(how, begin, path)}
    assert routed == served
    assert not any(_matches(how, begin, "/metrics") for begin, how in by_ingress.items())
    loaded = settings_of(objects("production"))
    for backend in [path["backend"]["service"] for path in ingress["rules"][0]["http"]["paths"]]:
        assert backend == {"name": "evernear-prep", "port": {"name": "http"}}
    assert route["rules"][0]["backendRefs"] == [{"name": "evernear-prep", "port": loaded.prep.port}]
    assert int(route["rules"][0]["timeouts"]["request"].removesuffix("s")) > PREP_TIMEOUT_S


def _matches(how: str, begin: str, path: str) -> bool:
    return path == begin or (how == "Prefix" and path.startswith(f"{begin}/"))
