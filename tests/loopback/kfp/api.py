"""The HTTP layer, which validates every request and response against the contract."""

import email
import email.policy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from tests.loopback.kfp import contract
from tests.loopback.kfp.listing import page
from tests.loopback.kfp.state import FINAL, HTTP, ApiServerError, Resource, State, invalid, missing

COMMON = ("created_at", "description", "display_name", "namespace")
FIELDS: dict[str, tuple[str, ...]] = {
    "version": ("pipeline_version_id", "name", "id", "created_at", "display_name", "description", "status"),
    "experiment": ("experiment_id", "name", "id", "last_run_created_at", "storage_state", *COMMON),
    "run": ("run_id", "experiment_id", "recurring_run_id", "state", "storage_state", "finished_at", *COMMON),
    "recurring_run": ("recurring_run_id", "name", "id", "updated_at", "created_at", "display_name", "description"),
}
"""Fields for filters and sorting: the API server's APIToModelFieldMap of each model."""


@dataclass(frozen=True)
class ValidRequest:
    """A valid request."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Any
    file: bytes


@dataclass
class Fault:
    """The next ``times`` requests of ``operation`` (any if empty) fail with ``status``."""

    operation: str
    status: int
    times: int
    after: bool
    """Whether the server executes the request and only the response is lost."""
    delay_s: float


class Api:
    """The operations, named as in the Swagger file."""

    def __init__(self, state: State, on_run: Callable[[str], None]) -> None:
        self.state = state
        self._on_run = on_run
        self.policies: list[str] = []

    def pipeline_service_create_pipeline(self, request: ValidRequest) -> Resource:
        fields = dict(request.body)
        return self.state.create_pipeline(fields.pop("name", "") or fields.get("display_name", ""), **fields)

    def pipeline_service_get_pipeline(self, request: ValidRequest) -> Resource:
        return _found(self.state.pipelines, request.path["pipeline_id"], "Pipeline")

    def pipeline_service_get_pipeline_by_name(self, request: ValidRequest) -> Resource:
        name, namespace = request.path["name"], request.query.get("namespace", "")
        if namespace:
            self.state.check_namespace(namespace, "A pipeline")
        for pipeline in self.state.pipelines.values():
            if pipeline["name"].casefold() == name.casefold() and pipeline.get("namespace", "") == namespace:
                return pipeline
        raise missing("Namespace/Pipeline", f"{namespace}/{name}")

    def pipeline_service_list_pipeline_versions(self, request: ValidRequest) -> Resource:
        pipeline_id = request.path["pipeline_id"]
        _found(self.state.pipelines, pipeline_id, "Pipeline")
        versions = [v for v in self.state.versions.values() if v["pipeline_id"] == pipeline_id]
        return _listed("pipeline_versions", *page(versions, request.query, FIELDS["version"], "pipeline_version_id"))

    def pipeline_service_get_pipeline_version(self, request: ValidRequest) -> Resource:
        return _found(self.state.versions, request.path["pipeline_version_id"], "PipelineVersion")

    def upload_pipeline_version(self, request: ValidRequest) -> Resource:
        fields = dict(request.query)
        pipeline_id = fields.pop("pipelineid", "")
        name = fields.pop("name", "") or fields.get("display_name", "")
        return self.state.create_version(pipeline_id, name, request.file, **fields)

    def experiment_service_create_experiment(self, request: ValidRequest) -> Resource:
        return self.state.create_experiment(request.body)

    def experiment_service_list_experiments(self, request: ValidRequest) -> Resource:
        namespace = request.query.get("namespace", "")
        self.state.check_namespace(namespace, "An experiment")
        experiments = [e for e in self.state.experiments.values() if e.get("namespace", "") == namespace]
        return _listed("experiments", *page(experiments, request.query, FIELDS["experiment"], "experiment_id"))

    def run_service_create_run(self, request: ValidRequest) -> Resource:
        run = self.state.create_run(request.body)
        self._on_run(run["run_id"])
        return run

    def run_service_get_run(self, request: ValidRequest) -> Resource:
        return self._run(request)

    def run_service_list_runs(self, request: ValidRequest) -> Resource:
        experiment_id = request.query.get("experiment_id", "")
        if not experiment_id:
            self.state.check_namespace(request.query.get("namespace", ""), "A run")
        runs = []
        for run in self.state.runs.values():
            namespace = self._namespace_of(run)
            right = run["experiment_id"] == experiment_id if experiment_id else True
            if right and (not self.state.namespaces or namespace == request.query.get("namespace", namespace)):
                runs.append(run)
        return _listed("runs", *page(runs, request.query, FIELDS["run"], "run_id"))

    def run_service_terminate_run(self, request: ValidRequest) -> Resource:
        run = self._run(request)
        if run["state"] in (*FINAL, "CANCELING"):
            raise invalid(f"Failed to terminate a run {run['run_id']}. Row not found")
        run["state"] = "CANCELING"
        run["state_history"].append({"update_time": self.state.stamp(), "state": "CANCELING"})
        return {}

    def recurring_run_service_create_recurring_run(self, request: ValidRequest) -> Resource:
        return self.state.create_recurring_run(request.body)

    def recurring_run_service_list_recurring_runs(self, request: ValidRequest) -> Resource:
        namespace = request.query.get("namespace", "")
        if not request.query.get("experiment_id"):
            self.state.check_namespace(namespace, "Recurring run")
        jobs = self.state.recurring_runs.values()
        recurring_runs = [j for j in jobs if not self.state.namespaces or self._namespace_of(j) == namespace]
        return _listed(
            "recurringRuns", *page(recurring_runs, request.query, FIELDS["recurring_run"], "recurring_run_id")
        )

    def recurring_run_service_enable_recurring_run(self, request: ValidRequest) -> Resource:
        return self._switch(request, "ENABLE")

    def recurring_run_service_disable_recurring_run(self, request: ValidRequest) -> Resource:
        return self._switch(request, "DISABLE")

    def recurring_run_service_delete_recurring_run(self, request: ValidRequest) -> Resource:
        _found(self.state.recurring_runs, request.path["recurring_run_id"], "Job")
        self.policies.append(request.query.get("propagation_policy", ""))
        del self.state.recurring_runs[request.path["recurring_run_id"]]
        return {}

    def _switch(self, request: ValidRequest, mode: str) -> Resource:
        job = _found(self.state.recurring_runs, request.path["recurring_run_id"], "Job")
        job |= {"mode": mode, "status": f"{mode}D", "updated_at": self.state.stamp()}
        return {}

    def _run(self, request: ValidRequest) -> Resource:
        run = _found(self.state.runs, request.path["run_id"], "Run")
        if self.state.namespaces:
            self.state.check_namespace(self._namespace_of(run), "A run")
        return run

    def _namespace_of(self, resource: Resource) -> str:
        return self.state.experiments.get(resource["experiment_id"], {}).get("namespace", "")


@dataclass
class Gate:
    """Required credentials: a bearer token (an authenticating proxy) or a session cookie (Dex,
    IAP)."""

    token: str = ""
    cookie: str = ""

    def reject(self, request: Request) -> Response | None:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"code": 16, "message": "Request header error: there is no user identity header."}, 401)
        if self.cookie and self.cookie not in request.headers.get("cookie", ""):
            return RedirectResponse("/dex/auth", 302)
        return None


class Application:
    """The application: check credentials, inject faults, validate, execute."""

    def __init__(self, api: Api, gate: Gate) -> None:
        self._api = api
        self._gate = gate
        self._operations = contract.operations()
        self.faults: list[Fault] = []
        self.violations: list[str] = []
        """Contract violations of clients or this server; any that remain fail the test."""
        self.calls: list[str] = []
        """Names of the requested operations, in order."""
        self.app = Starlette(
            routes=[
                Route("/dex/auth", lambda _: HTMLResponse("<html>Log in</html>"), methods=["GET", "POST"]),
                Route("/apis/{rest:path}", self._handle, methods=["GET", "POST", "PATCH", "DELETE"]),
            ]
        )

    async def _handle(self, request: Request) -> Response:
        body = await request.body()
        return await run_in_threadpool(self._serve, request, body)

    def _serve(self, request: Request, body: bytes) -> Response:
        if (rejection := self._gate.reject(request)) is not None:
            return rejection
        matches = [(o, p) for o in self._operations if (p := o.matches(request.method, request.url.path)) is not None]
        if not matches:
            return _error_response(ApiServerError(5, "Not Found"))
        operation, path = matches[0]
        self.calls.append(operation.name)
        fault = self._fault_of(operation.name)
        if fault:
            time.sleep(fault.delay_s)
            if not fault.after:
                return _error_response(ApiServerError(14, "Service unavailable"), fault.status)
        try:
            valid = self._within_contract(operation, path, request, body)
            with self._api.state.lock:
                response = json.loads(json.dumps(getattr(self._api, operation.name)(valid)))
        except ApiServerError as error:
            return _upload_error(error) if operation.files else _error_response(error)
        if fault:
            return _error_response(ApiServerError(14, "Service unavailable"), fault.status)
        faults = contract.faults(operation.answer, response) if operation.answer != "object" else []
        self.violations += [f"response of {operation.name}: {fault}" for fault in faults]
        return JSONResponse(response)

    def _fault_of(self, operation: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.operation in ("", operation):
                fault.times -= 1
                return fault
        return None

    def _within_contract(
        self, operation: contract.Operation, path: dict[str, str], request: Request, body: bytes
    ) -> ValidRequest:
        faults = [f"query parameter {key}" for key in request.query_params if key not in operation.query]
        tree: Any = None
        if operation.body:
            tree = json.loads(body)
            faults += contract.faults(operation.body, tree)
        if not hasattr(self._api, operation.name):
            faults.append("this loopback server does not implement the operation")
        if faults:
            self.violations += [f"request of {operation.name}: {fault}" for fault in faults]
            raise invalid(f"{operation.name}: {faults[0]}")
        file = _uploaded(request.headers["content-type"], body) if operation.files else b""
        return ValidRequest(path, dict(request.query_params), tree, file)


def _uploaded(content_type: str, body: bytes) -> bytes:
    message = email.message_from_bytes(
        b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body, policy=email.policy.HTTP
    )
    for part in message.iter_parts():
        if part.get_param("name", header="content-disposition") == "uploadfile":
            return part.get_payload(decode=True)
    raise invalid("Failed to read pipeline from file")


def _found(resources: Mapping[str, Resource], key: str, kind: str) -> Resource:
    if key not in resources:
        raise missing(kind, key)
    return resources[key]


def _listed(key: str, resources: list[Resource], token: str, total: int) -> Resource:
    """Drop empty fields, like protobuf's JSON."""
    listed: Resource = {key: resources, "next_page_token": token, "total_size": total}
    return {name: value for name, value in listed.items() if value}


def _error_response(error: ApiServerError, status: int = 0) -> Response:
    details = [{"@type": "type.googleapis.com/google.rpc.Status", "code": error.code, "message": error.message}]
    body = {"code": error.code, "message": error.message, "details": details}
    return JSONResponse(body, status or HTTP[error.code])


def _upload_error(error: ApiServerError) -> Response:
    """Uploads bypass gRPC and use a different error format; a denied permission is a 400."""
    status = {3: 400, 6: 409}.get(error.code, 400)
    message = error.message if status == 400 else "Failed to create a pipeline version"
    return JSONResponse({"error_message": message, "error_details": message}, status)
