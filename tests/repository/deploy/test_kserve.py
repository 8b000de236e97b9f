"""The InferenceService is valid for KServe 0.21: fields by its SDK, pods by Kubernetes, canaries by
its webhook.

The webhook's rules are those of ``inference_service_validation.go`` (most are in `webhooks`), and
of Knative's ``fieldmask.go`` for its pods.
"""

import ast
import re
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest

from evernear.release.records import ARCHIVES
from evernear.serving.http.app import SHUTDOWN_TIMEOUT_S
from evernear.serving.http.kserve import arguments
from evernear.serving.http.limits import DRAIN_S
from evernear.serving.pod import ENDPOINT_REMOVAL_S
from tests import ROOT
from tests.loopback.kubernetes import webhooks
from tests.repository.deploy.rendered import DEPLOY, NEWEST, PARTS, Object, named, objects

SDK = ROOT / ".venv/clients"
KSERVE = [part for part in PARTS if part.startswith("kserve")]
MODE = "serving.kserve.io/deploymentMode"
# Pod fields used here that Knative accepts without a feature flag.
KNATIVE_POD = {"containers", "volumes", "serviceAccountName", "automountServiceAccountToken", "enableServiceLinks"}


@cache
def sdk_package() -> Path:
    packages = [*SDK.glob("lib/python*/site-packages/kserve")]
    if not packages:
        pytest.skip("KServe's SDK is not installed; `make .venv/clients/.installed` installs it")
    return packages[0]


@cache
def fields(model: str) -> dict[str, str]:
    """Field types of an SDK model by JSON key, parsed from its source because importing the SDK
    takes seconds."""
    tree = ast.parse((sdk_package() / "models" / f"{model}.py").read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)}
    return {values["attribute_map"][name]: kind for name, kind in values["openapi_types"].items()}


def service(part: str) -> Object:
    return named(objects(part), "InferenceService")["evernear"]


@pytest.mark.parametrize("part", KSERVE)
def test_fields_are_valid_for_kserve_and_kubernetes(part: str) -> None:
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
        expected = {"int": int, "str": str, "bool": bool}.get(known[key])
        assert expected is None or type(value) is expected, f"{key}: {value!r}"


@pytest.mark.parametrize("part", KSERVE)
def test_containers_get_known_arguments_and_an_immutable_release(part: str) -> None:
    known = {option for action in arguments()._actions for option in action.option_strings}
    spec = service(part)["spec"]
    for component in [spec["predictor"], *filter(None, [spec.get("transformer")]), *_canaries(spec)]:
        (container,) = component["containers"]
        assert container["name"] == "kserve-container"
        assert container["command"] == ["python", "-m", "evernear.serving.http"]
        assert {argument.partition("=")[0] for argument in container["args"]} <= known
        assert f"--http_port={container['ports'][0]['containerPort']}" in container["args"]
        (uri,) = (variable["value"] for variable in container["env"] if variable["name"] == "STORAGE_URI")
        assert re.fullmatch(rf"s3://evernear/{ARCHIVES}[0-9a-f]{{64}}\.mar", uri)
    if "transformer" in spec:
        predictor, transformer = (_uri(spec[component]) for component in ("predictor", "transformer"))
        assert predictor == transformer


@pytest.mark.parametrize("part", KSERVE)
def test_webhook_accepts_the_service(part: str) -> None:
    assert webhooks.inference_service(service(part)) == []


def test_standard_canary_passes_the_webhook() -> None:
    inference_service = service("kserve, canary")
    stable = inference_service["spec"]["predictor"]
    assert inference_service["metadata"]["annotations"][MODE] == "Standard"
    assert _uri(stable), "KServe requires a stable predictor with a model"
    names = [canary.get("name") for canary in _canaries(inference_service["spec"])]
    assert all(names)
    assert len({*names, stable.get("name")}) == len(names) + 1
    assert 0 < sum(canary["trafficPercent"] for canary in inference_service["spec"]["canary"]) < 100
    for canary in _canaries(inference_service["spec"]):
        assert not {"maxReplicas", "scaleTarget", "scaleMetric", "autoScaling", "workerSpec"} & canary.keys()
        assert canary["minReplicas"] <= stable["minReplicas"]
        assert _uri(canary) != _uri(stable)
        # A canary repeats the whole container, which may differ only in its release.
        assert _without_release(canary) == _without_release(stable)


def test_canary_does_not_change_the_stable_predictor() -> None:
    """KServe rejects a renamed predictor whose model is unchanged."""
    assert service("kserve")["spec"]["predictor"] == service("kserve, canary")["spec"]["predictor"]


@pytest.mark.parametrize("part", [part for part in KSERVE if "knative" not in part])
def test_replaced_pod_answers_until_clients_have_left_it(part: str) -> None:
    spec = service(part)["spec"]
    components = [spec["predictor"], *filter(None, [spec.get("transformer")])]
    for component in components:
        assert component["terminationGracePeriodSeconds"] > ENDPOINT_REMOVAL_S + DRAIN_S + SHUTDOWN_TIMEOUT_S
    for component in (*components, *_canaries(spec)):
        (container,) = component["containers"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(ENDPOINT_REMOVAL_S)]


@pytest.mark.parametrize("part", [part for part in KSERVE if "knative" in part])
def test_knative_accepts_the_pods(part: str) -> None:
    inference_service = service(part)
    extension = fields("v1beta1_component_extension_spec")
    assert inference_service["metadata"]["annotations"][MODE] == "Knative"
    for component in filter(None, (inference_service["spec"].get(name) for name in ("predictor", "transformer"))):
        assert component.keys() - extension.keys() <= KNATIVE_POD
        assert "deploymentStrategy" not in component
        assert component["scaleMetric"] == "concurrency"
        (container,) = component["containers"]
        assert "lifecycle" not in container
        (port,) = container["ports"]
        assert container["readinessProbe"]["httpGet"]["port"] == port["containerPort"]


def test_knative_canary_differs_only_in_its_traffic_percentage() -> None:
    before, during = (service(part)["spec"] for part in ("kserve, knative", "kserve, knative, canary"))
    share = during["predictor"].pop("canaryTrafficPercent")
    assert 0 < share < 100
    assert during["predictor"] == before["predictor"]


@pytest.mark.parametrize("part", [part for part in KSERVE if "canary" in part])
def test_canary_has_no_transformer(part: str) -> None:
    assert "transformer" not in service(part)["spec"]


def test_store_credentials_use_kserves_annotations_and_service_account() -> None:
    (account,) = (a for n, a in named(objects("kserve"), "ServiceAccount").items() if n == "evernear-kserve")
    (secret,) = (secret_ref["name"] for secret_ref in account["secrets"])
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


def _without_release(component: Object) -> Object:
    (container,) = component["containers"]
    return container | {"env": [variable for variable in container["env"] if variable["name"] != "STORAGE_URI"]}
