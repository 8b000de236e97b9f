"""The pod template of a release: its containers, probes, volumes and settings file."""

import json
import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from evernear.common.disk import sha256_bytes
from evernear.deployment.kubernetes.cluster import REVISION, SETTINGS_SHA256, Tree, selector
from evernear.index.description import VECTORS_FILE
from evernear.release.records import Record
from evernear.serving.pod import ENDPOINT_REMOVAL_S, GRACE_PERIOD_S, pod_memory
from evernear.settings import KubernetesSettings, RunSettings
from evernear.settings.serving import RESPONSE_TIMEOUT_S, STARTUP_TIMEOUT_S

CONTAINER = "torchserve"
S3_SECRET = "evernear-s3-reader"  # noqa: S105 - a name
"""Secret with the AWS_ variables of the init container. It is optional, because a pod may have
another identity."""
USER = 65532  # the user in Dockerfile.serve and Dockerfile.train
POD_SECURITY: Tree = {
    "runAsNonRoot": True,
    # Controllers and service meshes add containers whose image may run as root. The kubelet does
    # not start these if only runAsNonRoot is set.
    "runAsUser": USER,
    "runAsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Tree = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
WORKDIR = "/evernear"
CONFIG_DIR = "/etc/evernear"
CONFIG_FILE = f"{CONFIG_DIR}/evernear.toml"
TOKEN_DIR = "/var/run/evernear"  # noqa: S105 - a directory, not a token
PROBE_S = 5
PROBE_TIMEOUT_S = 5
START_PROBE_TIMEOUT_S = 30  # Python starts and sends all stored queries


@dataclass(frozen=True)
class ServedRelease:
    """The facts about a release that its Kubernetes objects contain."""

    version: str
    archive_sha256: str
    manifest_sha256: str
    index_size_bytes: int = 0
    worker_parts_size_bytes: int = 0
    """Total size of the parts that each worker loads separately, in bytes."""

    @staticmethod
    def of(record: Record) -> "ServedRelease":
        manifest = record.manifest
        sizes_bytes = {name: part.size_bytes for name, part in manifest.parts.items()}
        return ServedRelease(
            manifest.version,
            record.archive_sha256,
            sha256_bytes(manifest.to_json()),
            index_size_bytes=sizes_bytes.pop(VECTORS_FILE, 0),
            worker_parts_size_bytes=sum(sizes_bytes.values()),
        )

    def memory(self, settings: RunSettings) -> str:
        """Memory request and limit of a pod. Raises the errors of `pod_memory`."""
        return pod_memory(settings, self.index_size_bytes, self.worker_parts_size_bytes)


def settings_file(settings: RunSettings) -> str:
    """Default values are omitted, because the image may contain a different evernear version."""
    serving = settings.serving.model_dump(mode="json", exclude_defaults=True)
    # A JSON scalar is valid TOML.
    lines = (f"{name} = {json.dumps(value)}" for name, value in sorted(serving.items()))
    return "\n".join(["[serving]", *lines, ""])


def pod_template(
    settings: RunSettings,
    release: ServedRelease,
    labels: dict[str, str],
    annotations: dict[str, str],
    config: str,
    additions: Tree,
) -> Tree:
    """``config`` is the text of the `settings_file`. If it changes, the pods are replaced.
    ``additions`` is the template of the owner's PodTemplate, or empty."""
    annotations = annotations | {SETTINGS_SHA256: sha256_bytes(config.encode())}
    own = {"metadata": {"labels": labels, "annotations": annotations}, "spec": _pod(settings, release)}
    template = with_additions(own, additions)
    revision = sha256_bytes(json.dumps(template, sort_keys=True).encode())[:12]
    template["metadata"]["labels"][REVISION] = revision
    return template


def with_additions(own: Any, additions: Any) -> Any:
    """``own`` with what ``additions`` has besides: keys of mappings, and items of lists.

    Items are the same if they have the same name (a volume mount: the same path), as in a strategic
    merge patch. A value that ``own`` sets stays, so that a release runs as it was verified.
    """
    if isinstance(own, dict) and isinstance(additions, dict):
        common = {key: with_additions(own[key], additions[key]) for key in own.keys() & additions.keys()}
        return additions | own | common
    if isinstance(own, list) and isinstance(additions, list):
        added = {_identity(item): item for item in additions}
        items = [with_additions(item, added.pop(_identity(item), None)) for item in own]
        return [*items, *added.values()]
    return own


def _identity(item: Any) -> str:
    name = item.get("mountPath") or item.get("name") if isinstance(item, dict) else None
    return name or json.dumps(item, sort_keys=True)


def _pod(settings: RunSettings, release: ServedRelease) -> Tree:
    kubernetes = settings.kubernetes
    return {
        "serviceAccountName": kubernetes.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY | {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
        "terminationGracePeriodSeconds": GRACE_PERIOD_S,
        "topologySpreadConstraints": [
            _spread(kubernetes, "kubernetes.io/hostname"),
            _spread(kubernetes, "topology.kubernetes.io/zone"),
        ],
        "initContainers": [_init_container(settings, release), *_shippers(settings, release)],
        "containers": [_container(settings, release)],
        "volumes": _volumes(kubernetes),
    }


def _init_container(settings: RunSettings, release: ServedRelease) -> Tree:
    """Downloads the archive. Only this container has the object store credentials of
    `S3_SECRET`."""
    kubernetes = settings.kubernetes
    command = ["fetch", "--release", release.version, "--sha256", release.archive_sha256]
    container = _any_container(settings, release, "fetch", command)
    container["env"].append({"name": "EVERNEAR_STORE", "value": settings.store_uri})
    if kubernetes.store_claim:
        container["volumeMounts"].append(
            {"name": "store", "mountPath": unquote(urlsplit(settings.store_uri).path), "readOnly": True}
        )
    else:
        container["envFrom"] = [{"secretRef": {"name": S3_SECRET, "optional": True}}]
    return container


def _shippers(settings: RunSettings, release: ServedRelease) -> list[Tree]:
    """The sidecar uploads logged queries with its own credentials, and ends after TorchServe."""
    secret = settings.kubernetes.query_secret
    if not secret or settings.serving.query_log == "off":
        return []
    container = _any_container(settings, release, "ship", [])
    container["env"].append({"name": "EVERNEAR_STORE", "value": settings.store_uri})
    return [
        container
        | {
            "restartPolicy": "Always",
            "command": ["evernear", "watch", "--ship", "--config", CONFIG_FILE],
            "envFrom": [{"secretRef": {"name": secret}}],
            "resources": {
                "requests": {"cpu": "20m", "memory": "128Mi"},
                "limits": {"cpu": "200m", "memory": "256Mi"},
            },
        }
    ]


def _container(settings: RunSettings, release: ServedRelease) -> Tree:
    """The management API is bound to loopback, and cannot be reached from outside the pod."""
    serving, kubernetes = settings.serving, settings.kubernetes
    command = ["serve"] if kubernetes.token_secret else ["serve", "--without-token"]
    container = _any_container(settings, release, CONTAINER, command)
    if kubernetes.token_secret:
        container["env"].append({"name": "EVERNEAR_TOKEN_FILE", "value": f"{TOKEN_DIR}/token"})
        container["volumeMounts"].append({"name": "token", "mountPath": TOKEN_DIR, "readOnly": True})
    starts = math.ceil(STARTUP_TIMEOUT_S / PROBE_S)
    alive = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": PROBE_S}
    return container | {
        "ports": [
            {"name": "http", "containerPort": serving.inference_port, "protocol": "TCP"},
            {"name": "grpc", "containerPort": serving.grpc_inference_port, "protocol": "TCP"},
            {"name": "metrics", "containerPort": serving.metrics_port, "protocol": "TCP"},
        ],
        "startupProbe": {
            "exec": {"command": _command("ready")},
            "periodSeconds": PROBE_S,
            "timeoutSeconds": START_PROBE_TIMEOUT_S,
            "failureThreshold": starts,
        },
        "readinessProbe": alive | {"timeoutSeconds": PROBE_TIMEOUT_S, "failureThreshold": 2},
        # TorchServe restarts dead workers. The container is restarted only if TorchServe cannot.
        "livenessProbe": alive | {"timeoutSeconds": RESPONSE_TIMEOUT_S, "failureThreshold": starts},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(ENDPOINT_REMOVAL_S)]}}},
    }


