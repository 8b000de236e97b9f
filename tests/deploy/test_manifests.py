"""Every overlay with what the deploy step adds to it, judged as a platform team would: schemas, pods, rights, names."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from fastapi.routing import APIRoute
from loopback.kubernetes.pod_security import violations
from rendered import (
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

from evernear import settings
from evernear.cli import app
from evernear.kubeflow import connection
from evernear.serving.prep.app import router

FOREIGN_ACCOUNTS = {"kubeflow/pipeline-runner"}
"""Accounts that a RoleBinding may name though others make them."""
SECRETS: dict[str, Object] = {
    secret["metadata"]["name"]: secret for secret in yaml.safe_load_all((DEPLOY / "secrets.example.yaml").read_text())
}
OURS = re.compile(r"registry\.invalid/evernear-[a-z]+@")


@pytest.fixture(params=PARTS)
def found(request: pytest.FixtureRequest) -> list[Object]:
    """All objects of the namespace, those of the deploy step among them."""
    rendered = objects(request.param)
    return [*rendered, *serving(rendered)]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_them(version: str) -> None:
    rendered = [each for part in PARTS for each in [*objects(part), *serving(objects(part))]]
    distinct = {json.dumps(each): each for each in rendered if each["kind"] not in FOREIGN}
    assert len(distinct) > 50
    for each in distinct.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_a_misspelt_key_would_be_found() -> None:
    (deployment, *_) = named(objects("local"), "Deployment").values()
    spec = deployment["spec"]["template"]["spec"]
    spec["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolice"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


def test_pods_keep_to_the_restricted_standard_and_do_not_write_to_their_images(found: list[Object]) -> None:
    for name, spec in pod_specs(found).items():
        assert not violations("restricted", spec), name
        for container in containers(spec):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name


def test_the_namespace_enforces_that_standard(found: list[Object]) -> None:
    (namespace,) = named(found, "Namespace").values()
    for mode in ("enforce", "audit", "warn"):
        assert namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] == "restricted"


def test_no_pod_has_a_token_for_the_kubernetes_api(found: list[Object]) -> None:
    assert all(account["automountServiceAccountToken"] is False for account in named(found, "ServiceAccount").values())
    for name, spec in pod_specs(found).items():
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["serviceAccountName"] in named(found, "ServiceAccount"), name
        for volume in spec["volumes"]:
            for source in volume.get("projected", {}).get("sources", []):
                assert source["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org", name


def test_variables_of_services_are_not_taken_for_settings(found: list[Object]) -> None:
    """Kubernetes would set EVERNEAR_PREP_PORT=tcp://..., a setting that evernear does not know."""
    assert all(spec["enableServiceLinks"] is False for spec in pod_specs(found).values())


def test_images_are_named_by_digest(found: list[Object]) -> None:
    for name, spec in pod_specs(found).items():
        for container in containers(spec):
            image = container["image"]
            assert re.fullmatch(r"[\w./:-]+@sha256:[0-9a-f]{64}", image), name
            assert OURS.match(image) or re.search(r":[\w.-]+@", image), f"{name}: which release is {image}?"


def test_containers_say_what_they_need_and_at_most_take(found: list[Object]) -> None:
    for name, spec in pod_specs(found).items():
        for container in containers(spec):
            for bound in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][bound].keys(), name
        for volume in spec["volumes"]:
            if "emptyDir" in volume and "evernear-serving" not in name:
                assert volume["emptyDir"]["sizeLimit"], name


def test_who_scales_is_asked_for_no_replicas_and_who_does_not_for_one(found: list[Object]) -> None:
    scaled = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in named(found, "HorizontalPodAutoscaler").values()}
    assert scaled == named(found, "PodDisruptionBudget").keys()
    for name, deployment in named(found, "Deployment").items():
        if name in scaled:
            assert "replicas" not in deployment["spec"]
            assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        else:
            assert deployment["spec"]["replicas"] == 1
            assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_objects_say_where_they_are_and_whose_they_are(found: list[Object]) -> None:
    for each in found:
        metadata = each["metadata"]
        if each["kind"] != "Namespace":
            elsewhere = metadata["name"] == "evernear-scratch"
            assert metadata["namespace"] == ("kubeflow" if elsewhere else "evernear"), metadata["name"]
        if each["kind"] not in ("ConfigMap", "NetworkPolicy") and metadata["name"] != "default":
            assert metadata["labels"]["app.kubernetes.io/part-of"] == "evernear", metadata["name"]


# Rights and secrets.


