"""Put a compiled pipeline on a Kubeflow Pipelines server, and let it run on a schedule."""

import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec.pipeline_spec_pb2 import (
    PipelineSpec,  # pyright: ignore[reportAttributeAccessIssue]
    PlatformSpec,  # pyright: ignore[reportAttributeAccessIssue]
)

from evernear.errors import PipelineServerError
from evernear.frozen import Frozen
from evernear.kubeflow.client import KfpRuns, arguments_for, reference_to
from evernear.kubeflow.compiled import version_name
from evernear.kubeflow.connection import Connection, Refused
from evernear.settings import PipelineSettings

SECONDS_FIRST_FIELDS = 6


class Uploaded(Frozen):
    """A version of a pipeline, as it is on the server now."""

    pipeline: str
    version: str
    pipeline_version_id: str
    new: bool
    """False: it was there already, from the same file."""


class Schedule(Frozen):
    """A pipeline that runs by the clock."""

    id: str
    pipeline: str
    pipeline_version_id: str
    cron: str
    """Six fields, seconds first."""
    state: Literal["enabled", "disabled"]
    created: datetime


class Publisher:
    """Uploads and schedules on one server.

    Every method raises `PipelineServerError` where the server cannot be reached or refuses.
    """

    def __init__(self, settings: PipelineSettings) -> None:
        self._kfp = Connection(settings)
        self._namespace = settings.namespace
        self.runs = KfpRuns(settings, self._kfp)

    def upload(self, compiled: bytes, version: str) -> Uploaded:
        """Make ``compiled`` the version ``version`` of its pipeline, or find that it is so already.

        Raises:
            PipelineServerError: the server has another file under that name.
        """
        spec, platform = _documents(compiled)
        information = spec["pipelineInfo"]
        pipeline, name = information["name"], version_name(information["name"], version)
        pipeline_id = self._pipeline_id(information)
        found = self._version(pipeline_id, version, name)
        if found is None:
            try:
                made = self._send(compiled, pipelineid=pipeline_id, name=name, display_name=version)
            except Refused as refused:
                found = self._version(pipeline_id, version, name) if refused.status == 409 else None
                if found is None:
                    raise
            else:
                return _uploaded(pipeline, made, new=True)
        held = found.pipeline_spec
        if _normal(held.get("pipeline_spec", held), held.get("platform_spec")) != _normal(spec, platform):
            raise PipelineServerError(
                f"The pipeline {pipeline} has a version {version} already, and it is another one: "
                "commit the change, or give the version another name with --version."
            )
        return _uploaded(pipeline, found, new=False)

    def schedule(self, pipeline: str, cron: str, parameters: Mapping[str, Any]) -> Schedule:
        """Let the newest version of ``pipeline`` run by ``cron`` instead of whatever schedule it had.

        A recurring run cannot be changed, so a new one takes its place. The old one is disabled before the new one
        begins: a moment between the two is missed rather than run twice. If the new one is refused, the old one is in
        force again.

        Raises:
            SettingsError: a parameter is unknown or of the wrong type.
        """
        version = self.runs.newest(pipeline)
        arguments = arguments_for(version, parameters)
        wanted = {
            "display_name": pipeline,
            "description": f"Made by evernear; `evernear pipeline schedule {pipeline}` replaces it.",
            "experiment_id": self.runs.experiment_id(),
            "pipeline_version_reference": reference_to(version),
            "runtime_config": {"parameters": arguments},
            "trigger": {"cron_schedule": {"cron": cron_with_seconds(cron)}},
            "mode": "ENABLE",
            "max_concurrency": "1",
            "no_catchup": True,
        }
        before = self._recurring(pipeline)
        in_force = [recurring for recurring in before if recurring.status == "ENABLED"]
        for recurring in in_force:
            self._ask_about(recurring, "recurring_run_service_disable_recurring_run")
        try:
            made = self._kfp.ask("recurring_run_service_create_recurring_run", recurring_run=wanted)
        except Refused:
            for recurring in in_force:
                self._ask_about(recurring, "recurring_run_service_enable_recurring_run")
            raise
        except PipelineServerError as error:  # there may be a new one: with the old one in force, runs would double
            raise PipelineServerError(
                f"{error} Whether {pipeline} has its new schedule is not known, and the old one is off; do it again."
            ) from None
        self._delete(before)
        return _told(made)

    def unschedule(self, pipeline: str) -> int:
        """End the schedules of ``pipeline``; returns how many there were. Runs that have begun go on."""
        found = self._recurring(pipeline)
        self._delete(found)
        return len(found)

    def schedules(self) -> list[Schedule]:
        """What runs by the clock, whether `schedule` made it or somebody else did."""
        listed = self._kfp.pages(
            "recurring_run_service_list_recurring_runs", "recurring_runs", namespace=self._namespace
        )
        return [_told(recurring) for recurring in listed if recurring.trigger.cron_schedule is not None]

    def _pipeline_id(self, information: Mapping[str, str]) -> str:
        name, namespace = information["name"], self._namespace
        by_name = {"operation": "pipeline_service_get_pipeline_by_name", "name": name, "namespace": namespace}
        try:
            return self._kfp.ask(**by_name).pipeline_id
        except Refused as refused:
            if refused.status != 404:
                raise
        pipeline = {"name": name, "display_name": information.get("displayName", name), "namespace": namespace}
        pipeline["description"] = information.get("description", "")
        try:
            given = {key: value for key, value in pipeline.items() if value}
            return self._kfp.ask("pipeline_service_create_pipeline", pipeline=given).pipeline_id
        except Refused as refused:
            if refused.status != 409:  # somebody else made it meanwhile
                raise
        return self._kfp.ask(**by_name).pipeline_id

    def _version(self, pipeline_id: str, version: str, name: str) -> Any:
        listed = {"field": "pipeline_versions", "name": version, "pipeline_id": pipeline_id}
        found = self._kfp.named("pipeline_service_list_pipeline_versions", **listed)
        return next((one for one in found if one.name in (name, version, None)), None)

    def _send(self, compiled: bytes, **fields: str) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "pipeline.yaml"
            path.write_bytes(compiled)
            return self._kfp.ask("upload_pipeline_version", uploadfile=str(path), **fields)

    def _recurring(self, pipeline: str) -> list[Any]:
        listed = {"field": "recurring_runs", "name": pipeline, "namespace": self._namespace}
        return self._kfp.named("recurring_run_service_list_recurring_runs", **listed)

    def _delete(self, recurring_runs: list[Any]) -> None:
        for recurring in recurring_runs:
            # Without ORPHAN, Kubernetes would delete the workflows of its runs too, those at work included.
            self._ask_about(recurring, "recurring_run_service_delete_recurring_run", propagation_policy="ORPHAN")

    def _ask_about(self, recurring: Any, operation: str, **arguments: str) -> None:
        try:
            self._kfp.ask(operation, recurring_run_id=recurring.recurring_run_id, **arguments)
        except Refused as refused:
            if refused.status != 404:  # gone already
                raise


