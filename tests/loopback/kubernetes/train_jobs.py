"""A small version of Kubeflow Trainer and JobSet:
the nodes of a TrainJob run as processes of this machine.

A node gets the command of the TrainJob and the ``PET_`` variables of Trainer's torch plugin. As
JobSet with ``backoffLimit: 0`` and the runtime's failure policy does, a failed node ends the
others, and all start again up to ``maxRestarts`` times, unless its exit code matches the
``podFailurePolicy``.
"""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.loopback.kubernetes import webhooks
from tests.loopback.kubernetes.api import Api, now
from tests.loopback.kubernetes.controller_base import Controller
from tests.loopback.kubernetes.kinds import TRAIN_JOB, TRAINING_RUNTIME
from tests.ports import free_ports

Object = dict[str, Any]
POLL_S = 0.05


@dataclass
class _Nodes:
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    restarts: int = 0

    def kill(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self.processes = []


class TrainJobs(Controller):
    """Runs every TrainJob that has not ended."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self._nodes: dict[str, _Nodes] = {}  # by UID
        self._refused: set[str] = set()  # UIDs

    def step(self) -> bool:
        """Start, watch and end nodes; return whether a status changed."""
        jobs = self.api.store.all(TRAIN_JOB)
        for uid in self._nodes.keys() - {job["metadata"]["uid"] for job in jobs}:
            self._nodes.pop(uid).kill()
        return sum([self._advance(job) for job in jobs if not job.get("status", {}).get("conditions")]) > 0

    def due_in_s(self) -> float | None:
        """Processes may exit at any time."""
        return POLL_S if any(nodes.processes for nodes in self._nodes.values()) else None

    def processes(self, name: str) -> list[subprocess.Popen[bytes]]:
        """The running nodes of the TrainJob ``name``."""
        job = next(job for job in self.api.store.all(TRAIN_JOB) if job["metadata"]["name"] == name)
        nodes = self._nodes.get(job["metadata"]["uid"])
        return list(nodes.processes) if nodes else []

    def stop(self) -> None:
        """End all processes."""
        for nodes in self._nodes.values():
            nodes.kill()

    def _advance(self, job: Object) -> bool:
        reference = job["spec"]["runtimeRef"]
        runtime = self.api.store.get(TRAINING_RUNTIME, job["metadata"]["namespace"], reference["name"])
        if runtime is None:
            return self._refuse(job, f"not found specified TrainingRuntime: {reference['name']}")
        job_set = runtime["spec"]["template"]["spec"]
        if reasons := webhooks.job_set(job["metadata"]["name"], job_set, job["spec"]["trainer"]["numNodes"]):
            return self._refuse(job, webhooks.denial(webhooks.JOB_SET, reasons))
        nodes = self._nodes.setdefault(job["metadata"]["uid"], _Nodes())
        if not nodes.processes:
            nodes.processes = _start(job)
            return self._report(job, {"ready": 1, "active": 1})
        codes = [process.poll() for process in nodes.processes]
        if failed := [code for code in codes if code]:
            nodes.kill()
            policy = job_set["failurePolicy"]
            if set(failed) & _final_exit_codes(job_set) and policy["rules"][0]["action"] == "FailJobSet":
                return self._end(job, "Failed", "FailJobSet", "jobset failed due to a job failure")
            if nodes.restarts >= policy["maxRestarts"]:
                return self._end(job, "Failed", "ReachedMaxRestarts", "jobset failed due to reaching max restarts")
            nodes.restarts += 1
            return self._report(job, {"failed": 1})
        if None in codes:
            return False
        return self._end(job, "Complete", "AllJobsCompleted", "jobset completed successfully")

    def _refuse(self, job: Object, reason: str) -> bool:
        """Record why the JobSet was not created; the status stays empty."""
        uid = job["metadata"]["uid"]
        if uid in self._refused:
            return False
        self._refused.add(uid)
        message = f"TrainJob resources reconciliation failed: {reason}"
        self.warn(TRAIN_JOB, job, "TrainJobResourcesCreationFailed", message)
        return True

    def _report(self, job: Object, counts: dict[str, int]) -> bool:
        """``jobsStatus`` counts Jobs, not pods: one Job has all nodes, and is ready when all of
        them are."""
        zeros = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
        return self.set_status(TRAIN_JOB, job, {"jobsStatus": [{"name": "node"} | zeros | counts]})

    def _end(self, job: Object, kind: str, reason: str, message: str) -> bool:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}
        return self.set_status(TRAIN_JOB, job, job.get("status", {}) | {"conditions": [condition]})


def _start(job: Object) -> list[subprocess.Popen[bytes]]:
    trainer, port = job["spec"]["trainer"], free_ports(1)[0]
    program, *arguments = [*trainer["command"], *trainer["args"]]
    command = [sys.executable if program == "python" else program, *arguments]
    variables = {item["name"]: item["value"] for item in trainer.get("env", ())}
    variables |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    return [
        subprocess.Popen(command, env={**os.environ, **variables, "PET_NODE_RANK": str(rank)})
        for rank in range(trainer["numNodes"])
    ]


def _final_exit_codes(job_set: Object) -> set[int]:
    rules = job_set["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    return {code for rule in rules if rule["action"] == "FailJob" for code in rule["onExitCodes"]["values"]}