def test_nobody_has_rights_beyond_the_namespace(found: list[Object]) -> None:
    assert not {"ClusterRole", "ClusterRoleBinding"} & {each["kind"] for each in found}
    for role in named(found, "Role").values():
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert not {"secrets", "roles", "rolebindings", "pods/exec"} & {*rule["resources"]}
    accounts = {f"{each['metadata']['namespace']}/{name}" for name, each in named(found, "ServiceAccount").items()}
    for binding in named(found, "RoleBinding").values():
        assert binding["roleRef"]["name"] in named(found, "Role")
        for subject in binding["subjects"]:
            assert subject["kind"] == "ServiceAccount"
            assert f"{subject.get('namespace', 'evernear')}/{subject['name']}" in accounts | FOREIGN_ACCOUNTS


def test_no_secret_stands_in_the_tree(found: list[Object]) -> None:
    assert not named(found, "Secret")
    for secret in SECRETS.values():
        values = secret["stringData"]
        assert {*values.values()} == {""}, "the example holds a value"
    for spec in pod_specs(found).values():
        for variable in (variable for container in containers(spec) for variable in container.get("env", [])):
            if re.search(r"(KEY|KEY_ID|SECRET|PASSWORD|TOKEN)$", variable["name"]):
                assert variable.get("value", "/dev/null") == "/dev/null", variable["name"]


def test_what_pods_mount_and_read_is_there_or_is_told_of(found: list[Object]) -> None:
    for name, spec in pod_specs(found).items():
        for kind, reference, key in _references(spec):
            there = SECRETS if kind == "Secret" else named(found, kind)
            assert reference in there, f"{name} needs {kind} {reference}"
            if key:
                told = there[reference].get("stringData") or there[reference]["data"]
                assert key in told, f"{name} reads {key} of {kind} {reference}"
    for ingress in named(found, "Ingress").values():
        assert all(tls["secretName"] in SECRETS for tls in ingress["spec"]["tls"])
    for account in named(found, "ServiceAccount").values():
        assert all(secret["name"] in SECRETS for secret in account.get("secrets", []))


def test_files_of_secrets_are_where_they_are_looked_for(found: list[Object]) -> None:
    files = 0
    for name, spec in pod_specs(found).items():
        mounted = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
        for container in containers(spec):
            places = {m["mountPath"]: mounted[m["name"]] for m in container["volumeMounts"] if m["name"] in mounted}
            for variable in container.get("env", []):
                if variable["name"].endswith("_FILE"):
                    folder, _, key = variable["value"].rpartition("/")
                    assert key in SECRETS[places[folder]]["stringData"], f"{name}: {variable['name']}"
                    files += 1
    assert files >= 3


def test_every_secret_that_is_told_of_is_used() -> None:
    used = {"evernear-tls", "evernear-kserve-s3"}  # of an Ingress, and of a ServiceAccount
    for part in PARTS:
        rendered = objects(part)
        for spec in pod_specs([*rendered, *serving(rendered)]).values():
            used |= {reference for kind, reference, _ in _references(spec) if kind == "Secret"}
    assert used == SECRETS.keys()


# Keeps Secrets as files of KEY=VALUE, and notes what else it is asked for.
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
  *) echo "$*" >> "$HERE/asked" ;;
