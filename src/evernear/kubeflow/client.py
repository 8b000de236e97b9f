"""Start, list, show and stop runs on a Kubeflow Pipelines server."""

import copy
import re
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from evernear.common.disk import sha256_bytes
from evernear.common.run_record import RUNS, STARTING
from evernear.common.store import Store
from evernear.common.text import unknown_name
from evernear.errors import ConflictError, PipelineServerError, SettingsError, StoreError
from evernear.kubeflow import connection
from evernear.kubeflow.connection import Connection
from evernear.kubeflow.runs import STARTED_BY, KfpStep, Parameter, Run, State
from evernear.settings import PipelineSettings, merge

LOCKS = f"{RUNS}{STARTING}/"
EXPERIMENT = "evernear"
"""KFP's list of runs has a filter for it."""
LOCK_POLL_S = 0.5
UNSET_TIME = datetime(1970, 1, 1, tzinfo=UTC)
"""KFP's value for an unset time."""


class KfpRuns:
    """The runs of one server, thread-safe. Every method raises `PipelineServerError` if the server
    is unreachable or rejects the request."""

    def __init__(self, settings: PipelineSettings, shared: Connection | None = None) -> None:
        self._kfp = shared or Connection(settings)
        self._namespace = settings.namespace
        self._lease_s = 2 * connection.TIMEOUT_S
        self._pipelines: dict[str, str] = {}
        self._versions: dict[tuple[str, str], Any] = {}

    @property
    def url(self) -> str:
        return self._kfp.url

    def parameters(self, pipeline: str) -> Sequence[Parameter]:
        return parameters_of(self.newest(pipeline))

    def newest(self, pipeline: str) -> Any:
        """As an object of the KFP API."""
        by_name = {"name": pipeline, "namespace": self._namespace}
        existing = self._kfp.find("pipeline_service_get_pipeline_by_name", **by_name)
        if existing is None:
            hint = "upload it with `evernear pipeline upload`"
            if not self._namespace:
                hint += ", or set pipeline.namespace on a multi-user server"
            raise PipelineServerError(f'No pipeline "{pipeline}" at {self._kfp.url}; {hint}.')
        newest = self.newest_of(existing.pipeline_id)
        if newest is None:
            raise PipelineServerError(f"The pipeline {pipeline} has no version; run `evernear pipeline upload`.")
        return newest

    def newest_of(self, pipeline_id: str) -> Any:
        """The newest version of a pipeline, or None if it has none."""
        sorting = {"sort_by": "created_at desc", "page_size": 1}
        page = self._kfp.find("pipeline_service_list_pipeline_versions", pipeline_id=pipeline_id, **sorting)
        return page.pipeline_versions[0] if page and page.pipeline_versions else None

    def start(
        self, pipeline: str, parameters: Mapping[str, Any], key: str, store: Store | None = None, again: str = ""
    ) -> Run:
        """Start the newest version of ``pipeline``, or return the run with this ``key``. The key is
        part of the run's name, which is looked up first. With a ``store``, a lock serializes
        starts. Without one, two simultaneous starts can create two runs. ``again`` is the command
        that repeats this start with this key."""
        name = f"{pipeline} [{key}]"
        if (existing := self._find_run(name)) is not None:
            self._remove_locks(store)
            return existing
        version = self.newest(pipeline)
        self._pipelines[version.pipeline_id] = pipeline
        self._versions[version.pipeline_id, version.pipeline_version_id] = version
        arguments = arguments_for(version, parameters)
        experiment_id = self.experiment_id()
        with self._lock(name, store) as lock:
            if isinstance(lock, Run):
                return lock
            if time.monotonic() - lock > self._lease_s / 2:
                raise PipelineServerError(f"{self._kfp.url} responds too slowly to start {name} only once; try again.")
            request = {
                "display_name": name,
                "experiment_id": experiment_id,
                "pipeline_version_reference": reference_to(version),
                "runtime_config": {"parameters": arguments},
            }
            try:
                created = self._kfp.call("run_service_create_run", run=request)
            except PipelineServerError as error:
                if error.status:
                    raise
                repeat = f"`{again}`" if again else f"a start with the key {key}"
                raise PipelineServerError(
                    f"{error} The run may exist nevertheless: {repeat} returns it, or starts it if it does not."
                ) from None
        self._remove_locks(store)
        return self._run_from(created)

    def show(self, run_id: str) -> Run:
        """A run with its steps, without KFP's driver, executor and group nodes."""
        resource = self._get_run(run_id)
        return self._run_from(resource).model_copy(update={"steps": self._steps(resource)})

    def list(self, pipeline: str | None = None, limit: int = 10) -> Sequence[Run]:
        """The runs of one or all pipelines, newest first and without their steps."""
        sorting = {"sort_by": "created_at desc", "namespace": self._namespace}
        runs = map(self._run_from, self._kfp.pages("run_service_list_runs", "runs", **sorting))
        return tuple(islice((run for run in runs if pipeline in (None, run.pipeline)), limit))

    def stop(self, run_id: str) -> None:
        """Terminate a run, unless it has ended or is terminating."""
        if self._is_ending(run_id):
            return
        try:
            self._kfp.call("run_service_terminate_run", run_id=run_id)
        except PipelineServerError as error:
            if not error.status or not self._is_ending(run_id):  # the run may have ended since the check above
                raise

    def experiment_id(self) -> str:
        """The ID of `EXPERIMENT`, which is created if it does not exist."""
        name, namespace = EXPERIMENT, self._namespace
        for _ in range(2):
            arguments = {"field": "experiments", "name": name, "namespace": namespace}
            if matches := self._kfp.find_by_name("experiment_service_list_experiments", **arguments):
                return matches[0].experiment_id
            experiment = {"display_name": name, "description": "Runs of evernear."} | _in(namespace)
            try:
                created = self._kfp.call("experiment_service_create_experiment", experiment=experiment)
            except PipelineServerError as error:
                if error.status != 409:  # a different client has just created it
                    raise
            else:
                return created.experiment_id
        raise PipelineServerError(
            f"The experiment {name} exists at {self._kfp.url} but is not listed, maybe in another case; "
            "delete it there."
        )

    @contextmanager
    def _lock(self, name: str, store: Store | None) -> Generator[Run | float]:
        """Lock the start of the run ``name``. Yield the time of the acquisition, or the run. If the
        process dies or gets no response, the lock remains until others take it over at the end of
        its lease. By then, the server has either executed the request or never will."""
        if store is None:
            locked_at_s = time.monotonic()
            yield self._find_run(name) or locked_at_s
            return
        key = f"{LOCKS}{sha256_bytes(name.encode())[:32]}"
        if (run := self._acquire(store, key, name)) is not None:
            yield run
            return
        locked_at_s = time.monotonic()
        try:
            yield self._find_run(name) or locked_at_s
        except PipelineServerError as error:
            if error.status:
                store.delete(key)
            raise
        with suppress(StoreError):  # the run has started, so a remaining lock delays no one
            store.delete(key)

    def _acquire(self, store: Store, key: str, name: str) -> Run | None:
        """Acquire the lock for the run ``name``, or return the run as soon as it exists."""
        token, seen_etag, since_s = f"{name}\n{uuid.uuid4()}".encode(), "", time.monotonic()
        while True:
            expired_etag = seen_etag if time.monotonic() - since_s > self._lease_s else None
            try:
                store.put_if(key, token, expired_etag or None)
            except ConflictError:
                entry = store.find(key)
                if entry is not None and entry[1] != seen_etag:
                    seen_etag, since_s = entry[1], time.monotonic()
                if (run := self._find_run(name)) is not None:
                    return run
                time.sleep(LOCK_POLL_S)
            else:
                return None

    def _remove_locks(self, store: Store | None) -> None:
        """Remove the locks of all runs that stand. Those whose starter got no response remain
        until then."""
        # A remaining lock delays no one.
        with suppress(StoreError, PipelineServerError):
            for info in store.list(LOCKS) if store else ():
                entry = store.find(info.key) if store else None
                name = entry[0].decode(errors="replace").rpartition("\n")[0] if entry else ""
                if store and name and self._find_run(name) is not None:
                    store.delete(info.key)

    def _find_run(self, name: str) -> Run | None:
        arguments = {"field": "runs", "name": name, "sort_by": "created_at asc", "namespace": self._namespace}
        matches = self._kfp.find_by_name("run_service_list_runs", **arguments)
        return self._run_from(matches[0]) if matches else None

    def _get_run(self, run_id: str) -> Any:
        run = self._kfp.find("run_service_get_run", run_id=run_id)
        if run is None:
            raise PipelineServerError(f"No run {run_id} at {self._kfp.url}; `evernear pipeline status` lists the runs.")
        return run

    def _is_ending(self, run_id: str) -> bool:
        state = _state(self._get_run(run_id).state)
        return state.is_final or state is State.CANCELING

    def _run_from(self, run: Any) -> Run:
        state = _state_of_run(run)
        pipeline, version = self._names_of(run)
        key = re.fullmatch(re.escape(pipeline) + r" \[(.+)\]", run.display_name)
        return Run(
            id=run.run_id,
            name=run.display_name,
            pipeline=pipeline,
            pipeline_version=version,
            state=state,
            created=run.created_at.astimezone(UTC),
            ended=_utc(run.finished_at) if state.is_final else None,
            parameters=(run.runtime_config and run.runtime_config.parameters) or {},
            key=key[1] if key else "",
            error=_error(run),
            url=f"{self._kfp.ui_url}/#/runs/details/{run.run_id}" if self._kfp.ui_url else "",
        )

    def _names_of(self, run: Any) -> tuple[str, str]:
        """The names of the run's pipeline and version, or the IDs of deleted ones."""
        reference = run.pipeline_version_reference
        if reference is None:  # started from a file
            spec = run.pipeline_spec or {}
            return spec.get("pipeline_spec", spec).get("pipelineInfo", {}).get("name", ""), ""
        pipeline_id = reference.pipeline_id
        if pipeline_id not in self._pipelines:
            resource = self._kfp.find("pipeline_service_get_pipeline", pipeline_id=pipeline_id)
            self._pipelines[pipeline_id] = (resource.name or resource.display_name) if resource else pipeline_id
        return self._pipelines[pipeline_id], self.version_name_of(reference)

    def version_name_of(self, reference: Any) -> str:
        """The name of the pipeline version that a run or schedule refers to, or its ID if it was
        deleted."""
        version = self._version(reference)
        return version.display_name if version else reference.pipeline_version_id

    def _version(self, reference: Any) -> Any:
        ids = {"pipeline_id": reference.pipeline_id, "pipeline_version_id": reference.pipeline_version_id}
        key = (reference.pipeline_id, reference.pipeline_version_id)
        if key not in self._versions:
            self._versions[key] = self._kfp.find("pipeline_service_get_pipeline_version", **ids)
        return self._versions[key]

    def _steps(self, run: Any) -> tuple[KfpStep, ...]:
        """KFP also lists drivers, executors and groups, which are not tasks of the spec."""
        reference = run.pipeline_version_reference
        version = self._version(reference) if reference else None
        spec = version.pipeline_spec if version else run.pipeline_spec
        names = tasks_of(spec) if spec else None
        details = (run.run_details and run.run_details.task_details) or ()
        last = {d.display_name: d for d in details if _is_task(d.display_name, names)}
        steps = [
            KfpStep(
                name=detail.display_name,
                state=_state(detail.state),
                started=_utc(detail.start_time),
                ended=_utc(detail.end_time),
                error=_error(detail),
            )
            for detail in last.values()
        ]
        return tuple(sorted(steps, key=lambda step: step.started or datetime.max.replace(tzinfo=UTC)))


