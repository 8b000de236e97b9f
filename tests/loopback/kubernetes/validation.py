"""Validation beyond the schema, after ``validation.go``: names, selectors, immutable fields."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests.loopback.kubernetes import quantities, selectors
from tests.loopback.kubernetes.kinds import (
    AUTOSCALER,
    BUDGET,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    LEASE,
    NAMESPACE,
    POD,
    POD_TEMPLATE,
    REPLICA_SET,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    TRAIN_JOB,
    TRAINING_RUNTIME,
    Kind,
)
from tests.loopback.kubernetes.status import Cause

Object = dict[str, Any]
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_DATA_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_ANNOTATIONS_BYTES = 256 * 1024
_DATA_BYTES = 1024 * 1024
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


def faults(kind: Kind, new: Object, old: Object | None) -> list[Cause]:
    """Return the errors in an object that matches its schema; ``old`` is the object that it
    replaces."""
    causes = [*_metadata(kind, new["metadata"]), *_CHECKS.get(kind, _nothing)(new)]
    if old is not None:
        causes += _immutable(kind, new, old)
    return causes


def _nothing(_: Object) -> Iterator[Cause]:
    return iter(())


def _metadata(kind: Kind, metadata: Object) -> Iterator[Cause]:
    name = metadata["name"]
    if kind in (ROLE, ROLE_BINDING):
        if "/" in name or "%" in name:
            yield invalid("metadata.name", name, "may not contain '/' or '%'")
    elif kind in (SERVICE, TRAIN_JOB) and not _fits(_SERVICE_NAME, name, 63):
        yield invalid("metadata.name", name, "a DNS-1035 label must consist of lower case alphanumeric characters")
    elif kind is NAMESPACE and not _fits(_LABEL, name, 63):
        yield invalid("metadata.name", name, _LABEL_RULE)
    elif not _fits(_SUBDOMAIN, name, 253):
        yield invalid("metadata.name", name, _SUBDOMAIN_RULE)
    yield from _labels("metadata.labels", metadata.get("labels") or {})
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        if not _QUALIFIED.fullmatch(key.lower()):
            yield invalid("metadata.annotations", key, "name part must consist of alphanumeric characters")
    if sum(len(key) + len(value) for key, value in annotations.items()) > _ANNOTATIONS_BYTES:
        yield Cause(
            "metadata.annotations", f"Too long: may not be more than {_ANNOTATIONS_BYTES} bytes", "FieldValueTooLong"
        )


def _labels(path: str, labels: dict[str, str]) -> Iterator[Cause]:
    for key, value in labels.items():
        if not _QUALIFIED.fullmatch(key):
            yield invalid(path, key, "name part must consist of alphanumeric characters, '-', '_' or '.'")
        if not _VALUE.fullmatch(value):
            rule = "must be no more than 63 bytes" if len(value) > 63 else _VALUE_RULE
            yield invalid(path, value, rule)


def _workload(subject: Object) -> Iterator[Cause]:
    spec = subject["spec"]
    if spec.get("replicas", 0) < 0:
        yield invalid("spec.replicas", spec["replicas"], "must be greater than or equal to 0")
    selector, labels = spec["selector"], spec["template"].get("metadata", {}).get("labels") or {}
    if not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield invalid("spec.selector", selector, "empty selector is invalid for deployment")
    elif not selectors.matches(selector, labels):
        yield invalid("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
    yield from _labels("spec.template.metadata.labels", labels)
    yield from _pod_spec("spec.template.spec", spec["template"]["spec"])


def _deployment(subject: Object) -> Iterator[Cause]:
    yield from _workload(subject)
    spec = subject["spec"]
    rolling = spec["strategy"].get("rollingUpdate")
    if spec["strategy"]["type"] == "Recreate" and rolling:
        reason = "may not be specified when strategy `type` is 'Recreate'"
        yield Cause("spec.strategy.rollingUpdate", f"Forbidden: {reason}", "FieldValueForbidden")
    if rolling and all(str(rolling[name]).rstrip("%") == "0" for name in ("maxSurge", "maxUnavailable")):
        reason = "may not be 0 when `maxSurge` is 0"
        yield invalid("spec.strategy.rollingUpdate.maxUnavailable", rolling["maxUnavailable"], reason)
    if spec["progressDeadlineSeconds"] <= spec.get("minReadySeconds", 0):
        reason = "must be greater than minReadySeconds"
        yield invalid("spec.progressDeadlineSeconds", spec["progressDeadlineSeconds"], reason)


def _job(subject: Object) -> Iterator[Cause]:
    """``pkg/apis/batch/validation/validation.go`` of Kubernetes 1.34."""
    spec, template = subject["spec"], subject["spec"]["template"]["spec"]
    yield from _labels("spec.template.metadata.labels", spec["template"].get("metadata", {}).get("labels") or {})
    yield from _pod_spec("spec.template.spec", template)
    if template["restartPolicy"] not in ("Never", "OnFailure"):
        yield invalid("spec.template.spec.restartPolicy", template["restartPolicy"], "must be OnFailure or Never")
    for name in ("parallelism", "completions", "backoffLimitPerIndex", "maxFailedIndexes", "activeDeadlineSeconds"):
        if spec.get(name, 0) < 0:
            yield invalid(f"spec.{name}", spec[name], "must be greater than or equal to 0")
    is_indexed, completions = spec["completionMode"] == "Indexed", spec.get("completions")
    if is_indexed and completions is None:
        reason = "when completion mode is Indexed"
        yield Cause("spec.completions", f"Required value: {reason}", "FieldValueRequired")
    if is_indexed and completions is not None:
        if spec["parallelism"] > 100_000:
            yield invalid("spec.parallelism", spec["parallelism"], "must be less than or equal to 100000")
        longest = f"{subject['metadata']['name']}-{max(completions - 1, 0)}"
        if not _fits(_LABEL, longest, 63):
            yield invalid("metadata.name", subject["metadata"]["name"], f"will not able to create pod: {longest}")
        if "backoffLimitPerIndex" in spec and completions > 100_000 and spec["parallelism"] > 10_000:
            yield invalid("spec.parallelism", spec["parallelism"], "must be less than or equal to 10000")
    if "backoffLimitPerIndex" in spec and not is_indexed:
        yield invalid("spec.backoffLimitPerIndex", spec["backoffLimitPerIndex"], "requires indexed completion mode")
    if "maxFailedIndexes" in spec:
        if "backoffLimitPerIndex" not in spec:
            reason = "when maxFailedIndexes is specified"
            yield Cause("spec.backoffLimitPerIndex", f"Required value: {reason}", "FieldValueRequired")
        elif completions is not None and spec["maxFailedIndexes"] > completions:
            yield invalid(
                "spec.maxFailedIndexes", spec["maxFailedIndexes"], "must be less than or equal to completions"
            )
    yield from _pod_failure_policy(spec, template)


def _pod_failure_policy(spec: Object, template: Object) -> Iterator[Cause]:
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    path = "spec.podFailurePolicy.rules"
    if rules and template["restartPolicy"] != "Never":
        yield invalid(
            "spec.template.spec.restartPolicy", template["restartPolicy"],
            'only "Never" is supported when podFailurePolicy is specified',
        )  # fmt: skip
    for position, rule in enumerate(rules):
        where = f"{path}[{position}]"
        if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in spec:
            yield invalid(f"{where}.action", "FailIndex", "requires the backoffLimitPerIndex to be set")
        codes = rule.get("onExitCodes")
        if (codes is None) == (not rule.get("onPodConditions")):
            yield invalid(where, rule, "specifying one of OnExitCodes and OnPodConditions is required")
        if codes is None:
            continue
        names = [container["name"] for container in template["containers"]]
        if "containerName" in codes and codes["containerName"] not in names:
            yield invalid(
                f"{where}.onExitCodes.containerName", codes["containerName"], "must be one of the container names"
            )
        values = codes["values"]
        if not values or values != sorted(set(values)) or (codes["operator"] == "In" and 0 in values):
            yield invalid(f"{where}.onExitCodes.values", values, "must be ordered, without duplicates and without 0")


def _pod_template(subject: Object) -> Iterator[Cause]:
    yield from _pod_spec("template.spec", subject["template"]["spec"])


def _pod(subject: Object) -> Iterator[Cause]:
    yield from _pod_spec("spec", subject["spec"])


def _pod_spec(path: str, spec: Object) -> Iterator[Cause]:
    if not spec.get("containers"):
        yield Cause(f"{path}.containers", "Required value", "FieldValueRequired")
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    yield from _duplicates(f"{path}.volumes", volumes)
    names: list[str] = []
    for group in ("initContainers", "containers"):
        for position, container in enumerate(spec.get(group) or ()):
            where = f"{path}.{group}[{position}]"
            names.append(container["name"])
            if names.count(container["name"]) > 1:
                yield Cause(f"{where}.name", f"Duplicate value: {json.dumps(container['name'])}", "FieldValueDuplicate")
            yield from _container(where, container, volumes, is_init=group == "initContainers")


def _container(path: str, container: Object, volumes: list[str], *, is_init: bool) -> Iterator[Cause]:
    if not _fits(_LABEL, container["name"], 63):
        yield invalid(f"{path}.name", container["name"], _LABEL_RULE)
    if not container.get("image"):
        yield Cause(f"{path}.image", "Required value", "FieldValueRequired")
    for position, mount in enumerate(container.get("volumeMounts") or ()):
        if mount["name"] not in volumes:
            where = f"{path}.volumeMounts[{position}].name"
            yield Cause(where, f"Not found: {json.dumps(mount['name'])}", "FieldValueNotFound")
    for position, port in enumerate(container.get("ports") or ()):
        if not 0 < port["containerPort"] < 65536:
            where = f"{path}.ports[{position}].containerPort"
            yield invalid(where, port["containerPort"], "must be between 1 and 65535, inclusive")
        if len(port.get("name") or "") > 15:
            yield invalid(f"{path}.ports[{position}].name", port["name"], "must be no more than 15 characters")
    yield from _duplicates(f"{path}.ports", [port["name"] for port in container.get("ports") or () if port.get("name")])
    resources = container.get("resources") or {}
    for name, amount in (resources.get("requests") or {}).items():
        limit = (resources.get("limits") or {}).get(name)
        if limit is not None and quantities.value(amount) > quantities.value(limit):
            reason = f"must be less than or equal to {name} limit of {limit}"
            yield invalid(f"{path}.resources.requests", amount, reason)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe not in container:
            continue
        if is_init and container.get("restartPolicy") != "Always":
            reason = "may not be set for init containers without restartPolicy=Always"
            yield Cause(f"{path}.{probe}", f"Forbidden: {reason}", "FieldValueForbidden")
        if probe != "readinessProbe" and container[probe].get("successThreshold", 1) != 1:
            yield invalid(f"{path}.{probe}.successThreshold", container[probe]["successThreshold"], "must be 1")
        yield from _action(f"{path}.{probe}", container[probe])
    if is_init and container.get("lifecycle") and container.get("restartPolicy") != "Always":
        reason = "may not be set for init containers without restartPolicy=Always"
        yield Cause(f"{path}.lifecycle", f"Forbidden: {reason}", "FieldValueForbidden")


def _action(path: str, probe: Object) -> Iterator[Cause]:
    actions = [name for name in ("exec", "httpGet", "tcpSocket", "grpc") if name in probe]
    if not actions:
        yield Cause(path, "Required value: must specify a handler type", "FieldValueRequired")
    for name in actions[1:]:
        reason = "may not specify more than 1 handler type"
        yield Cause(f"{path}.{name}", f"Forbidden: {reason}", "FieldValueForbidden")


def _service(subject: Object) -> Iterator[Cause]:
    ports = subject["spec"].get("ports") or []
    if not ports and subject["spec"]["type"] != "ExternalName" and subject["spec"].get("clusterIP") != "None":
        yield Cause("spec.ports", "Required value", "FieldValueRequired")
    for position, port in enumerate(ports):
        if len(ports) > 1 and not port.get("name"):
            yield Cause(f"spec.ports[{position}].name", "Required value", "FieldValueRequired")
        if not 0 < port["port"] < 65536:
            yield invalid(f"spec.ports[{position}].port", port["port"], "must be between 1 and 65535, inclusive")
    yield from _duplicates("spec.ports", [port["name"] for port in ports if port.get("name")])


def _budget(subject: Object) -> Iterator[Cause]:
    spec = subject["spec"]
    if "minAvailable" in spec and "maxUnavailable" in spec:
        yield invalid("spec", spec, "minAvailable and maxUnavailable cannot be both set")


def _autoscaler(subject: Object) -> Iterator[Cause]:
    spec = subject["spec"]
    if spec["minReplicas"] < 1:
        yield invalid("spec.minReplicas", spec["minReplicas"], "must be greater than or equal to 1")
    if spec["maxReplicas"] < spec["minReplicas"]:
        reason = "must be greater than or equal to `minReplicas`"
        yield invalid("spec.maxReplicas", spec["maxReplicas"], reason)


def _data(subject: Object) -> Iterator[Cause]:
    data = {**(subject.get("data") or {}), **(subject.get("binaryData") or {})}
    for key in data:
        if not _DATA_KEY.fullmatch(key) or key in (".", ".."):
            yield invalid(
                f"data[{key}]", key, "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"
            )
    if sum(len(value) for value in data.values()) > _DATA_BYTES:
        yield Cause("data", f"Too long: may not be more than {_DATA_BYTES} bytes", "FieldValueTooLong")


def _lease(subject: Object) -> Iterator[Cause]:
    spec = subject.get("spec") or {}
    if spec.get("leaseDurationSeconds", 1) <= 0:
        yield invalid("spec.leaseDurationSeconds", spec["leaseDurationSeconds"], "must be greater than 0")
    if spec.get("leaseTransitions", 0) < 0:
        yield invalid("spec.leaseTransitions", spec["leaseTransitions"], "must be greater than or equal to 0")


def _immutable(kind: Kind, new: Object, old: Object) -> Iterator[Cause]:
    for path in _IMMUTABLE.get(kind, ()):
        if _at(new, path) != _at(old, path):
            yield invalid(path, _at(new, path), "field is immutable")
    if kind in (CONFIG_MAP, SECRET) and old.get("immutable"):
        for name in ("data", "binaryData", "immutable"):
            if new.get(name) != old.get(name):
                reason = "field is immutable when `immutable` is set"
                yield Cause(name, f"Forbidden: {reason}", "FieldValueForbidden")
    if kind is POD and _without_images(new["spec"]) != _without_images(old["spec"]):
        reason = (
            "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`"
        )
        yield Cause("spec", f"Forbidden: {reason}", "FieldValueForbidden")


_IMMUTABLE = {
    DEPLOYMENT: ("spec.selector",),
    JOB: ("spec.completions", "spec.template", "spec.completionMode", "spec.podFailurePolicy"),
    REPLICA_SET: ("spec.selector",),
    SERVICE: ("spec.clusterIP",),
    ROLE_BINDING: ("roleRef",),
    SECRET: ("type",),
    TRAINING_RUNTIME: ("spec.template.spec.failurePolicy",),  # a rule of the CustomResourceDefinition
}


def _without_images(spec: Object) -> Object:
    def bare(containers: Iterable[Object]) -> list[Object]:
        return [{**container, "image": ""} for container in containers]

    return spec | {name: bare(spec.get(name) or ()) for name in ("containers", "initContainers")}


def _duplicates(path: str, names: list[str]) -> Iterator[Cause]:
    for position, name in enumerate(names):
        if name in names[:position]:
            yield Cause(f"{path}[{position}].name", f"Duplicate value: {json.dumps(name)}", "FieldValueDuplicate")


def invalid(path: str, value: Any, reason: str) -> Cause:
    """The cause for an invalid value."""
    return Cause(path, f"Invalid value: {json.dumps(value)}: {reason}")


def _fits(pattern: re.Pattern[str], text: str, length: int) -> bool:
    return len(text) <= length and pattern.fullmatch(text) is not None


def _at(subject: Object, path: str) -> Any:
    value: Any = subject
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


_CHECKS = {
    AUTOSCALER: _autoscaler,
    BUDGET: _budget,
    CONFIG_MAP: _data,
    DEPLOYMENT: _deployment,
    JOB: _job,
    LEASE: _lease,
    POD: _pod,
    POD_TEMPLATE: _pod_template,
    REPLICA_SET: _workload,
    SECRET: _data,
    SERVICE: _service,
}
