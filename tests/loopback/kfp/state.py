"""The state of the API server, and `RunControl`, which changes the state of a run."""

import re
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]
NEVER = "1970-01-01T00:00:00Z"
"""The API server's value for an unset time."""
CRON = re.compile(r"@[a-z]+( \S+)?|([\d*?,/-]+ ){4}[\dA-Z*?,/-]+( [\dA-Z*?,/-]+)?", re.IGNORECASE)
"""robfig/cron 1.2: the first field is seconds and the day of the week is optional, unlike Unix
cron."""
PIPELINE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")
"""``ValidatePipelineName`` in ``backend/src/apiserver/common/utils.go``, which the webhook for
versions calls too."""
HTTP = {3: 400, 5: 404, 6: 409, 7: 403, 9: 400, 10: 409, 13: 500, 14: 503, 16: 401}
"""The HTTP status that the gateway derives from each gRPC status."""
FINAL = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")


class ApiServerError(Exception):
    """The API server rejects a request with a gRPC status other than OK."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> ApiServerError:
    return ApiServerError(3, message)


def missing(kind: str, name: str) -> ApiServerError:
    return ApiServerError(5, f"{kind} {name} not found")


def exists(message: str) -> ApiServerError:
    return ApiServerError(6, message)


def forbidden(message: str) -> ApiServerError:
    return ApiServerError(7, message)


class State:
    """Pipelines, versions, experiments, runs and recurring runs. Methods take the lock; readers
    must also take it."""

    def __init__(self, now: Callable[[], datetime], namespaces: frozenset[str]) -> None:
        self.lock = threading.RLock()
        self.now = now
        self.namespaces = namespaces
        """The namespaces that the caller may use in multi-user mode; empty in single-user mode."""
        self.pipelines: dict[str, Resource] = {}
        self.versions: dict[str, Resource] = {}
        self.files: dict[str, bytes] = {}
        """The uploaded file of each version."""
        self.experiments: dict[str, Resource] = {}
        self.runs: dict[str, Resource] = {}
        self.recurring_runs: dict[str, Resource] = {}

    def stamp(self) -> str:
        """Return the current time in the API server's format, in whole seconds."""
        return self.now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def check_namespace(self, namespace: str, what: str) -> None:
        if not self.namespaces:
            return
        if not namespace:
            raise invalid(f"{what} cannot have an empty namespace in multi-user mode")
        if namespace not in self.namespaces:
            raise forbidden(f"Unauthorized access: check if you have access to namespace {namespace}")

    def create_pipeline(self, name: str, **fields: str) -> Resource:
        with self.lock:
            namespace = fields.get("namespace", "")
            if namespace:
                self.check_namespace(namespace, "A pipeline")
            if not name:
                raise invalid("pipeline's name cannot be empty")
            if any(
                p["name"].casefold() == name.casefold() and _namespace(p) == namespace for p in self.pipelines.values()
            ):
                message = f"Failed to create a new pipeline. The name {name} already exist. Please specify a new name"
                raise exists(message)
            pipeline = self._new("pipeline_id", {"name": name, "display_name": name, **_filled(fields)})
            self.pipelines[pipeline["pipeline_id"]] = pipeline
            return pipeline

    def create_version(self, pipeline_id: str, name: str, content: bytes, **fields: str) -> Resource:
        with self.lock:
            if pipeline_id not in self.pipelines:
                raise missing("Pipeline", pipeline_id)
            spec = read_spec(content)
            if any(v["name"] == name and v["pipeline_id"] == pipeline_id for v in self.versions.values()):
                message = f"Failed to create a new pipeline version. The name {name} already exist. Specify a new name"
                raise exists(message)
            values = {"pipeline_id": pipeline_id, "name": name, "display_name": name, **_filled(fields)}
            version = self._new("pipeline_version_id", {**values, "pipeline_spec": spec})
            self.versions[version["pipeline_version_id"]] = version
            self.files[version["pipeline_version_id"]] = content
            return version

    def create_experiment(self, request: Resource) -> Resource:
        with self.lock:
            name, namespace = request.get("display_name", ""), request.get("namespace", "")
            if not name:
                raise invalid("Experiment name is empty. Please specify a valid experiment name")
            self.check_namespace(namespace, "An experiment")
            for other in self.experiments.values():
                if other["display_name"].casefold() == name.casefold() and _namespace(other) == namespace:
                    raise exists(f"Failed to create a new experiment. The name {name} already exists.")
            experiment = self._new("experiment_id", {**request, "storage_state": "AVAILABLE"})
            self.experiments[experiment["experiment_id"]] = experiment
            return experiment

    def create_run(self, request: Resource) -> Resource:
        with self.lock:
            if not request.get("display_name"):
                raise invalid("The run name is empty. Please specify a valid name")
            experiment = self._experiment_of(request, "A run")
            version = self.version_of(request)
            check_parameters(version["pipeline_spec"], request.get("runtime_config", {}).get("parameters", {}))
            run = self._new("run_id", {**request, "experiment_id": experiment["experiment_id"]})
            reference = {key: version[key] for key in ("pipeline_id", "pipeline_version_id")}
            run |= {"storage_state": "AVAILABLE", "state": "PENDING", "pipeline_version_reference": reference}
            run |= {"scheduled_at": run["created_at"], "finished_at": NEVER, "service_account": "pipeline-runner"}
            run["state_history"] = [{"update_time": run["created_at"], "state": "PENDING"}]
            self.runs[run["run_id"]] = run
            return run

    def create_recurring_run(self, request: Resource) -> Resource:
        with self.lock:
            if not request.get("display_name"):
                raise invalid("Recurring run name is empty. Please specify a valid name")
            experiment = self._experiment_of(request, "Recurring run")
            version = self.version_of(request)
            check_parameters(version["pipeline_spec"], request.get("runtime_config", {}).get("parameters", {}))
            _check_trigger(request)
            job = self._new("recurring_run_id", {**request, "experiment_id": experiment["experiment_id"]})
            enabled = request.get("mode") == "ENABLE"
            job |= {"updated_at": job["created_at"], "mode": "ENABLE" if enabled else "DISABLE"}
            job["status"] = "ENABLED" if enabled else "DISABLED"
            self.recurring_runs[job["recurring_run_id"]] = job
            return job

    def version_of(self, request: Resource) -> Resource:
        reference = request.get("pipeline_version_reference", {})
        version = self.versions.get(reference.get("pipeline_version_id", ""))
        if version is None:
            raise missing("PipelineVersion", reference.get("pipeline_version_id", ""))
        if version["pipeline_id"] != reference.get("pipeline_id", version["pipeline_id"]):
            message = "Pipeline version {pipeline_version_id} belongs to another pipeline (not {pipeline_id})"
            raise invalid(message.format(**reference))
        return version

    def _experiment_of(self, request: Resource, what: str) -> Resource:
        experiment_id = request.get("experiment_id", "")
        if experiment_id:
            if experiment_id not in self.experiments:
                raise missing("Experiment", experiment_id)
            experiment = self.experiments[experiment_id]
        elif self.namespaces:
            raise invalid("Experiment id can not be empty in multi-user mode")
        else:
            named = [e for e in self.experiments.values() if e["display_name"] == "Default"]
            experiment = named[0] if named else self.create_experiment({"display_name": "Default"})
        self.check_namespace(_namespace(experiment), what)
        return experiment

    def _new(self, id_field: str, fields: Mapping[str, Any]) -> Resource:
        return {**fields, id_field: str(uuid.uuid4()), "created_at": self.stamp()}


