"""The InferenceService as KServe 0.21 takes it: fields by its SDK, pods by Kubernetes, canaries by its webhook's rules.

The rules are those of ``inference_service_validation.go``, and of Knative's ``fieldmask.go`` for its pods.
"""

import ast
import re
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
from rendered import DEPLOY, NEWEST, PARTS, ROOT, Object, named, objects

from evernear.release.registry import ARCHIVES

SDK = ROOT / ".venv/kserve"
KSERVE = [part for part in PARTS if part.startswith("kserve")]
MODE = "serving.kserve.io/deploymentMode"
# Of a pod's fields, those that Knative takes without a feature flag, and that are used here.
KNATIVE_POD = {"containers", "volumes", "serviceAccountName", "automountServiceAccountToken", "enableServiceLinks"}


@cache
def sdk_package() -> Path:
    found = [*SDK.glob("lib/python*/site-packages/kserve")]
    if not found:
        pytest.skip("KServe's SDK is not installed; `make .venv/kserve/.installed` brings it")
    return found[0]


@cache
def fields(model: str) -> dict[str, str]:
    """Type by JSON key of one of the SDK's models, read without the seconds that importing them takes."""
    tree = ast.parse((sdk_package() / "models" / f"{model}.py").read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)}
    return {values["attribute_map"][name]: kind for name, kind in values["openapi_types"].items()}


def service(part: str) -> Object:
    return named(objects(part), "InferenceService")["evernear"]


@pytest.mark.parametrize("part", KSERVE)
def test_its_fields_are_kserves_and_its_pods_those_of_kubernetes(part: str) -> None:
    spec = service(part)["spec"]
    assert spec.keys() <= fields("v1beta1_inference_service_spec").keys()
    components = [(spec["predictor"], "v1beta1_predictor_spec")]
    if "transformer" in spec:
        components.append((spec["transformer"], "v1beta1_transformer_spec"))
    for canary in spec.get("canary", []):
        assert canary.keys() <= fields("v1beta1_canary_spec").keys()
        components.append((canary["predictor"], "v1beta1_predictor_spec"))
    extension = fields("v1beta1_component_extension_spec")
    for component, model in components:
        _require_fields(component, fields(model))
        pod = {key: value for key, value in component.items() if key not in extension and key != "name"}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}
        kubernetes_validate.validate(manifest, NEWEST, strict=True)
        if strategy := component.get("deploymentStrategy"):
            deployment = {"selector": {}, "template": {"spec": pod}, "strategy": strategy}
            manifest = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": deployment}
            kubernetes_validate.validate(manifest, NEWEST, strict=True)


def _require_fields(component: Object, known: dict[str, str]) -> None:
    for key, value in component.items():
        assert key in known, f"KServe has no field {key}"
        wanted = {"int": int, "str": str, "bool": bool}.get(known[key])
        assert wanted is None or type(value) is wanted, f"{key}: {value!r}"


def test_a_misspelt_field_would_be_found() -> None:
    with pytest.raises(AssertionError, match="canaryTraficPercent"):
        _require_fields({"canaryTraficPercent": 10}, fields("v1beta1_predictor_spec"))


@pytest.mark.parametrize("part", KSERVE)
def test_its_containers_take_their_arguments_and_a_release_that_cannot_change(part: str) -> None:
    known = set(re.findall(r'"(--[a-z_]+)"', (sdk_package() / "model_server.py").read_text()))
    known |= set(re.findall(r'"(--[a-z_]+)"', (ROOT / "src/evernear/serving/kserve/command.py").read_text()))
    spec = service(part)["spec"]
    for component in [spec["predictor"], *filter(None, [spec.get("transformer")]), *_canaries(spec)]:
        (container,) = component["containers"]
        assert container["name"] == "kserve-container"
        python, dash_m, module = container["command"]
        assert (python, dash_m) == ("python", "-m")
        assert (ROOT / "src" / (module.replace(".", "/") + ".py")).exists()
        assert {argument.partition("=")[0] for argument in container["args"]} <= known
        assert f"--http_port={container['ports'][0]['containerPort']}" in container["args"]
        (uri,) = (variable["value"] for variable in container["env"] if variable["name"] == "STORAGE_URI")
        assert re.fullmatch(rf"s3://evernear/{ARCHIVES}[0-9a-f]{{64}}\.mar", uri)
    if "transformer" in spec:
        predictor, transformer = (_uri(spec[component]) for component in ("predictor", "transformer"))
        assert predictor == transformer


