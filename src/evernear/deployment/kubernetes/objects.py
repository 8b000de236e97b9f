"""The Kubernetes objects of a release as plain dicts, which
``evernear deployment render`` prints.

Start at `serving_objects`. The containers' commands are in `evernear.serving.pod`.
"""

import json
import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from kubernetes.utils import parse_quantity

from evernear.common.disk import sha256_bytes
from evernear.errors import SettingsError
from evernear.index.description import VECTORS_FILE
from evernear.release.records import Record
from evernear.serving.pod import grace_period_s, pod_memory
from evernear.settings import KubernetesSettings, RunSettings, ServingSettings

Tree = dict[str, Any]

OTLP_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
PREFIX = "evernear.dev"
RELEASE = f"{PREFIX}/release"
MANIFEST_SHA256 = f"{PREFIX}/manifest-sha256"
ARCHIVE_SHA256 = f"{PREFIX}/archive-sha256"
SETTINGS_SHA256 = f"{PREFIX}/settings-sha256"
REVISION = f"{PREFIX}/revision"
"""A pod label with a hash of the pod template. It selects the pods of one rollout."""
VERSION = "app.kubernetes.io/version"
COMMON_LABELS = {"app.kubernetes.io/part-of": "evernear", "app.kubernetes.io/managed-by": "evernear"}
WATCHER = {"app.kubernetes.io/name": "evernear", "app.kubernetes.io/component": "watch"}
"""The labels of the watcher's pod. The watcher compares releases after a rollout."""
CONTAINER = "torchserve"
USER = 65532  # the user in Dockerfile.serve
WORKDIR = "/evernear"
CONFIG_DIR = "/etc/evernear"
CONFIG_FILE = f"{CONFIG_DIR}/evernear.toml"
TOKEN_DIR = "/var/run/evernear"  # noqa: S105 - a directory, not a token
PROBE_S = 5
PROBE_TIMEOUT_S = 5
START_PROBE_TIMEOUT_S = 30  # Python starts and sends all stored queries


@dataclass(frozen=True)
class ServedRelease:
    """The facts about a release that the objects contain."""

    version: str
    archive_sha256: str
    manifest_sha256: str
    index_size_bytes: int = 0
    worker_parts_size_bytes: int = 0
    """Total size of the parts that each worker loads separately, in bytes."""

    @staticmethod
    def of(record: Record) -> "ServedRelease":
        """The facts about a published release."""
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
        """Memory request and limit of a pod. Raises the same errors as `pod_memory`."""
        return pod_memory(settings, self.index_size_bytes, self.worker_parts_size_bytes)


def serving_objects(settings: RunSettings, release: ServedRelease) -> list[Tree]:
    """All objects of ``release``, in the order in which they are applied.

    Raises:
            SettingsError: no image is set, pods cannot reach the store,
                or their memory is insufficient.
    """
    _require_usable(settings)
    kubernetes = settings.kubernetes
    labels = selector(kubernetes) | COMMON_LABELS | {VERSION: release.version}
    annotations = {
        RELEASE: release.version,
        MANIFEST_SHA256: release.manifest_sha256,
        ARCHIVE_SHA256: release.archive_sha256,
    }
    config = _config(settings)
    template = _pod_template(settings, release, labels, annotations, config)
    bodies = [
        ("v1", "ServiceAccount", {"automountServiceAccountToken": False}),
        ("v1", "ConfigMap", {"data": {"evernear.toml": config}}),
        ("networking.k8s.io/v1", "NetworkPolicy", {"spec": _network_policy(kubernetes, settings.serving)}),
        ("policy/v1", "PodDisruptionBudget", {"spec": _disruption_budget(kubernetes)}),
        ("v1", "Service", {"spec": _service(kubernetes, settings.serving)}),
        ("apps/v1", "Deployment", {"spec": _deployment(kubernetes, template)}),
        ("autoscaling/v2", "HorizontalPodAutoscaler", {"spec": _autoscaler(kubernetes)}),
    ]
    metadata = {
        "name": kubernetes.name,
        "namespace": kubernetes.namespace,
        "labels": labels,
        "annotations": annotations,
    }
    return [{"apiVersion": version, "kind": kind, "metadata": metadata, **body} for version, kind, body in bodies]


def selector(kubernetes: KubernetesSettings) -> dict[str, str]:
    """The immutable labels that select the pods."""
    return {
        "app.kubernetes.io/name": "evernear",
        "app.kubernetes.io/instance": kubernetes.name,
        "app.kubernetes.io/component": "serving",
    }


