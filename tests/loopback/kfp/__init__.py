"""A Kubeflow Pipelines API server on loopback, for the published client.

It stores pipelines, versions, experiments, runs and recurring runs, validates every
request and response against the published v2beta1 API (`contract`), and rejects what
the real server rejects. A test controls the state of each run::

    with KfpServer() as server:
        server.publish(GOLDEN / "continuous_training.yaml", version="abc123")
        runs = KfpRuns(PipelineSettings(endpoint=server.url))
        started = runs.start("continuous-training", {"store": "s3://evernear"}, key="proposal-1")

        run = server.run(started.id)         # or server.wait_for_run() if another thread starts it
        run.begin()
        run.task("ingest", "RUNNING")
        run.task("ingest", "SUCCEEDED")
        run.task("train", "FAILED", error="Training cannot go on: the loss is not finite.")
        run.end("FAILED")                    # SUCCEEDED, FAILED, CANCELED

Alternatively, the server calls an executor with the `RunControl` of each started run,
in a separate thread. `execute.LocalExecutor` runs the uploaded pipeline on this
machine, each step in its own process::

    with KfpServer(executor=LocalExecutor(tmp_path, store=store_uri, target="local", workdir=str(workdir))) as server:
        ...
        server.run(started.id).ended.wait(120)

``server.fail(operation="run_service_create_run", status=503, times=2)`` makes requests
fail, with ``after=True`` after they were executed. ``KfpServer(token=...)`` and
``cookie=...`` require credentials, ``namespaces={...}`` enables multi-user mode, and
``now`` is the server's clock. On exit, the context fails the test on any contract
violation.
"""  # noqa: W505

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn

from tests.loopback.kfp.api import Api, Application, Fault, Gate
from tests.loopback.kfp.execute import LocalExecutor
from tests.loopback.kfp.state import RunControl, State, read_spec

__all__ = ["KfpServer", "LocalExecutor", "RunControl"]


class KfpServer:
    """The server, which runs while its context is active."""

    def __init__(
        self,
        *,
        token: str = "",
        cookie: str = "",
        namespaces: Iterable[str] = (),
        executor: Callable[[RunControl], None] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self.state = State(now, frozenset(namespaces))
        self._api = Api(self.state, self._run_created)
        self._application = Application(self._api, Gate(token, cookie))
        self.executor = executor
        self._tls = (certificate, key)
        self._directory = tempfile.TemporaryDirectory(prefix="kfp-")
        self._controls: dict[str, RunControl] = {}
        self._created = threading.Condition(self.state.lock)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        """Listen on a free port of 127.0.0.1."""
        certificate, key = self._tls
        config = uvicorn.Config(
            self._application.app, log_level="warning", access_log=False, ssl_certfile=certificate, ssl_keyfile=key
        )
        self._server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Terminate active runs, stop, and assert that no call violated the contract."""
        for control in self._controls.values():
            if not control.ended.is_set() and control.id in self.state.runs:
                control.resource["state"] = "CANCELING"
        for thread in self._threads:
            thread.join(30)
        self._server.should_exit = True
        self._thread.join(10)
        self._directory.cleanup()
        assert error is not None or not self.violations, self.violations

    @property
    def violations(self) -> list[str]:
        """Contract violations of requests and responses. Clear it in tests that provoke them."""
        return self._application.violations

    @property
    def calls(self) -> list[str]:
        """The requested operations in order, named as in the Swagger file."""
        return self._application.calls

    @property
    def policies(self) -> list[str]:
        """The propagation policy of each deleted recurring run; ORPHAN keeps its active runs."""
        return self._api.policies

    @property
    def runs(self) -> list[RunControl]:
        """Every run, oldest first."""
        with self.state.lock:
            return [self._controls[run_id] for run_id in self.state.runs]

    def run(self, run_id: str) -> RunControl:
        """Return the control of a run."""
        return self._controls[run_id]

    def wait_for_run(self, number: int = 1, timeout_s: float = 10.0) -> RunControl:
        """Wait for the ``number``-th started run and return it."""
        with self._created:
            assert self._created.wait_for(lambda: len(self._controls) >= number, timeout_s), "no run was started"
            return list(self._controls.values())[number - 1]

    def publish(self, compiled: Path, version: str, namespace: str = "") -> dict[str, Any]:
        """Store a compiled pipeline as the next version, bypassing the API."""
        content = compiled.read_bytes()
        spec = read_spec(content)
        name = spec.get("pipeline_spec", spec)["pipelineInfo"]["name"]
        with self.state.lock:
            matches = [p for p in self.state.pipelines.values() if p["name"] == name]
            pipeline = matches[0] if matches else self.state.create_pipeline(name, namespace=namespace)
            return self.state.create_version(pipeline["pipeline_id"], version, content)

    def fire(self, recurring_run_id: str) -> RunControl:
        """Start the scheduled run, like the controller when it is due."""
        with self.state.lock:
            job = self.state.recurring_runs[recurring_run_id]
            keys = ("experiment_id", "pipeline_version_reference", "runtime_config", "recurring_run_id")
            name = f"{job['display_name']}-{len(self.state.runs) + 1}"
            run = self.state.create_run({"display_name": name, **{key: job[key] for key in keys if key in job}})
            self._run_created(run["run_id"])
            return self._controls[run["run_id"]]

    def fail(
        self, *, operation: str = "", status: int = 503, times: int = 1, after: bool = False, delay_s: float = 0.0
    ) -> None:
        """Fail the next ``times`` requests of ``operation`` (any if empty) with ``status``."""
        self._application.faults.append(Fault(operation, status, times, after, delay_s))

    def _run_created(self, run_id: str) -> None:
        with self._created:
            control = RunControl(self.state, run_id, Path(self._directory.name))
            self._controls[run_id] = control
            self._created.notify_all()
        if self.executor is not None:
            thread = threading.Thread(target=self.executor, args=(control,), daemon=True)
            self._threads.append(thread)
            thread.start()