class RunControl:
    """Controls the state of one run for a test or an executor. Tasks are reported like Argo nodes,
    with drivers."""

    def __init__(self, state: State, run_id: str, directory: Path) -> None:
        self._state = state
        self.id = run_id
        self._directory = directory
        self.ended = threading.Event()

    @property
    def resource(self) -> Resource:
        """The run as the API returns it."""
        return self._state.runs[self.id]

    @property
    def name(self) -> str:
        return self.resource["display_name"]

    @property
    def state(self) -> str:
        return self.resource["state"]

    @property
    def parameters(self) -> dict[str, Any]:
        """The explicit parameters of the run, without the pipeline's defaults."""
        return self.resource.get("runtime_config", {}).get("parameters", {})

    @property
    def is_canceling(self) -> bool:
        return self.state == "CANCELING"

    def compiled(self) -> Path:
        """Write the uploaded pipeline to a file, with the run ID where the API server inserts
        it."""
        content = self._state.files[self.resource["pipeline_version_reference"]["pipeline_version_id"]]
        path = self._directory / f"{self.id}.yaml"
        path.write_text(content.decode().replace("{{$.pipeline_job_uuid}}", self.id))
        return path

    def begin(self) -> None:
        """Mark the workflow as running, after its root driver."""
        self._enter("RUNNING")
        self.task("root", "RUNNING")

    def task(self, name: str, state: str, error: str = "") -> None:
        """Report a task of the pipeline as ``state``."""
        with self._state.lock:
            details = self.resource.setdefault("run_details", {}).setdefault("task_details", [])
            if not any(detail["display_name"] == name for detail in details):
                self._node(f"{name}-driver", "SUCCEEDED")
                if name != "root" and state != "SKIPPED":
                    self._node("executor", "PENDING", parent=name)
            self._node(name, state, error=error)
            for detail in details:
                if detail["display_name"] == "executor" and detail.get("parent_task_id") == name:
                    self._move(detail, state)

    def end(self, state: str = "SUCCEEDED") -> None:
        """End the workflow; ``state`` is SUCCEEDED, FAILED or CANCELED."""
        assert state in FINAL
        with self._state.lock:
            self.task("root", state)
            self._enter(state)
            self.resource["finished_at"] = self._state.stamp()
        self.ended.set()

    def _enter(self, state: str) -> None:
        with self._state.lock:
            self.resource["state"] = state
            self.resource["state_history"].append({"update_time": self._state.stamp(), "state": state})

    def _node(self, name: str, state: str, parent: str = "", error: str = "") -> None:
        details = self.resource["run_details"]["task_details"]
        detail = next((d for d in details if d["display_name"] == name and name != "executor"), None)
        if detail is None:
            detail = {"run_id": self.id, "task_id": str(uuid.uuid4()), "display_name": name, "state_history": []}
            detail |= {"create_time": self._state.stamp(), "start_time": NEVER, "end_time": NEVER}
            if parent:
                detail["parent_task_id"] = parent
            details.append(detail)
        self._move(detail, state, error)

    def _move(self, detail: Resource, state: str, error: str = "") -> None:
        entry: Resource = {"update_time": self._state.stamp(), "state": state}
        if error:
            entry["error"] = {"code": 13, "message": error}
        detail["state"] = state
        detail["state_history"].append(entry)
        if state != "PENDING" and detail["start_time"] == NEVER:
            detail["start_time"] = self._state.stamp()
        if state in FINAL:
            detail["end_time"] = self._state.stamp()