def _require_usable(settings: RunSettings) -> None:
    if not settings.kubernetes.image:
        raise SettingsError(
            "A deployment to Kubernetes needs the serving image by its digest; "
            "add --set kubernetes.image=REGISTRY/evernear-serve@sha256:..."
        )
    local, claim = urlsplit(settings.store_uri).scheme == "file", settings.kubernetes.store_claim
    if local and not claim:
        raise SettingsError(
            f"Pods cannot read the store {settings.store_uri}; use s3://bucket/prefix, "
            "or set the PersistentVolumeClaim that contains it with --set kubernetes.store_claim=NAME."
        )
    if claim and not local:
        raise SettingsError(
            f"kubernetes.store_claim={claim} is for a store file:///path, and the store is {settings.store_uri}."
        )
    if claim and settings.kubernetes.query_secret:
        raise SettingsError(
            f"kubernetes.query_secret={settings.kubernetes.query_secret} is for an object store: "
            f"what the pods mount from {claim} is read-only; leave one of the two empty."
        )


def _config(settings: RunSettings) -> str:
    """The pod's settings file, without defaults, because the image may contain a
    different evernear version."""
    serving = settings.serving.model_dump(mode="json", exclude_defaults=True) | {"threads": _threads(settings)}
    # A JSON scalar is valid TOML.
    lines = (f"{name} = {json.dumps(value)}" for name, value in sorted(serving.items()))
    return "\n".join(["[serving]", *lines, ""])


