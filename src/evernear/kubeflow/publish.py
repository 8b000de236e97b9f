"""Prepare compiled pipelines for a cluster, upload and schedule them."""

import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal

import yaml
from cronsim import CronSim, CronSimError
from google.protobuf import json_format
from kfp import compiler, components
from kfp.compiler.compiler_utils import KubernetesManifestOptions
from kfp.pipeline_spec.pipeline_spec_pb2 import (
    PipelineSpec,  # pyright: ignore[reportAttributeAccessIssue]
    PlatformSpec,  # pyright: ignore[reportAttributeAccessIssue]
)

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Frozen
from evernear.errors import PipelineServerError, SettingsError
from evernear.kubeflow import GOLDEN, NAMES, PLACEHOLDER_IMAGE
from evernear.kubeflow.client import KfpRuns, arguments_for, parameters_in, reference_to
from evernear.kubeflow.connection import Connection
from evernear.kubeflow.parameters import DEFAULTS_VARIABLE, nonempty
from evernear.kubeflow.runs import Parameter, for_pipeline, from_words
from evernear.release.manifest import git_commit
from evernear.settings import PipelineSettings

UNIX_FIELDS = 5


class Uploaded(Frozen):
    pipeline: str
    version: str
    pipeline_version_id: str
    new: bool


class Schedule(Frozen):
    """KFP's recurring run."""

    id: str
    pipeline: str
    pipeline_version_id: str
    pipeline_version: str
    """The name of the version that the schedule starts, or its ID if it was deleted. Empty for a
    file."""
    is_newest: bool
    """Whether other runs start the same version."""
    cron: str
    """In KFP's format, with the seconds first."""
    state: Literal["enabled", "disabled"]
    created: datetime
    next_run: datetime | None
    """In UTC, taken for the server's time zone. None if disabled, or in another client's form."""