@cache
def read_spec(content: bytes) -> Resource:
    """Return the pipeline spec of an uploaded file, as the API returns it. Raises if the file is
    invalid."""
    try:
        documents = list(yaml.load_all(content, yaml.CSafeLoader))
    except yaml.YAMLError:
        raise invalid("Failed to create a pipeline version due to template creation error: invalid YAML") from None
    if not documents or not isinstance(documents[0], dict) or "pipelineInfo" not in documents[0]:
        raise invalid("unknown template format: pipeline spec is invalid")
    spec, *platform = documents
    if not PIPELINE_NAME.fullmatch(spec["pipelineInfo"].get("name", "")):
        raise invalid("pipeline's name must contain only lowercase alphanumeric characters or '-'")
    return {"pipeline_spec": spec, "platform_spec": platform[0]} if platform else spec


def check_parameters(spec: Resource, values: Mapping[str, Any]) -> None:
    """Compare the parameters of a run with those of the pipeline, like the API server."""
    root = spec.get("pipeline_spec", spec)["root"]
    declared = root.get("inputDefinitions", {}).get("parameters", {})
    kinds: dict[str, tuple[type, ...]] = {
        "STRING": (str,),
        "NUMBER_INTEGER": (int, float),
        "NUMBER_DOUBLE": (int, float),
        "BOOLEAN": (bool,),
        "LIST": (list,),
        "STRUCT": (dict,),
    }
    for name, parameter in declared.items():
        if name not in values:
            if not parameter.get("isOptional") and "defaultValue" not in parameter:
                raise invalid(
                    f"parameter {name} is not optional, yet has neither default value nor user provided value"
                )
            continue
        kind, value = parameter["parameterType"], values[name]
        if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "BOOLEAN"):
            raise invalid(f"input parameter {name} requires type {kind}, but the parameter value is not of that type")
    if extra := [name for name in values if name not in declared]:
        raise invalid(f"parameter(s) provided are not required by pipeline: {', '.join(extra)}")


def _check_trigger(request: Resource) -> None:
    concurrency = int(request.get("max_concurrency", 0))
    if not 1 <= concurrency <= 10:
        raise invalid(f"Max concurrency of a recurring run must be at least 1 and at most 10. Received {concurrency}")
    cron = request.get("trigger", {}).get("cron_schedule", {}).get("cron", "")  # evernear has no other trigger
    if not CRON.fullmatch(cron):
        raise invalid("Schedule cron is not a supported format(https://godoc.org/github.com/robfig/cron).")


def _filled(fields: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in fields.items() if value}


def _namespace(resource: Resource) -> str:
    return resource.get("namespace", "")
