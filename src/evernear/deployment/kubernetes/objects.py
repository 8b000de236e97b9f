"""A release's Kubernetes objects, as plain dicts. ``evernear deployment render`` prints them.

Start at `serving_objects`. `pod_template` has the pods, `evernear.serving.pod` their commands.
"""

from copy import deepcopy
from urllib.parse import urlsplit

from evernear.deployment.kubernetes.cluster import (
    ARCHIVE_SHA256,
    COMMON_LABELS,
    MANIFEST_SHA256,
    RELEASE,
    VERSION,
    WATCHER,
    Tree,
    selector,
)
from evernear.deployment.kubernetes.pod_template import ServedRelease, pod_template, settings_file
from evernear.errors import SettingsError
from evernear.settings import KubernetesSettings, RunSettings, ServingSettings

STORE_PORTS = (443, 8333, 9000)
"""HTTPS, SeaweedFS, MinIO."""
CPU_TARGET_PERCENT = 70
"""CPU utilization at which the HorizontalPodAutoscaler adds pods. A pod needs half a minute to
start, and the remaining 30% answer what arrives meanwhile."""


def serving_objects(settings: RunSettings, release: ServedRelease, owners: Tree | None = None) -> list[Tree]:
    """All Kubernetes objects for ``release``, in the order in which they are applied.

    ``owners`` is the PodTemplate with which the cluster's owner adds to the pods.
    """
    require_usable(settings)
    kubernetes = settings.kubernetes
    labels = selector(kubernetes) | COMMON_LABELS | {VERSION: release.version}
    annotations = {
        RELEASE: release.version,
        MANIFEST_SHA256: release.manifest_sha256,
        ARCHIVE_SHA256: release.archive_sha256,
    }
    config = settings_file(settings)
    template = pod_template(settings, release, labels, annotations, config, _additions(owners))
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


def _additions(owners: Tree | None) -> Tree:
    """The pod of the owner's PodTemplate. It names one of our containers for what that one gets."""
    if owners is None:
        return {}
    template: Tree = deepcopy(owners["template"])
    metadata = template.get("metadata") or {}
    return template | {"metadata": {name: metadata.get(name) or {} for name in ("labels", "annotations")}}


def require_usable(settings: RunSettings) -> None:
    """Check that pods with these settings can start and read the store."""
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


def _deployment(kubernetes: KubernetesSettings, template: Tree) -> Tree:
    """Without the ``replicas`` field, which the autoscaler owns."""
    return {
        "selector": {"matchLabels": selector(kubernetes)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "progressDeadlineSeconds": kubernetes.rollout_timeout_s,
        "revisionHistoryLimit": 3,
        "template": template,
    }


def _autoscaler(kubernetes: KubernetesSettings) -> Tree:
    target = {"type": "Utilization", "averageUtilization": CPU_TARGET_PERCENT}
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
    """Permits the eviction of one pod at a time, even of the only one, so nodes can be drained."""
    return {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector(kubernetes)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def _network_policy(kubernetes: KubernetesSettings, serving: ServingSettings) -> Tree:
    """This namespace and the client namespaces can access the inference ports. The watcher and the
    monitoring namespaces can access the metrics port. Nobody can access the management API."""

    def namespace(name: str) -> Tree:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    def ports(*numbers: int, protocol: str = "TCP") -> list[Tree]:
        return [{"port": number, "protocol": protocol} for number in numbers]

    clients = [{"podSelector": {}}, *map(namespace, kubernetes.client_namespaces)]
    ingress = [{"from": clients, "ports": ports(serving.inference_port, serving.grpc_inference_port)}]
    readers = [{"podSelector": {"matchLabels": WATCHER}}, *map(namespace, kubernetes.metrics_namespaces)]
    ingress.append({"from": readers, "ports": ports(serving.metrics_port)})
    to = kubernetes.egress_ports
    if to is None:
        to = () if kubernetes.store_claim else STORE_PORTS
    servers = [*ports(53, protocol="UDP"), *ports(53, *to)] if to else []
    return {
        "podSelector": {"matchLabels": selector(kubernetes)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [{"ports": servers}] if servers else [],
    }