class Publisher:
    """Uploads and schedules pipelines on one server. Every method raises `PipelineServerError` if
    the server is unreachable or rejects the request."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._kfp = Connection(settings)
        self._namespace = settings.namespace
        self.runs = KfpRuns(settings, self._kfp)

    def upload(self, compiled: bytes, version: str) -> Uploaded:
        """Make ``compiled`` the newest version, which is the one that starts. If ``version`` exists
        with the same content and is older than another, it is uploaded again as ``version-2``."""
        spec, platform = _documents(compiled)
        pipeline = spec["pipelineInfo"]["name"]
        pipeline_id = self._pipeline_id(spec["pipelineInfo"])
        for number in count(1):
            name = version if number == 1 else f"{version}-{number}"
            existing = self._version(pipeline_id, name, version_name(pipeline, name))
            if existing is None:
                _wait_for_next_second(self.runs.newest_of(pipeline_id))
                created, existing = self._create(compiled, pipeline, pipeline_id, name)
                if created:
                    return _uploaded(pipeline, existing, new=True)
            stored = existing.pipeline_spec
            content = stored.get("pipeline_spec", stored), stored.get("platform_spec")
            is_same = _normalize(*content) == _normalize(spec, platform)
            if is_same and self._is_newest(existing):
                return _uploaded(pipeline, existing, new=False)
            if not is_same and number == 1:
                raise PipelineServerError(
                    f"Version {version} of the pipeline {pipeline} already exists with different content: "
                    "commit the change, or pass another name as --version."
                )
        raise AssertionError("a name is free")

    def _create(self, compiled: bytes, pipeline: str, pipeline_id: str, version: str) -> tuple[bool, Any]:
        """The new version, or the one that a different client has just created."""
        name = version_name(pipeline, version)
        try:
            return True, self._send(compiled, pipelineid=pipeline_id, name=name, display_name=version)
        except PipelineServerError as error:
            existing = self._version(pipeline_id, version, name) if error.status == 409 else None
            if existing is None:
                raise
            return False, existing

    def schedule(self, pipeline: str, cron: str, parameters: Mapping[str, Any]) -> Schedule:
        """Schedule the newest version of ``pipeline``, instead of any previous schedule.

        KFP cannot update a recurring run. The old one is disabled before a new one is created, so
        that a start due in between is skipped rather than duplicated. If KFP rejects the new one,
        the old one is enabled again.
        """
        kfp_cron = _with_seconds(cron)
        version = self.runs.newest(pipeline)
        arguments = arguments_for(version, parameters)
        request = {
            "display_name": pipeline,
            "description": f"Created by evernear; `evernear pipeline schedule {pipeline}` replaces it.",
            "experiment_id": self.runs.experiment_id(),
            "pipeline_version_reference": reference_to(version),
            "runtime_config": {"parameters": arguments},
            "trigger": {"cron_schedule": {"cron": kfp_cron}},
            "mode": "ENABLE",
            "max_concurrency": "1",
            "no_catchup": True,
        }
        previous = self._recurring_runs(pipeline)
        enabled = [recurring for recurring in previous if recurring.status == "ENABLED"]
        for recurring in enabled:
            self._update(recurring, "recurring_run_service_disable_recurring_run")
        try:
            created = self._kfp.call("recurring_run_service_create_recurring_run", recurring_run=request)
        except PipelineServerError as error:
            if error.status:
                for recurring in enabled:
                    self._update(recurring, "recurring_run_service_enable_recurring_run")
                raise
            # The new run may exist, so enabling the old run could start runs twice.
            raise PipelineServerError(
                f"{error} The old schedule of {pipeline} is disabled and the new one may not exist; try again."
            ) from None
        self._delete(previous)
        return self._schedule(created)

    def unschedule(self, pipeline: str) -> int:
        """Delete the schedules of ``pipeline``, and return how many. Active runs continue."""
        existing = self._recurring_runs(pipeline)
        self._delete(existing)
        return len(existing)

    def schedules(self) -> list[Schedule]:
        """All cron schedules on the server, also those of other clients."""
        recurring_runs = self._kfp.pages(
            "recurring_run_service_list_recurring_runs", "recurring_runs", namespace=self._namespace
        )
        return [
            self._schedule(recurring) for recurring in recurring_runs if recurring.trigger.cron_schedule is not None
        ]

    def _schedule(self, recurring: Any) -> Schedule:
        reference = recurring.pipeline_version_reference  # None if a file was scheduled
        cron, enabled = recurring.trigger.cron_schedule.cron, recurring.status == "ENABLED"
        return Schedule(
            id=recurring.recurring_run_id,
            pipeline=recurring.display_name,
            pipeline_version_id=(reference and reference.pipeline_version_id) or "",
            pipeline_version=self.runs.version_name_of(reference) if reference else "",
            is_newest=reference is None or self._is_newest(reference),
            cron=cron,
            state="enabled" if enabled else "disabled",
            created=recurring.created_at,
            next_run=_next_run(cron) if enabled else None,
        )

    def _is_newest(self, version: Any) -> bool:
        """Of a version or of a reference to one."""
        newest = self.runs.newest_of(version.pipeline_id)
        return newest is not None and newest.pipeline_version_id == version.pipeline_version_id

    def _pipeline_id(self, information: Mapping[str, str]) -> str:
        name, namespace = information["name"], self._namespace
        by_name = {"operation": "pipeline_service_get_pipeline_by_name", "name": name, "namespace": namespace}
        if (existing := self._kfp.find(**by_name)) is not None:
            return existing.pipeline_id
        pipeline = {"name": name, "display_name": information.get("displayName", name), "namespace": namespace}
        pipeline["description"] = information.get("description", "")
        try:
            nonempty = {key: value for key, value in pipeline.items() if value}
            return self._kfp.call("pipeline_service_create_pipeline", pipeline=nonempty).pipeline_id
        except PipelineServerError as error:
            if error.status != 409:  # a different client has just created it
                raise
        return self._kfp.call(**by_name).pipeline_id

    def _version(self, pipeline_id: str, version: str, name: str) -> Any:
        query = {"field": "pipeline_versions", "name": version, "pipeline_id": pipeline_id}
        matches = self._kfp.find_by_name("pipeline_service_list_pipeline_versions", **query)
        return next((match for match in matches if match.name in (name, version, None)), None)

    def _send(self, compiled: bytes, **fields: str) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "pipeline.yaml"
            path.write_bytes(compiled)
            return self._kfp.call("upload_pipeline_version", uploadfile=str(path), **fields)

    def _recurring_runs(self, pipeline: str) -> list[Any]:
        query = {"field": "recurring_runs", "name": pipeline, "namespace": self._namespace}
        return self._kfp.find_by_name("recurring_run_service_list_recurring_runs", **query)

    def _delete(self, recurring_runs: list[Any]) -> None:
        for recurring in recurring_runs:
            # Without ORPHAN, Kubernetes would also delete its runs' workflows, even active ones.
            self._update(recurring, "recurring_run_service_delete_recurring_run", propagation_policy="ORPHAN")

    def _update(self, recurring: Any, operation: str, **arguments: str) -> None:
        """Change a recurring run unless it has already been deleted."""
        self._kfp.find(operation, recurring_run_id=recurring.recurring_run_id, **arguments)


def _uploaded(pipeline: str, version: Any, new: bool) -> Uploaded:
    return Uploaded(
        pipeline=pipeline, version=version.display_name, pipeline_version_id=version.pipeline_version_id, new=new
    )


def _wait_for_next_second(newest: Any) -> None:
    """KFP orders versions by their creation in whole seconds."""
    if newest is not None and datetime.now(UTC) - newest.created_at < timedelta(seconds=1):
        time.sleep(1.0)


def _with_seconds(cron: str) -> str:
    """Prepend the seconds, without which KFP would run ``0 3 * * *`` at minute 3 of every hour."""
    reason = "it does not have five fields"
    if len(cron.split()) == UNIX_FIELDS:
        try:
            CronSim(cron, datetime.now(UTC))
        except CronSimError as error:
            reason = str(error).lower()
        else:
            return f"0 {cron}"
    raise SettingsError(
        f"The schedule {cron!r} is not valid: {reason}. Write minute, hour, day of the month, month and day of the "
        "week, such as '0 3 * * *' for daily at 3:00, in the server's time zone."
    )


def _next_run(cron: str) -> datetime | None:
    try:
        return next(CronSim(cron, datetime.now(UTC)))
    except (CronSimError, StopIteration):
        return None


def _documents(compiled: bytes) -> tuple[dict[str, Any], dict[str, Any] | None]:
    spec, *platform = yaml.load_all(compiled, Loader=yaml.CSafeLoader)
    return spec, platform[0] if platform else None


def _normalize(spec: Mapping[str, Any], platform: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """As protocol buffers, because the server reformats numbers and drops empty fields."""
    return (
        json_format.ParseDict(dict(spec), PipelineSpec()),
        json_format.ParseDict(dict(platform or {}), PlatformSpec()),
    )


def for_cluster(pipeline: str, image: str, settings: PipelineSettings) -> bytes:
    """The golden file of ``pipeline`` with ``image`` and the cluster's ``settings``."""
    if pipeline not in NAMES:
        raise SettingsError(f"Unknown pipeline {pipeline!r}; known: {', '.join(NAMES)}.")
    if not re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", image):
        raise SettingsError(
            f"The image {image!r} has no digest; use REF@sha256:<64 hex digits>, because a tag may change between runs."
        )
    golden = GOLDEN / f"{pipeline.replace('-', '_')}.yaml"
    compiled = golden.read_bytes().replace(PLACEHOLDER_IMAGE.encode(), image.encode())
    if settings.cluster == PipelineSettings().cluster:
        return compiled
    spec, platform = yaml.load_all(compiled, Loader=yaml.CSafeLoader)
    for executor in spec["deploymentSpec"]["executors"].values():
        _set_limits(executor["container"]["resources"], settings)
    return _dump([spec, platform])