esac
"""


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """``install()`` runs ``tests/cluster/install.sh`` with a kubectl that keeps Secrets; what is in them then."""
    script, kept = tmp_path / "tests/cluster/install.sh", tmp_path / "kept"
    for folder in (script.parent, kept, tmp_path / "deploy/overlays"):
        folder.mkdir(parents=True)
    script.write_text((ROOT / "tests/cluster/install.sh").read_text())
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    image = f"registry.invalid/any@{DIGEST}"
    environment = {"PREP_IMAGE": image, "TRIGGERS_IMAGE": image, "HERE": str(kept)}

    def run(**changes: str) -> dict[str, str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        subprocess.run(["bash", str(script)], env=environment | {"PATH": path, "AWAY": ""} | changes, check=True)
        return {str(file.relative_to(kept)): file.read_text() for file in kept.glob("*/*")}

    return run


def test_the_nightly_trial_makes_every_secret_that_its_pods_need(install: Callable[..., dict[str, str]]) -> None:
    """The bot is not started."""
    made = install()
    rendered = objects("local")
    for name, spec in pod_specs([*rendered, *serving(rendered)]).items():
        if name != "Deployment evernear-slack":
            wanted = {f"evernear/{reference}" for kind, reference, _ in _references(spec) if kind == "Secret"}
            assert wanted <= made.keys(), name
    assert made["kubeflow/evernear-s3"] == made["evernear/evernear-s3"]
    values = [line.partition("=")[2] for name in made for line in made[name].splitlines() if "KEY" in line]
    assert all(re.fullmatch(r"[0-9a-f]{40}", value) for value in values)
    assert len({*values}) == 2 * len([name for name in made if "s3" in name and name.startswith("evernear")])


def test_the_trial_installed_twice_keeps_the_keys_that_its_store_knows(install: Callable[..., dict[str, str]]) -> None:
    first = install()
    assert install() == first
    with pytest.raises(subprocess.CalledProcessError):
        install(AWAY="yes")
    assert install() == first


def _references(spec: Object) -> list[tuple[str, str, str | None]]:
    """Kind, name and key of what a pod reads."""
    found: list[tuple[str, str, str | None]] = []
    for container in containers(spec):
        for source in container.get("envFrom", []):
            (kind, reference) = source.popitem() if len(source) == 1 else pytest.fail("a prefix would hide a setting")
            found.append(({"secretRef": "Secret", "configMapRef": "ConfigMap"}[kind], reference["name"], None))
        for variable in container.get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                found.append(("Secret", reference["name"], reference["key"]))
    for volume in spec["volumes"]:
        if "secret" in volume:
            found.append(("Secret", volume["secret"]["secretName"], None))
        if "configMap" in volume:
            found.append(("ConfigMap", volume["configMap"]["name"], None))
        if "persistentVolumeClaim" in volume:
            found.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], None))
    return found


# What the containers run.


def test_its_settings_and_commands_are_ones_that_evernear_has(found: list[Object]) -> None:
    for name, spec in pod_specs(found).items():
        for container in containers(spec):
            if not OURS.match(container["image"]) or container["command"][0] != "evernear":
                continue
            settings.load(environment=_environment(container, found))
            _require_command(container["command"][1:])
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if command := container.get(probe, {}).get("exec", {}).get("command"):
                    assert command[0] == "evernear", name
                    _require_command(command[1:])


def _environment(container: Object, found: list[Object]) -> dict[str, str]:
    values: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            values |= named(found, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    return values | {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


@pytest.mark.parametrize("part", PARTS)
def test_the_token_that_bot_and_watcher_mount_may_travel_to_kfp(part: str, tmp_path: Path) -> None:
    """Plain http is for loopback and Services of the cluster alone."""
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


def test_ports_are_those_of_the_settings(found: list[Object]) -> None:
    specs = pod_specs(found)
    loaded = settings_of(found)
    told = {"prep": {loaded.prep.port}, "watch": {loaded.watch.health_port}}
    if pods := named(found, "Service").get("evernear-serving-pods"):
        assert [port["port"] for port in pods["spec"]["ports"]] == [loaded.serving.grpc_inference_port]
    for component, ports in told.items():
        if (name := f"Deployment evernear-{component}") in specs:
            assert {port["containerPort"] for port in specs[name]["containers"][0]["ports"]} == ports
    for name, spec in specs.items():
        for container in containers(spec):
            ports = {port["containerPort"] for port in container.get("ports", [])}
            names = {port.get("name") for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if get := container.get(probe, {}).get("httpGet"):
                    assert get["port"] in ports | names, name


def test_services_lead_to_pods_and_routes_to_services(found: list[Object]) -> None:
    specs = pod_specs(found)
    services = named(found, "Service")
    for name, service in services.items():
        behind = [spec for spec in specs.values() if service["spec"]["selector"].items() <= spec["labels"].items()]
        assert len(behind) == 1, name
        names = {port["name"] for port in behind[0]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names, name
    for monitor in named(found, "ServiceMonitor").values():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (port,) = (endpoint["port"] for endpoint in monitor["spec"]["endpoints"])
        chosen = [each for each in services.values() if wanted <= each["metadata"]["labels"].items()]
        assert [port in {p["name"] for p in each["spec"]["ports"]} for each in chosen].count(True) == 1


def test_routes_lead_to_what_the_preprocessing_server_answers_and_not_to_its_metrics() -> None:
    ingress = named(objects("production, ingress"), "Ingress")["evernear-prep"]["spec"]
    route = named(objects("production"), "HTTPRoute")["evernear-prep"]["spec"]
    by_ingress = {path["path"]: path["pathType"] for path in ingress["rules"][0]["http"]["paths"]}
    by_route = {m["path"]["value"]: m["path"]["type"].removeprefix("Path") for m in route["rules"][0]["matches"]}
    assert by_ingress == by_route
    answered = {route.path for route in router.routes if isinstance(route, APIRoute)} - {"/metrics"}
    led_to = {path for path in answered for begin, how in by_ingress.items() if _leads(how, begin, path)}
    assert led_to == answered
    assert not any(_leads(how, begin, "/metrics") for begin, how in by_ingress.items())
    loaded = settings_of(objects("production"))
    for backend in [path["backend"]["service"] for path in ingress["rules"][0]["http"]["paths"]]:
        assert backend == {"name": "evernear-prep", "port": {"name": "http"}}
    assert route["rules"][0]["backendRefs"] == [{"name": "evernear-prep", "port": loaded.prep.port}]
    assert int(route["rules"][0]["timeouts"]["request"].removesuffix("s")) > loaded.prep.timeout_s


def _leads(how: str, begin: str, path: str) -> bool:
    return path == begin or (how == "Prefix" and path.startswith(f"{begin}/"))
