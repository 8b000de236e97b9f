"""Default values per kind, from the ``defaults.go`` files of Kubernetes."""

import base64
from typing import Any

from tests.loopback.kubernetes.kinds import (
    AUTOSCALER,
    DEPLOYMENT,
    JOB,
    NAMESPACE,
    NETWORK_POLICY,
    POD,
    POD_TEMPLATE,
    REPLICA_SET,
    SECRET,
    SERVICE,
    Kind,
)

Object = dict[str, Any]
_FILE_MODE = 0o644


def fill(kind: Kind, subject: Object) -> None:
    """Fill in an object's defaults in place."""
    filler = _FILLERS.get(kind)
    if filler:
        filler(subject)


def _deployment(subject: Object) -> None:
    spec = subject["spec"]
    _set(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600)
    strategy = spec.setdefault("strategy", {})
    _set(strategy, type="RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        _set(strategy.setdefault("rollingUpdate", {}), maxSurge="25%", maxUnavailable="25%")
    _pod_spec(spec["template"]["spec"])
    subject.setdefault("status", {})


def _replica_set(subject: Object) -> None:
    _set(subject["spec"], replicas=1)
    _pod_spec(subject["spec"]["template"]["spec"])
    subject.setdefault("status", {"replicas": 0})


def _job(subject: Object) -> None:
    spec = subject["spec"]
    _set(
        spec,
        completionMode="NonIndexed",
        suspend=False,
        manualSelector=False,
        podReplacementPolicy="TerminatingOrFailed",
    )
    if "parallelism" not in spec and "completions" not in spec:
        _set(spec, parallelism=1, completions=1)
    _set(spec, parallelism=1, backoffLimit=2**31 - 1 if "backoffLimitPerIndex" in spec else 6)
    if "podFailurePolicy" in spec:
        spec["podReplacementPolicy"] = "Failed"
    _pod_spec(spec["template"]["spec"])
    subject.setdefault("status", {})


def _pod_template(subject: Object) -> None:
    _pod_spec(subject["template"]["spec"])


def _pod(subject: Object) -> None:
    spec = subject["spec"]
    _pod_spec(spec)
    _set(spec, serviceAccountName="default", serviceAccount="default", enableServiceLinks=True)
    _set(subject.setdefault("status", {}), phase="Pending")


def _pod_spec(spec: Object) -> None:
    _set(
        spec,
        restartPolicy="Always",
        terminationGracePeriodSeconds=30,
        dnsPolicy="ClusterFirst",
        securityContext={},
        schedulerName="default-scheduler",
    )
    if "serviceAccountName" in spec:
        spec["serviceAccount"] = spec["serviceAccountName"]  # the deprecated alias
    for container in [*spec.get("initContainers", ()), *spec.get("containers", ())]:
        _container(container)
    for volume in spec.get("volumes", ()):
        for source in ("configMap", "secret", "projected", "downwardAPI"):
            if source in volume:
                _set(volume[source], defaultMode=_FILE_MODE)
        for part in volume.get("projected", {}).get("sources", ()):
            if "serviceAccountToken" in part:
                _set(part["serviceAccountToken"], expirationSeconds=3600)


def _container(container: Object) -> None:
    _set(
        container,
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
        imagePullPolicy=_pull_policy(container.get("image", "")),
        resources={},
    )
    for port in container.get("ports", ()):
        _set(port, protocol="TCP")
    for variable in container.get("env", ()):
        if "fieldRef" in variable.get("valueFrom", {}):
            _set(variable["valueFrom"]["fieldRef"], apiVersion="v1")
    resources = container["resources"]
    for name, limit in resources.get("limits", {}).items():
        resources.setdefault("requests", {}).setdefault(name, limit)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            _set(container[probe], timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
            _action(container[probe])
    for hook in container.get("lifecycle", {}).values():
        _action(hook)


def _action(action: Object) -> None:
    if "httpGet" in action:
        _set(action["httpGet"], path="/", scheme="HTTP")
    if "grpc" in action:
        _set(action["grpc"], service="")


def _pull_policy(image: str) -> str:
    name = image.rpartition("/")[2]
    return "Always" if "@" not in name and name.partition(":")[2] in ("", "latest") else "IfNotPresent"


def _service(subject: Object) -> None:
    spec = subject.setdefault("spec", {})
    _set(spec, type="ClusterIP", sessionAffinity="None", internalTrafficPolicy="Cluster")
    for port in spec.get("ports", ()):
        _set(port, protocol="TCP")
        _set(port, targetPort=port["port"])
    subject.setdefault("status", {"loadBalancer": {}})


def _network_policy(subject: Object) -> None:
    spec = subject.setdefault("spec", {})
    _set(spec, policyTypes=["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])
    for rule in [*(spec.get("ingress") or ()), *(spec.get("egress") or ())]:
        for port in rule.get("ports") or ():
            _set(port, protocol="TCP")


def _autoscaler(subject: Object) -> None:
    _set(subject["spec"], minReplicas=1)


def _secret(subject: Object) -> None:
    _set(subject, type="Opaque")
    for name, value in (subject.pop("stringData", None) or {}).items():
        subject.setdefault("data", {})[name] = base64.b64encode(value.encode()).decode()


def _namespace(subject: Object) -> None:
    subject["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = subject["metadata"]["name"]
    _set(subject.setdefault("status", {}), phase="Active")


def _set(where: Object, **values: Any) -> None:
    for name, value in values.items():
        where.setdefault(name, value)


_FILLERS = {
    AUTOSCALER: _autoscaler,
    DEPLOYMENT: _deployment,
    JOB: _job,
    NAMESPACE: _namespace,
    NETWORK_POLICY: _network_policy,
    POD: _pod,
    POD_TEMPLATE: _pod_template,
    REPLICA_SET: _replica_set,
    SECRET: _secret,
    SERVICE: _service,
}