def parameters_of(version: Any) -> Sequence[Parameter]:
    return parameters_in(_root(version.pipeline_spec))


def parameters_in(root: Mapping[str, Any]) -> Sequence[Parameter]:
    """The parameters of ``root``, the root component of a compiled pipeline."""
    parameters = root.get("inputDefinitions", {}).get("parameters", {})
    return tuple(
        Parameter(
            name=name,
            type=parameter["parameterType"],
            default=parameter.get("defaultValue"),
            description=parameter.get("description", ""),
            required="defaultValue" not in parameter and not parameter.get("isOptional", False),
        )
        for name, parameter in parameters.items()
    )


def arguments_for(version: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as arguments for a run of ``version``, with JSON objects merged into the defaults.
    KFP replaces a whole default, so a run that sends one key of an object would lose the others."""
    declared = {parameter.name: parameter for parameter in parameters_of(version)}
    values = {name: value for name, value in values.items() if name != STARTED_BY or name in declared}
    for name, value in values.items():
        if name not in declared:
            raise SettingsError(f"The pipeline has no parameter {name!r}; {unknown_name(name, declared)}")
        if not declared[name].accepts(value):
            raise SettingsError(f"The pipeline parameter {name} must be a {declared[name].type}, not {value!r}.")
    if missing := [name for name, parameter in declared.items() if parameter.required and name not in values]:
        raise SettingsError(f"The pipeline parameter {missing[0]} has no default; set it.")
    objects = [declared[name] for name in values if declared[name].type == "STRUCT"]
    arguments = {parameter.name: copy.deepcopy(parameter.default) for parameter in objects if parameter.default}
    merge(arguments, values)
    return arguments


def tasks_of(spec: Mapping[str, Any]) -> set[str]:
    """Names of all tasks that run a container, also in nested groups."""
    components = spec.get("pipeline_spec", spec)["components"]
    dags = [_root(spec), *components.values()]
    return {
        name
        for dag in dags
        for name, task in dag.get("dag", {}).get("tasks", {}).items()
        if "executorLabel" in components[task["componentRef"]["name"]]
    }


def reference_to(version: Any) -> dict[str, str]:
    """A pipeline version's reference in runs and schedules."""
    return {"pipeline_id": version.pipeline_id, "pipeline_version_id": version.pipeline_version_id}


def _root(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return spec.get("pipeline_spec", spec)["root"]


def _in(namespace: str) -> dict[str, str]:
    return {"namespace": namespace} if namespace else {}


def _is_task(name: str, names: set[str] | None) -> bool:
    if names is not None:
        return name in names
    return name not in ("root", "executor") and not name.endswith("-driver")


def _state(state: str | None) -> State:
    try:
        return State((state or "pending").lower())
    except ValueError:  # RUNTIME_STATE_UNSPECIFIED, because KFP has not processed the run yet
        return State.PENDING


def _state_of_run(run: Any) -> State:
    """KFP reports some runs as failed that were stopped."""
    state, history = _state(run.state), run.state_history or ()
    if state is State.FAILED and any(_state(entry.state) is State.CANCELING for entry in history):
        return State.CANCELED
    return state


def _utc(value: datetime | None) -> datetime | None:
    return None if value is None or value <= UNSET_TIME else value.astimezone(UTC)


def _error(resource: Any) -> str:
    """KFP reports a run's or task's error in it or in its last state, and often omits it."""
    last = resource.state_history[-1].error if resource.state_history else None
    error = resource.error or last
    return (error.message or "") if error else ""
