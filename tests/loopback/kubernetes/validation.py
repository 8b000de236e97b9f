"""Validation beyond the schema, after ``validation.go``: names, selectors, immutable fields."""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from tests.loopback.kubernetes import selectors
from tests.loopback.kubernetes.kinds import (
    DEPLOYMENT,
    JOB,
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
_BINARY = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_SUBDOMAIN_RULE = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
_LABEL_RULE = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"


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
    if kind in (SERVICE, TRAIN_JOB) and not _fits(_SERVICE_NAME, name, 63):
        yield invalid("metadata.name", name, "a DNS-1035 label must consist of lower case alphanumeric characters")
    elif not _fits(_SUBDOMAIN, name, 253) and kind not in (ROLE, ROLE_BINDING):
        yield invalid("metadata.name", name, _SUBDOMAIN_RULE)
    yield from _labels("metadata.labels", metadata.get("labels") or {})


def _labels(path: str, labels: dict[str, str]) -> Iterator[Cause]:
    for key, value in labels.items():
        if not _QUALIFIED.fullmatch(key):
            yield invalid(path, key, "name part must consist of alphanumeric characters, '-', '_' or '.'")
        if not _VALUE.fullmatch(value):
            yield invalid(path, value, "a valid label must be an empty string or consist of alphanumeric characters")


def _workload(subject: Object) -> Iterator[Cause]:
    spec = subject["spec"]
    if spec.get("replicas", 0) < 0:
        yield invalid("spec.replicas", spec["replicas"], "must be greater than or equal to 0")
    selector, labels = spec["selector"], spec["template"].get("metadata", {}).get("labels") or {}
    if not selector.get("matchLabels"):
        yield invalid("spec.selector", selector, "empty selector is invalid for deployment")
    elif not selectors.matches(selector, labels):
        yield invalid("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
    yield from _labels("spec.template.metadata.labels", labels)
    yield from _pod_spec("spec.template.spec", spec["template"]["spec"])


def _job(subject: Object) -> Iterator[Cause]:
    """``pkg/apis/batch/validation/validation.go`` of Kubernetes 1.34."""
    spec, template = subject["spec"], subject["spec"]["template"]["spec"]
    yield from _labels("spec.template.metadata.labels", spec["template"].get("metadata", {}).get("labels") or {})
    yield from _pod_spec("spec.template.spec", template)
    longest = f"{subject['metadata']['name']}-{max(spec.get('completions', 1) - 1, 0)}"
    if not _fits(_LABEL, longest, 63):
        yield invalid("metadata.name", subject["metadata"]["name"], f"will not able to create pod: {longest}")
    if spec.get("maxFailedIndexes", 0) > spec.get("completions", 1):
        yield invalid("spec.maxFailedIndexes", spec["maxFailedIndexes"], "must be less than or equal to completions")
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


def _pod_spec(path: str, spec: Object) -> Iterator[Cause]:
    if not spec.get("containers"):
        yield Cause(f"{path}.containers", "Required value")
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    yield from _duplicates(f"{path}.volumes", volumes)
    names: list[str] = []
    for group in ("initContainers", "containers"):
        for position, container in enumerate(spec.get(group) or ()):
            where = f"{path}.{group}[{position}]"
            names.append(container["name"])
            if names.count(container["name"]) > 1:
                yield Cause(f"{where}.name", f"Duplicate value: {json.dumps(container['name'])}")
            yield from _container(where, container, volumes, is_init=group == "initContainers")


def _container(path: str, container: Object, volumes: list[str], *, is_init: bool) -> Iterator[Cause]:
    if not _fits(_LABEL, container["name"], 63):
        yield invalid(f"{path}.name", container["name"], _LABEL_RULE)
    if not container.get("image"):
        yield Cause(f"{path}.image", "Required value")
    for position, mount in enumerate(container.get("volumeMounts") or ()):
        if mount["name"] not in volumes:
            where = f"{path}.volumeMounts[{position}].name"
            yield Cause(where, f"Not found: {json.dumps(mount['name'])}")
    yield from _duplicates(f"{path}.ports", [port["name"] for port in container.get("ports") or () if port.get("name")])
    resources = container.get("resources") or {}
    for name, amount in (resources.get("requests") or {}).items():
        limit = (resources.get("limits") or {}).get(name)
        if limit is not None and amount_of(amount) > amount_of(limit):
            reason = f"must be less than or equal to {name} limit of {limit}"
            yield invalid(f"{path}.resources.requests", amount, reason)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container and not {"exec", "httpGet", "tcpSocket", "grpc"} & container[probe].keys():
            yield Cause(f"{path}.{probe}", "Required value: must specify a handler type")
        if probe in container and is_init and container.get("restartPolicy") != "Always":
            reason = "may not be set for init containers without restartPolicy=Always"
            yield Cause(f"{path}.{probe}", f"Forbidden: {reason}")


def _immutable(kind: Kind, new: Object, old: Object) -> Iterator[Cause]:
    for path in _IMMUTABLE.get(kind, ()):
        if _at(new, path) != _at(old, path):
            yield invalid(path, _at(new, path), "field is immutable")


_IMMUTABLE = {
    DEPLOYMENT: ("spec.selector",),
    JOB: ("spec.completions", "spec.template", "spec.completionMode", "spec.podFailurePolicy"),
    REPLICA_SET: ("spec.selector",),
    SERVICE: ("spec.clusterIP",),
    ROLE_BINDING: ("roleRef",),
    SECRET: ("type",),
    TRAINING_RUNTIME: ("spec.template.spec.failurePolicy",),  # a rule of the CustomResourceDefinition
}


def _duplicates(path: str, names: list[str]) -> Iterator[Cause]:
    for position, name in enumerate(names):
        if name in names[:position]:
            yield Cause(f"{path}[{position}].name", f"Duplicate value: {json.dumps(name)}")


def invalid(path: str, value: Any, reason: str) -> Cause:
    """The cause for an invalid value."""
    return Cause(path, f"Invalid value: {json.dumps(value)}: {reason}")


def amount_of(quantity: object) -> Decimal:
    """Return the numeric value of a quantity."""
    text = str(quantity)
    number, suffix = _split(text)
    if suffix in _BINARY:
        return number * _BINARY[suffix]
    return number * Decimal(1000) ** _DECIMAL[suffix]


def _split(text: str) -> tuple[Decimal, str]:
    for suffix in (*_BINARY, *filter(None, _DECIMAL)):
        # 1E is an exabyte and 1E3 a thousand: a suffix is always at the end.
        if text.endswith(suffix):
            return Decimal(text.removesuffix(suffix)), suffix
    return Decimal(text), ""


def _fits(pattern: re.Pattern[str], text: str, length: int) -> bool:
    return len(text) <= length and pattern.fullmatch(text) is not None


def _at(subject: Object, path: str) -> Any:
    value: Any = subject
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


_CHECKS = {
    DEPLOYMENT: _workload,
    JOB: _job,
    POD_TEMPLATE: _pod_template,
    REPLICA_SET: _workload,
}
