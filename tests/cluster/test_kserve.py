"""KServe's predictor at a change of release, under load.

Its pods run in a Deployment, as KServe's mode Standard creates it, without KServe's controller.
"""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import AppsV1Api, CoreV1Api

from evernear.common.store import open_store
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from tests.cluster.sandbox import DEPLOY, Sandbox, create, until
from tests.releases import MakeRelease, PackedRelease
from tests.slow.serving.callers import calling

pytestmark = pytest.mark.cluster
IMAGE = "EVERNEAR_TEST_IMAGE"
NAME = "evernear-predictor"
POD_FIELDS = ("automountServiceAccountToken", "enableServiceLinks", "terminationGracePeriodSeconds", "volumes")


def pod(image: str, store: str, release: PackedRelease) -> dict[str, Any]:
    """The predictor's pod of `deploy/overlays/kserve`, which loads a release from the registry
    itself, because KServe's storage initializer is absent."""
    file = DEPLOY / "overlays" / "kserve" / "inferenceservice.yaml"
    (service,) = (each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "InferenceService")
    predictor = service["spec"]["predictor"]
    (container,) = predictor["containers"]
    arguments = [word for word in container["args"] if not word.startswith("--model_dir")]
    container |= {
        "image": image,
        "args": [*arguments, f"--store={store}", f"--release={release.version}"],
        "envFrom": [{"secretRef": {"name": "evernear-s3-reader"}}],
        "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": container["resources"]["limits"]},
    }
    return {"containers": [container], **{name: predictor[name] for name in POD_FIELDS}}


def deployment(image: str, store: str, release: PackedRelease) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": NAME}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME, "labels": labels},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels}, "spec": pod(image, store, release)},
        },
    }


def service() -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": NAME}
    spec = {"type": "NodePort", "selector": labels, "ports": [{"port": 80, "targetPort": 8080}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME, "labels": labels}, "spec": spec}


def test_change_of_release_under_load_fails_no_request(
    cluster_sandbox: Sandbox, make_release: MakeRelease, tmp_path: Path
) -> None:
    image = os.environ.get(IMAGE)
    if not image:
        pytest.skip(f"needs {IMAGE}")
    first, second = make_release(), make_release()
    registry = Registry(open_store(cluster_sandbox.store))
    for release in (first, second):
        registry.publish(release.archive)
    apps, core = AppsV1Api(cluster_sandbox.admin), CoreV1Api(cluster_sandbox.admin)
    create(cluster_sandbox.admin, cluster_sandbox.namespace, deployment(image, cluster_sandbox.store, first), service())

    def is_rolled_out() -> bool:
        found = apps.read_namespaced_deployment(NAME, cluster_sandbox.namespace)
        pods = core.list_namespaced_pod(
            cluster_sandbox.namespace, label_selector=f"app.kubernetes.io/name={NAME}"
        ).items
        is_current = found.status.observed_generation == found.metadata.generation
        return is_current and found.status.updated_replicas == found.status.ready_replicas == len(pods) == 2

    until(is_rolled_out, cluster_sandbox.rollout_timeout_s)
    port = core.read_namespaced_service(NAME, cluster_sandbox.namespace).spec.ports[0].node_port
    addresses = core.list_node().items[0].status.addresses
    host = next(address.address for address in addresses if address.type == "InternalIP")
    query, _ = open_release(first.archive, tmp_path / "release").smoke_queries()[0]
    body = json.dumps({"instances": [{"data": base64.b64encode(query).decode()}]}).encode()
    path = "/v1/models/embedding:predict"
    with calling(port, body, "", clients=8, pause_s=0.02, host=host, path=path) as calls:
        until(lambda: calls.predictions[first.version] >= 500, timeout_s=120)
        patch = {"spec": {"template": {"spec": pod(image, cluster_sandbox.store, second)}}}
        apps.patch_namespaced_deployment(NAME, cluster_sandbox.namespace, patch)
        until(is_rolled_out, cluster_sandbox.rollout_timeout_s)
        until(lambda: calls.predictions[second.version] >= 500, timeout_s=120)
    assert calls.failures == []
