"""`KfpRuns`: the runs of a Kubeflow Pipelines server, as the triggers and the command line see them."""

import copy
import difflib
import re
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from evernear.disk import sha256_bytes
from evernear.errors import ConflictError, PipelineServerError, SettingsError, StoreError
from evernear.kubeflow.connection import Connection, Refused
from evernear.kubeflow.runs import Parameter, Run, State, Step
from evernear.settings import PipelineSettings, merge
from evernear.store import Store

LOCK_POLL_S = 0.5
KINDS: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": (bool,),
    "LIST": (list, tuple),
    "STRUCT": (dict,),
}
NEVER = datetime(1970, 1, 1, tzinfo=UTC)
"""KFP's word for a time that has not come."""


class KfpRuns:
    """The runs of one server. May be shared by threads.

    Every method raises `PipelineServerError` where the server cannot be reached
    or refuses.

    Raises:
        SettingsError: the settings name no server, or one that the token must not be sent to.
    """

    def __init__(self, settings: PipelineSettings, connection: Connection | None = None) -> None:
        self._kfp = connection or Connection(settings)
        self._namespace = settings.namespace
        self._experiment = settings.experiment
        self._lease_s = 2 * settings.timeout_s
        self._pipelines: dict[str, str] = {}
        self._versions: dict[tuple[str, str], Any] = {}

    @property
    def url(self) -> str:
        """Of the API."""
        return self._kfp.url

    def parameters(self, pipeline: str) -> Sequence[Parameter]:
        """The parameters of the pipeline's newest version."""
        return parameters_of(self.newest(pipeline))

    def newest(self, pipeline: str) -> Any:
        """The version of ``pipeline`` that was uploaded last, as KFP describes it."""
        pipeline_id = self._find_pipeline(pipeline).pipeline_id
        sorting = {"sort_by": "created_at desc", "page_size": 1}
        found = self._kfp.ask("pipeline_service_list_pipeline_versions", pipeline_id=pipeline_id, **sorting)
        if not found.pipeline_versions:
            raise PipelineServerError(f"The pipeline {pipeline} has no version; `evernear pipeline upload` makes one.")
        return found.pipeline_versions[0]

    def start(self, pipeline: str, parameters: Mapping[str, Any], key: str, store: Store | None = None) -> Run:
        """Start the newest version of ``pipeline``, once for each ``key``.

        The key is part of the run's name, and a start looks for a run of that name before it creates one. With a
        ``store``, starts of the same key take turns. Without one, two starts at the same moment can create two runs.
        See `arguments_for` about ``parameters``.

        Raises:
            SettingsError: a parameter is unknown or of the wrong type.
        """
        name = f"{pipeline} [{key}]"
        if (found := self._started(name)) is not None:
            return found
        version = self.newest(pipeline)
        arguments = arguments_for(version, parameters)
        experiment_id = self.experiment_id()
        with self._lock(name, store) as held:
            if isinstance(held, Run):
                return held
            if time.monotonic() - held > self._lease_s / 2:
                raise PipelineServerError(f"{self._kfp.url} was too slow to start {name} safely; try it again.")
            run = {
                "display_name": name,
                "experiment_id": experiment_id,
                "pipeline_version_reference": reference_to(version),
                "runtime_config": {"parameters": arguments},
            }
            started = self._kfp.ask("run_service_create_run", run=run)
        return self._told(started)

    def show(self, run_id: str) -> Run:
        """A run with its steps: the tasks that do work, not their drivers, executors and groups."""
        found = self._ask_for_run("run_service_get_run", run_id)
        return self._told(found).model_copy(update={"steps": self._steps(found)})

    def list(self, pipeline: str | None = None, limit: int = 10, since: datetime | None = None) -> Sequence[Run]:
        """The newest runs first, without steps; those of all pipelines, or of one."""
        found: Any = []
        sorting = {"sort_by": "created_at desc", "namespace": self._namespace}
        for run in self._kfp.pages("run_service_list_runs", "runs", **sorting):
            if len(found) == limit or (since is not None and run.created_at < since):
                break
            told = self._told(run)
            if pipeline in (None, told.pipeline):
                found.append(told)
        return tuple(found)

    def stop(self, run_id: str) -> None:
        """Ask a run to end; one that has ended, or is about to, is left alone."""
        if self._is_ending(run_id):
            return
        try:
            self._ask_for_run("run_service_terminate_run", run_id)
        except Refused:
            if not self._is_ending(run_id):  # it ended between the question and the request
                raise

    def experiment_id(self) -> str:
        """The experiment that runs are kept in; made if it is not there."""
        name, namespace = self._experiment, self._namespace
        for _ in range(2):
            arguments = {"field": "experiments", "name": name, "namespace": namespace}
            if found := self._kfp.named("experiment_service_list_experiments", **arguments):
                return found[0].experiment_id
            experiment = {"display_name": name, "description": "Runs of evernear."} | _in(namespace)
            try:
                made = self._kfp.ask("experiment_service_create_experiment", experiment=experiment)
            except Refused as refused:
                if refused.status != 409:  # somebody else made it meanwhile
                    raise
            else:
                return made.experiment_id
        raise PipelineServerError(
            f"The experiment {name} at {self._kfp.url} is there but cannot be seen; "
            "another pipeline.experiment may do, since KFP takes upper and lower case as the same name."
        )

    @contextmanager
    def _lock(self, name: str, store: Store | None) -> Generator[Run | float]:
        """Hold the right to start ``name``; yields the moment (monotonic seconds) when the hold began.

        Yields the run instead if another process starts it meanwhile. A process that dies holding the lock, or gets no
        answer to its request, leaves it behind. After the lease the request has been executed or never will be, and
        others take the lock over.
        """
        if store is None:
            held_since_s = time.monotonic()
            yield self._started(name) or held_since_s
            return
        key = f"runs/starting/{sha256_bytes(name.encode())[:32]}"
        if (run := self._take_lock(store, key, name)) is not None:
            yield run
            return
        held_since_s = time.monotonic()
        try:
            yield self._started(name) or held_since_s
        except Refused:
            store.delete(key)
            raise
        with suppress(StoreError):  # the run is started, so nobody waits for the lock
            store.delete(key)

    def _take_lock(self, store: Store, key: str, name: str) -> Run | None:
        """Take the lock of ``name``, or return its run as soon as there is one."""
        ours, seen, since_s = uuid.uuid4().bytes, "", time.monotonic()
        while True:
            expired = seen if time.monotonic() - since_s > self._lease_s else None
            try:
                store.put_if(key, ours, expired or None)
            except ConflictError:
                current = store.find(key)
                if current is not None and current[1] != seen:
                    seen, since_s = current[1], time.monotonic()
                if (run := self._started(name)) is not None:
                    return run
                time.sleep(LOCK_POLL_S)
            else:
                return None

    def _started(self, name: str) -> Run | None:
        """The run of that name; the oldest, should there be several."""
        arguments = {"field": "runs", "name": name, "sort_by": "created_at asc", "namespace": self._namespace}
        found = self._kfp.named("run_service_list_runs", **arguments)
        return self._told(found[0]) if found else None

    def _find_pipeline(self, name: str) -> Any:
        try:
            return self._kfp.ask("pipeline_service_get_pipeline_by_name", name=name, namespace=self._namespace)
        except Refused as refused:
            if refused.status != 404:
                raise
            hint = "`evernear pipeline upload` puts it there"
            raise PipelineServerError(f"There is no pipeline {name} at {self._kfp.url}; {hint}.") from None

    def _ask_for_run(self, operation: str, run_id: str) -> Any:
        try:
            return self._kfp.ask(operation, run_id=run_id)
        except Refused as refused:
            if refused.status != 404:
                raise
            hint = "`evernear pipeline status` lists those that there are"
            raise PipelineServerError(f"There is no run {run_id} at {self._kfp.url}; {hint}.") from None

    def _is_ending(self, run_id: str) -> bool:
        state = _state(self._ask_for_run("run_service_get_run", run_id).state)
        return state.is_final or state is State.CANCELING

    def _told(self, run: Any) -> Run:
        state = _state(run.state)
        pipeline, version = self._names_of(run)
        key = re.fullmatch(re.escape(pipeline) + r" \[(.+)\]", run.display_name)
        return Run(
            id=run.run_id,
            name=run.display_name,
            pipeline=pipeline,
            pipeline_version=version,
            state=state,
            created=run.created_at.astimezone(UTC),
            ended=_moment(run.finished_at) if state.is_final else None,
            parameters=(run.runtime_config and run.runtime_config.parameters) or {},
            key=key[1] if key else "",
            error=_error(run),
            url=f"{self._kfp.ui_url}/#/runs/details/{run.run_id}" if self._kfp.ui_url else "",
        )

    def _names_of(self, run: Any) -> tuple[str, str]:
        """Names of the run's pipeline and version; their ids where they have been deleted."""
        reference = run.pipeline_version_reference
        if reference is None:  # started from a file
            spec = run.pipeline_spec or {}
            return spec.get("pipeline_spec", spec).get("pipelineInfo", {}).get("name", ""), ""
        pipeline_id, version_id = reference.pipeline_id, reference.pipeline_version_id
        if pipeline_id not in self._pipelines:
            found = self._unless_deleted("pipeline_service_get_pipeline", pipeline_id=pipeline_id)
            self._pipelines[pipeline_id] = (found.name or found.display_name) if found else pipeline_id
        version = self._version(run)
        return self._pipelines[pipeline_id], version.display_name if version else version_id

    def _version(self, run: Any) -> Any:
        reference = run.pipeline_version_reference
        ids = {"pipeline_id": reference.pipeline_id, "pipeline_version_id": reference.pipeline_version_id}
        key = (reference.pipeline_id, reference.pipeline_version_id)
        if key not in self._versions:
            self._versions[key] = self._unless_deleted("pipeline_service_get_pipeline_version", **ids)
        return self._versions[key]

    def _unless_deleted(self, operation: str, **ids: str) -> Any:
        try:
            return self._kfp.ask(operation, **ids)
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    def _steps(self, run: Any) -> tuple[Step, ...]:
        """KFP tells a node of the workflow for each driver, executor and group too; the spec knows which do work."""
        version = self._version(run) if run.pipeline_version_reference else None
        spec = version.pipeline_spec if version else run.pipeline_spec
        names = tasks_of(spec) if spec else None
        details = (run.run_details and run.run_details.task_details) or ()
        last = {d.display_name: d for d in details if _is_work(d.display_name, names)}
        steps = [
            Step(
                name=detail.display_name,
                state=_state(detail.state),
                started=_moment(detail.start_time),
                ended=_moment(detail.end_time),
                error=_error(detail),
            )
            for detail in last.values()
        ]
        return tuple(sorted(steps, key=lambda step: step.started or datetime.max.replace(tzinfo=UTC)))