def test_a_canary_in_mode_standard_is_one_that_kserve_lets_in() -> None:
    found = service("kserve, canary")
    stable = found["spec"]["predictor"]
    assert found["metadata"]["annotations"][MODE] == "Standard"
    assert _uri(stable), "KServe wants a stable predictor with a model"
    names = [canary.get("name") for canary in _canaries(found["spec"])]
    assert all(names)
    assert len({*names, stable.get("name")}) == len(names) + 1
    assert 0 < sum(canary["trafficPercent"] for canary in found["spec"]["canary"]) < 100
    for canary in _canaries(found["spec"]):
        assert not {"maxReplicas", "scaleTarget", "scaleMetric", "autoScaling", "workerSpec"} & canary.keys()
        assert canary["minReplicas"] <= stable["minReplicas"]
        assert _uri(canary) != _uri(stable)
        # The container is said again as a whole, and is to differ in its release alone.
        assert _but_for_the_release(canary) == _but_for_the_release(stable)


def test_coming_and_going_a_canary_leaves_the_stable_predictor_as_it_is() -> None:
    """KServe refuses a predictor that is renamed without another model."""
    assert service("kserve")["spec"]["predictor"] == service("kserve, canary")["spec"]["predictor"]


@pytest.mark.parametrize("part", [part for part in KSERVE if "knative" in part])
def test_knative_takes_its_pods(part: str) -> None:
    found = service(part)
    extension = fields("v1beta1_component_extension_spec")
    assert found["metadata"]["annotations"][MODE] == "Knative"
    for component in filter(None, (found["spec"].get(name) for name in ("predictor", "transformer"))):
        assert component.keys() - extension.keys() <= KNATIVE_POD
        assert "deploymentStrategy" not in component
        assert component["scaleMetric"] == "concurrency"
        (container,) = component["containers"]
        (port,) = container["ports"]
        assert container["readinessProbe"]["httpGet"]["port"] == port["containerPort"]


def test_a_canary_in_mode_knative_is_a_share() -> None:
    before, during = (service(part)["spec"] for part in ("kserve, knative", "kserve, knative, canary"))
    share = during["predictor"].pop("canaryTrafficPercent")
    assert 0 < share < 100
    assert during["predictor"] == before["predictor"]


@pytest.mark.parametrize("part", [part for part in KSERVE if "canary" in part])
def test_while_there_are_two_releases_nothing_prepares_images_for_one(part: str) -> None:
    assert "transformer" not in service(part)["spec"]


def test_its_store_is_told_the_way_that_kserve_reads() -> None:
    (account,) = (a for n, a in named(objects("kserve"), "ServiceAccount").items() if n == "evernear-kserve")
    (secret,) = (each["name"] for each in account["secrets"])
    example = (DEPLOY / "secrets.example.yaml").read_text()
    assert f"name: {secret}" in example
    assert re.search(r"serving\.kserve\.io/s3-endpoint: [^/\s]+  #", example), "host:port, without a scheme"
    for part in KSERVE:
        spec = service(part)["spec"]
        for component in filter(None, (spec["predictor"], spec.get("transformer"))):
            assert component["serviceAccountName"] == "evernear-kserve"


def _canaries(spec: Object) -> list[Object]:
    return [canary["predictor"] for canary in spec.get("canary", [])]


def _uri(component: Object) -> str:
    (container,) = component["containers"]
    return next(variable["value"] for variable in container["env"] if variable["name"] == "STORAGE_URI")


def _but_for_the_release(component: Object) -> Object:
    (container,) = component["containers"]
    return container | {"env": [variable for variable in container["env"] if variable["name"] != "STORAGE_URI"]}