def _any_container(settings: RunSettings, release: ServedRelease, name: str, command: list[str]) -> Tree:
    kubernetes = settings.kubernetes
    amount = {"cpu": kubernetes.cpu, "memory": release.memory(settings)}
    return {
        "name": name,
        "image": kubernetes.image,
        "imagePullPolicy": "IfNotPresent",
        "command": _command(*command),
        "env": [{"name": "EVERNEAR_WORKDIR", "value": WORKDIR}],
        "resources": {"requests": dict(amount), "limits": dict(amount)},
        "securityContext": CONTAINER_SECURITY | {"readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "work", "mountPath": WORKDIR},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - of the container, an emptyDir
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        ],
    }


def _command(*words: str) -> list[str]:
    return ["evernear", "pod", *words, "--config", CONFIG_FILE]


def _volumes(kubernetes: KubernetesSettings) -> list[Tree]:
    volumes: list[Tree] = [
        {"name": "work", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "config", "configMap": {"name": kubernetes.name}},
    ]
    if kubernetes.store_claim:
        volumes.append(
            {"name": "store", "persistentVolumeClaim": {"claimName": kubernetes.store_claim, "readOnly": True}}
        )
    if kubernetes.token_secret:
        volumes.append({"name": "token", "secret": {"secretName": kubernetes.token_secret, "defaultMode": 0o440}})
    return volumes


def _spread(kubernetes: KubernetesSettings, key: str) -> Tree:
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(kubernetes)},
        "matchLabelKeys": [REVISION],  # terminating pods do not count
    }