def parameters_of(version: Any) -> Sequence[Parameter]:
    """The parameters of a pipeline version."""
    return parameters_in(_root(version.pipeline_spec))


def parameters_in(root: Mapping[str, Any]) -> Sequence[Parameter]:
    """The parameters that the ``root`` of a compiled pipeline declares."""
    found = root.get("inputDefinitions", {}).get("parameters", {})
    return tuple(
        Parameter(
            name=name,
            type=parameter["parameterType"],
            default=parameter.get("defaultValue"),
            description=parameter.get("description", ""),
            required="defaultValue" not in parameter and not parameter.get("isOptional", False),
        )
        for name, parameter in found.items()
    )


def arguments_for(version: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a run of ``version``: those ``given``, JSON objects merged over their defaults.

    KFP replaces a default whole, so a run that sends one key of an object would lose what an upload pinned in it.

    Raises:
        SettingsError: a parameter is unknown, missing or has the wrong type.
    """
    known = {parameter.name: parameter for parameter in parameters_of(version)}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise SettingsError(f"The pipeline has no parameter {name!r}{hint}")
        kind = known[name].type
        if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "BOOLEAN"):
            raise SettingsError(f"The pipeline's parameter {name} is a {kind}; {value!r} is none.")
    if missing := [name for name, parameter in known.items() if parameter.required and name not in given]:
        raise SettingsError(f"The pipeline's parameter {missing[0]} has no default; give it a value.")
    arguments: dict[str, Any] = {name: known[name].default for name in given if known[name].type == "STRUCT"}
    arguments = copy.deepcopy({name: default for name, default in arguments.items() if default})
    merge(arguments, given)
    return arguments


def tasks_of(spec: Mapping[str, Any]) -> set[str]:
    """Names of the tasks that do work, in whatever group they stand."""
    components = spec.get("pipeline_spec", spec)["components"]
    dags = [_root(spec), *components.values()]
    return {
        name
        for dag in dags
        for name, task in dag.get("dag", {}).get("tasks", {}).items()
        if "executorLabel" in components[task["componentRef"]["name"]]
    }


def reference_to(version: Any) -> dict[str, str]:
    """The pinned version, as runs and schedules name it."""
    return {"pipeline_id": version.pipeline_id, "pipeline_version_id": version.pipeline_version_id}


def _root(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return spec.get("pipeline_spec", spec)["root"]


def _in(namespace: str) -> dict[str, str]:
    return {"namespace": namespace} if namespace else {}


def _is_work(name: str, names: set[str] | None) -> bool:
    if names is not None:
        return name in names
    return name not in ("root", "executor") and not name.endswith("-driver")


def _state(state: str | None) -> State:
    try:
        return State((state or "pending").lower())
    except ValueError:  # RUNTIME_STATE_UNSPECIFIED: KFP has not looked at it yet
        return State.PENDING


def _moment(moment: datetime | None) -> datetime | None:
    return None if moment is None or moment <= NEVER else moment.astimezone(UTC)


def _error(told: Any) -> str:
    """KFP gives the reason beside the run or task, or with the last of its states; often it gives none."""
    last = told.state_history[-1].error if told.state_history else None
    error = told.error or last
    return (error.message or "") if error else ""