def compile_pipelines(
    pipelines: Sequence[str] | None, image: str, defaults: list[str], cluster: PipelineSettings
) -> dict[str, bytes]:
    """All or the named pipelines, by name. A default applies to all that have the parameter."""
    compiled = {name: for_cluster(name, image, cluster) for name in pipelines or NAMES}
    declared = {name: compiled_parameters(content) for name, content in compiled.items()}
    arguments = from_words(defaults, [parameter for parameters in declared.values() for parameter in parameters])
    return {name: fill_defaults(content, for_pipeline(arguments, declared[name])) for name, content in compiled.items()}


def words_of_section(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words of the ``pipeline`` section (server and cluster), and the others: defaults."""
    words = list(words)
    of_section = [word for word in words if word.startswith("pipeline.")]
    return of_section, [word for word in words if word not in of_section]


def _set_limits(resources: dict[str, Any], settings: PipelineSettings) -> None:
    """Set one task's limits. Only tasks that train have an accelerator."""
    cpu, memory = settings.task_cpu, settings.task_memory
    if accelerator := resources.get("accelerator"):
        cpu, memory = settings.train_cpu, settings.train_memory
        accelerator |= {"resourceType": settings.train_accelerator, "type": settings.train_accelerator}
    resources |= {"resourceCpuLimit": cpu, "resourceMemoryLimit": memory}
    for deprecated in ("cpuLimit", "memoryLimit"):  # KFP reads them only without the other two
        resources.pop(deprecated)


def default_version(version: str | None, settings: PipelineSettings, defaults: Iterable[str] = ()) -> str:
    """The name of a version that users name ``version``, or by default the git commit."""
    reasons: list[str] = []
    if named := version or git_commit(reasons.append):
        return uploaded_version(named, settings, defaults)
    (reason,) = reasons or ["evernear is not installed from a git checkout."]
    raise SettingsError(f"The version has no default name, so pass --version: {reason}")


def uploaded_version(version: str, settings: PipelineSettings, defaults: Iterable[str] = ()) -> str:
    """Differs for clusters with different settings, and for different ``defaults``, the words
    ``key=value`` of an upload."""
    values = json.dumps([settings.cluster, sorted(defaults)], sort_keys=True)
    return f"{version}-{sha256_bytes(values.encode())[:8]}"


def compiled_parameters(compiled: bytes) -> Sequence[Parameter]:
    return parameters_in(next(yaml.load_all(compiled, Loader=yaml.CSafeLoader))["root"])


def fill_defaults(compiled: bytes, defaults: Mapping[str, Any]) -> bytes:
    """Set defaults of parameters, and tell each step all of them, because a run may send an empty
    text instead."""
    documents = list(yaml.load_all(compiled, Loader=yaml.CSafeLoader))
    parameters = documents[0]["root"]["inputDefinitions"]["parameters"]
    for name, value in defaults.items():
        parameters[name]["defaultValue"] = value
    known = nonempty({name: parameter["defaultValue"] for name, parameter in parameters.items()})
    for executor in documents[0]["deploymentSpec"]["executors"].values():
        variable = {"name": DEFAULTS_VARIABLE, "value": json.dumps(known, sort_keys=True)}
        executor["container"]["env"].append(variable)
    return _dump(documents)


def _dump(documents: list[Any]) -> bytes:
    return yaml.dump_all(documents, Dumper=yaml.CSafeDumper, sort_keys=True).encode()


def as_manifests(compiled: bytes, version: str, namespace: str) -> bytes:
    """Pipeline and PipelineVersion manifests for KFP's Kubernetes-native mode."""
    information = next(yaml.load_all(compiled, Loader=yaml.CSafeLoader))["pipelineInfo"]
    options = KubernetesManifestOptions(
        pipeline_display_name=information.get("displayName"),
        pipeline_version_name=version_name(information["name"], version),
        pipeline_version_display_name=version,
        namespace=namespace or None,
        include_pipeline_manifest=True,
    )
    pipeline = components.load_component_from_text(compiled.decode())
    pipeline.description = information.get("description")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "manifests.yaml"
        compiler.Compiler().compile(
            pipeline, str(path), kubernetes_manifest_options=options, kubernetes_manifest_format=True
        )
        return path.read_bytes()


def version_name(pipeline: str, version: str) -> str:
    """The name in KFP. Unlike the display name, it must be unique in the namespace."""
    return f"{pipeline}-{version}"
