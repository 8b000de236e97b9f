"""The rules of admission webhooks that evernear's objects touch, which no schema of a
CustomResourceDefinition has.

Each function returns the reasons to refuse an object that matches its schema; the docstring names
the source. Kubeflow Pipelines 2.17 has a webhook for the kind PipelineVersion only
(``pipelineversion_webhook.go``), which its API server creates itself.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

Object = dict[str, Any]
JOB_SET = "vjobset.kb.io"
TRAIN_JOB = "validator.trainjob.trainer.kubeflow.org"
TRAINING_RUNTIME = "validator.trainingruntime.trainer.kubeflow.org"
_JOB_FAILURE_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_CONTAINERS = {
    "trainer": "node",
    "model-initializer": "model-initializer",
    "dataset-initializer": "dataset-initializer",
}
_TRIAL_PARAMETER = re.compile(r"\$\{trialParameters\.([^}]*)\}")


def denial(webhook: str, reasons: Sequence[str]) -> str:
    """The message of the API server for a request that a webhook refuses."""
    text = reasons[0] if len(reasons) == 1 else f"[{', '.join(reasons)}]"
    return f'admission webhook "{webhook}" denied the request: {text}'


def training_runtime(runtime: Object) -> list[str]:
    """Kubeflow Trainer 2.2.1, ``pkg/webhooks/trainingruntime_webhook.go``."""
    return list(_replicated_jobs(runtime["spec"]["template"]["spec"]["replicatedJobs"]))


def _replicated_jobs(jobs: list[Object]) -> Iterator[str]:
    for position, job in enumerate(jobs):
        path = f"spec.template.spec.replicatedJobs[{position}]"
        ancestor = (job["template"].get("metadata", {}).get("labels") or {}).get(_ANCESTOR)
        if ancestor not in _CONTAINERS:
            continue
        if job.get("replicas", 1) != 1:
            yield f"{path}.replicas: Invalid value: {job['replicas']}: always must be 1"
        containers = job["template"]["spec"]["template"]["spec"]["containers"]
        if _CONTAINERS[ancestor] not in (container["name"] for container in containers):
            reason = f"must contain the required container for the ancestor: {ancestor}"
            yield f"{path}.template.spec.template.spec.containers: Invalid value: {reason}"


def train_job(job: Object, runtime: Object | None) -> list[str]:
    """Kubeflow Trainer 2.2.1, ``pkg/webhooks/trainjob_webhook.go``, ``ValidateObjects`` and
    ``plugins/torch/torch.go``.

    ``runtime`` is the object that the TrainJob refers to.
    """
    reference = job["spec"]["runtimeRef"]
    if runtime is None:
        absent = f'{reference["kind"]}.trainer.kubeflow.org "{reference["name"]}" not found'
        reason = f"{absent}: specified trainingRuntime must be created before the TrainJob is created"
        return [f"spec.runtimeRef: Invalid value: {json.dumps(reference)}: {reason}"]
    names = (variable["name"] for variable in job["spec"].get("trainer", {}).get("env") or ())
    if reserved := sorted(name for name in names if name.startswith("PET_")):
        reason = f"must not have reserved envs, invalid envs configured: {reserved}"
        return [f"spec.trainer.env: Invalid value: {reason}"]
    return []


def job_set(name: str, spec: Object, nodes: int) -> list[str]:
    """JobSet 0.11.1, ``pkg/webhooks/jobset_webhook.go``, for the JobSet that Trainer builds for
    ``nodes`` nodes."""
    jobs = [job["name"] for job in spec["replicatedJobs"]]
    reasons = [*_failure_policy(spec.get("failurePolicy") or {}, jobs)]
    for target in (spec.get("successPolicy") or {}).get("targetReplicatedJobs") or ():
        if target not in jobs:
            reasons.append(f"invalid replicatedJob name '{target}' does not appear in .spec.ReplicatedJobs")
    for job in spec["replicatedJobs"]:
        last = f"{name}-{job['name']}-{job.get('replicas', 1) - 1}"
        for kind, longest in (("job", last), ("pod", f"{last}-{nodes - 1}-abcde")):
            if not _DNS_1035.fullmatch(longest):
                reasons.append(
                    f"JobSet name is too long, {kind} names generated for this JobSet will exceed 63 characters"
                )
    return reasons


def _failure_policy(policy: Object, jobs: list[str]) -> Iterator[str]:
    rules: list[Object] = policy.get("rules") or []
    for position, rule in enumerate(rules):
        name = rule["name"]
        if len(name) > 128 or not _RULE_NAME.fullmatch(name):
            yield (
                f"invalid failure policy rule name '{name}', a failure policy rule name must start with an alphabetic "
                "character, optionally followed by a string of alphanumeric characters or '_,:', and must end with an "
                "alphanumeric character or '_'"
            )
        if name in (rule["name"] for rule in rules[:position]):
            yield f"rule names are not unique, several rules have the same name '{name}'"
        for target in rule.get("targetReplicatedJobs") or ():
            if target not in jobs:
                yield f"invalid replicatedJob name '{target}' in failure policy does not appear in .spec.ReplicatedJobs"
        for reason in rule.get("onJobFailureReasons") or ():
            if reason not in _JOB_FAILURE_REASONS:
                yield f"invalid job failure reason '{reason}' in failure policy is not a recognized job failure reason"


def inference_service(service: Object) -> list[str]:
    """KServe 0.21, ``pkg/apis/serving/v1beta1/inference_service_validation.go``, without
    ``spec.canary``."""
    metadata, spec = service["metadata"], service["spec"]
    annotations = metadata.get("annotations") or {}
    reasons: list[str] = []
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", metadata["name"]):
        reasons.append(
            f"the InferenceService {json.dumps(metadata['name'])} is invalid: a name must consist of [-a-z0-9]"
        )
    autoscaler = annotations.get("serving.kserve.io/autoscalerClass")
    if autoscaler not in (None, "hpa", "external", "keda", "none"):
        reasons.append(f"[{autoscaler}] is not a supported autoscaler class type")
    standard = annotations.get("serving.kserve.io/deploymentMode") == "Standard"
    for name in ("predictor", "transformer"):
        if name in spec:
            reasons += _component(spec[name], standard=standard)
    return reasons


def _component(component: Object, *, standard: bool) -> Iterator[str]:
    implementations = [key for key in ("containers", "model", "pytorch") if component.get(key)]
    if len(implementations) != 1:
        yield "exactly one implementation must be specified"
    if component.get("minReplicas", 1) > component.get("maxReplicas", 0) > 0:
        yield "MinReplicas cannot be greater than MaxReplicas"
    for container in component.get("containers") or ():
        if "PYTHONPATH" in (variable["name"] for variable in container.get("env") or ()):
            yield f'setting PYTHONPATH in container "{container["name"]}" is not allowed for security reasons'
    metric, target = component.get("scaleMetric"), component.get("scaleTarget", 1)
    metrics = ("cpu", "memory") if standard else ("concurrency", "rps")
    if metric not in (None, *metrics):
        yield f"[{metric}] is not a supported metric"
    if metric == "cpu" and not 1 <= target <= 100:
        yield "the target utilization percentage should be a [1-100] integer"
    if not standard and "deploymentStrategy" in component:
        yield "customizing deploymentStrategy is only supported for raw deployment mode"


def experiment(experiment: Object) -> list[str]:
    """Katib 0.19, ``pkg/webhook/v1beta1/experiment/validator/validator.go``, for trials that are
    Jobs."""
    metadata, spec = experiment["metadata"], experiment["spec"]
    name = metadata.get("name") or metadata["generateName"] + 5 * "x"
    reasons: list[str] = []
    if len(name) > 40 or not re.match(r"[a-z]", name):
        reasons.append(f"metadata.name: Invalid value: {json.dumps(name)}: may not be longer than 40 characters.")
    trials = spec["maxTrialCount"]
    for field, least in (("maxTrialCount", 1), ("parallelTrialCount", 1), ("maxFailedTrialCount", 0)):
        if spec[field] < least:
            reasons.append(f"spec.{field}: Invalid value: {spec[field]}: must be greater than {least - 1}")
        if spec[field] > trials:
            reasons.append(
                f"spec.{field}: Invalid value: {spec[field]}: should be less than or equal to spec.maxTrialCount"
            )
    if spec["objective"].get("type") not in ("minimize", "maximize"):
        reasons.append("spec.objective.type: Invalid value: must be minimize or maximize")
    return [*reasons, *_parameters(spec["parameters"]), *_trial_template(spec["trialTemplate"], spec["parameters"])]


def _parameters(parameters: list[Object]) -> Iterator[str]:
    for position, parameter in enumerate(parameters):
        path, space = f"spec.parameters[{position}]", parameter.get("feasibleSpace") or {}
        is_range = parameter["parameterType"] in ("int", "double")
        if not is_range and parameter["parameterType"] not in ("categorical", "discrete"):
            yield f"{path}.parameterType: Invalid value: parameterType: {parameter['parameterType']} is not supported"
        if not space:
            yield f"{path}.feasibleSpace: Required value: feasibleSpace must be specified"
        if space.get("distribution", "uniform") not in ("uniform", "logUniform", "normal", "logNormal"):
            yield f"{path}.feasibleSpace.distribution: Invalid value: {space['distribution']} is not supported"
        unsupported = {"list"} if is_range else {"min", "max", "step"}
        if unsupported & space.keys() or (is_range and not (space.get("min") and space.get("max"))):
            yield f"{path}.feasibleSpace: Invalid value: not supported for parameterType: {parameter['parameterType']}"


def _trial_template(template: Object, parameters: list[Object]) -> Iterator[str]:
    path = "spec.trialTemplate"
    if not template.get("primaryContainerName"):
        yield f"{path}.primaryContainerName: Required value: must be specified"
    job, known = template["trialSpec"], [parameter["name"] for parameter in parameters]
    if {"name", "namespace"} & (job.get("metadata") or {}).keys():
        yield f"{path}: Invalid value: metadata.name and metadata.namespace in spec.trialTemplate must be omitted"
    declared = [parameter["name"] for parameter in template["trialParameters"]]
    references = [parameter["reference"] for parameter in template["trialParameters"]]
    for names in (declared, references):
        if len(set(names)) < len(names):
            yield f"{path}.trialParameters: Invalid value: names and references can't be duplicated: {names}"
    for reference in references:
        if reference not in known:
            yield f"{path}.trialParameters: Invalid value: reference {reference} does not exist in spec.parameters"
    used = set(_TRIAL_PARAMETER.findall(json.dumps(job)))
    for name in used ^ set(declared):
        yield f"{path}: Invalid value: {name} is in only one of spec.trialTemplate and spec.trialParameters"