def _threads(settings: RunSettings) -> int:
    """Number of threads of each worker (its OMP_NUM_THREADS): the CPU limit less one
    CPU for Java, divided by the number of workers.

    Oversubscribed threads wait for each other. See benchmarks/results/serving.md.
    """
    if settings.serving.threads != ServingSettings().threads:
        return settings.serving.threads
    return max(1, (int(parse_quantity(settings.kubernetes.cpu)) - 1) // settings.serving.workers)


def _pod_template(
    settings: RunSettings, release: ServedRelease, labels: dict[str, str], annotations: dict[str, str], config: str
) -> Tree:
    annotations = annotations | {SETTINGS_SHA256: sha256_bytes(config.encode())}
    spec = _pod(settings, release)
    revision = sha256_bytes(json.dumps([labels, annotations, spec], sort_keys=True).encode())[:12]
    return {"metadata": {"labels": labels | {REVISION: revision}, "annotations": annotations}, "spec": spec}


def _pod(settings: RunSettings, release: ServedRelease) -> Tree:
    kubernetes = settings.kubernetes
    spec: Tree = {
        "serviceAccountName": kubernetes.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": grace_period_s(settings.serving),
        "topologySpreadConstraints": [
            _spread(kubernetes, "kubernetes.io/hostname"),
            _spread(kubernetes, "topology.kubernetes.io/zone"),
        ],
        "initContainers": [_init_container(settings, release), *_shippers(settings, release)],
        "containers": [_container(settings, release)],
        "volumes": _volumes(kubernetes),
    }
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    if kubernetes.node_selector:
        spec["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in kubernetes.tolerations]
    return spec


def _init_container(settings: RunSettings, release: ServedRelease) -> Tree:
    """The container that downloads the archive.
    Only this container has the keys of the object store."""
    kubernetes = settings.kubernetes
    command = ["fetch", "--release", release.version, "--sha256", release.archive_sha256]
    container = _any_container(settings, release, "fetch", command)
    container["env"].append({"name": "EVERNEAR_STORE", "value": settings.store_uri})
    if kubernetes.store_claim:
        container["volumeMounts"].append(
            {"name": "store", "mountPath": unquote(urlsplit(settings.store_uri).path), "readOnly": True}
        )
    elif kubernetes.s3_secret:
        container["envFrom"] = [{"secretRef": {"name": kubernetes.s3_secret}}]
    return container


def _shippers(settings: RunSettings, release: ServedRelease) -> list[Tree]:
    """The sidecar that uploads logged queries with separate keys.
    A sidecar ends after TorchServe."""
    secret = settings.kubernetes.query_secret
    if not secret or settings.serving.query_log == "off":
        return []
    container = _any_container(settings, release, "ship", [])
    container["env"].append({"name": "EVERNEAR_STORE", "value": settings.store_uri})
    return [
        container
        | {
            "restartPolicy": "Always",
            "command": ["evernear", "watch", "ship", "--config", CONFIG_FILE],
            "envFrom": [{"secretRef": {"name": secret}}],
            "resources": {
                "requests": {"cpu": "20m", "memory": "128Mi"},
                "limits": {"cpu": "200m", "memory": "256Mi"},
            },
        }
    ]


def _container(settings: RunSettings, release: ServedRelease) -> Tree:
    """The TorchServe container. Its management API is bound to loopback, and is
    unreachable from outside the pod."""
    serving, kubernetes = settings.serving, settings.kubernetes
    command = ["serve"] if kubernetes.token_secret else ["serve", "--without-token"]
    container = _any_container(settings, release, CONTAINER, command)
    if kubernetes.token_secret:
        container["env"].append({"name": "EVERNEAR_TOKEN_FILE", "value": f"{TOKEN_DIR}/token"})
        container["volumeMounts"].append({"name": "token", "mountPath": TOKEN_DIR, "readOnly": True})
    if kubernetes.otlp_endpoint:
        container["env"].append({"name": OTLP_ENDPOINT_VARIABLE, "value": kubernetes.otlp_endpoint})
    if kubernetes.milvus_secret:
        container["envFrom"] = [{"secretRef": {"name": kubernetes.milvus_secret}}]
    if kubernetes.gpus:
        container["resources"]["limits"]["nvidia.com/gpu"] = str(kubernetes.gpus)
    starts = math.ceil(serving.startup_timeout_s / PROBE_S)
    alive = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": PROBE_S}
    # Not read from the ConfigMap: while pods are replaced, the mounted file already
    # contains their successors' settings.
    drain = ["evernear", "pod", "drain", "--set", f"serving.endpoint_removal_s={serving.endpoint_removal_s}"]
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
        # TorchServe restarts dead workers.
        # The container is restarted only if TorchServe cannot restart its workers.
        "livenessProbe": alive | {"timeoutSeconds": serving.response_timeout_s, "failureThreshold": starts},
        "lifecycle": {"preStop": {"exec": {"command": drain}}},
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
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
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


def _deployment(kubernetes: KubernetesSettings, template: Tree) -> Tree:
    """The Deployment without ``replicas``, because the autoscaler owns this field."""
    return {
        "selector": {"matchLabels": selector(kubernetes)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "progressDeadlineSeconds": kubernetes.rollout_timeout_s,
        "revisionHistoryLimit": 3,
        "template": template,
    }


def _autoscaler(kubernetes: KubernetesSettings) -> Tree:
    target = {"type": "Utilization", "averageUtilization": kubernetes.cpu_target_percent}
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": kubernetes.name},
        "minReplicas": kubernetes.replicas_min,
        "maxReplicas": kubernetes.replicas_max,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }


def _service(kubernetes: KubernetesSettings, serving: ServingSettings) -> Tree:
    def port(name: str, number: int, protocol: str) -> Tree:
        return {"name": name, "port": number, "targetPort": name, "protocol": "TCP", "appProtocol": protocol}

    return {
        "type": "ClusterIP",
        "selector": selector(kubernetes),
        "ports": [
            port("http", serving.inference_port, "http"),
            port("grpc", serving.grpc_inference_port, "kubernetes.io/h2c"),
            port("metrics", serving.metrics_port, "http"),
        ],
    }


def _disruption_budget(kubernetes: KubernetesSettings) -> Tree:
    """The disruption budget, which permits the eviction of one pod at a time. A single
    replica may be evicted too, because its node could otherwise never be drained."""
    return {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector(kubernetes)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def _network_policy(kubernetes: KubernetesSettings, serving: ServingSettings) -> Tree:
    """The network policy. This namespace and the client namespaces have access to
    inference, and the watcher and monitoring have access to metrics. The management API
    is inaccessible."""

    def namespace(name: str) -> Tree:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    def ports(*numbers: int, protocol: str = "TCP") -> list[Tree]:
        return [{"port": number, "protocol": protocol} for number in numbers]

    clients = [{"podSelector": {}}, *map(namespace, kubernetes.client_namespaces)]
    ingress = [{"from": clients, "ports": ports(serving.inference_port, serving.grpc_inference_port)}]
    readers = [{"podSelector": {"matchLabels": WATCHER}}, *map(namespace, kubernetes.metrics_namespaces)]
    ingress.append({"from": readers, "ports": ports(serving.metrics_port)})
    # Init containers need DNS and the object store, and servers may need Milvus. With
    # a store on a claim and without Milvus, no egress is needed.
    is_local = kubernetes.store_claim and not kubernetes.milvus_secret
    servers = [] if is_local else [*ports(53, protocol="UDP"), *ports(53, *kubernetes.egress_ports)]
    return {
        "podSelector": {"matchLabels": selector(kubernetes)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [{"ports": servers}] if servers else [],
    }