def cron_with_seconds(cron: str) -> str:
    """``cron`` as KFP reads it, with the seconds first: five fields are Unix's, and get second 0.

    KFP takes five fields too, but as seconds to months, so that ``0 3 * * *`` would run at every hour's third minute.
    """
    fields = cron.split()
    return cron if len(fields) >= SECONDS_FIRST_FIELDS or cron.startswith("@") else " ".join(["0", *fields])


def _uploaded(pipeline: str, version: Any, new: bool) -> Uploaded:
    return Uploaded(
        pipeline=pipeline, version=version.display_name, pipeline_version_id=version.pipeline_version_id, new=new
    )


def _told(recurring: Any) -> Schedule:
    reference = recurring.pipeline_version_reference  # none, if somebody scheduled a file
    return Schedule(
        id=recurring.recurring_run_id,
        pipeline=recurring.display_name,
        pipeline_version_id=(reference and reference.pipeline_version_id) or "",
        cron=recurring.trigger.cron_schedule.cron,
        state="enabled" if recurring.status == "ENABLED" else "disabled",
        created=recurring.created_at,
    )


def _documents(compiled: bytes) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The pipeline's spec, and that of its platform if it has one."""
    spec, *platform = yaml.load_all(compiled, Loader=yaml.CSafeLoader)
    return spec, platform[0] if platform else None


def _normal(spec: Mapping[str, Any], platform: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """A pipeline as its protocol buffers have it: the server writes numbers and empty fields in its own way."""
    return (
        json_format.ParseDict(dict(spec), PipelineSpec()),
        json_format.ParseDict(dict(platform or {}), PlatformSpec()),
    )
