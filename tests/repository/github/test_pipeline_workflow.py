"""The scripts of pipeline.yml, run as on GitHub, with a loopback token endpoint and KFP server."""

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from evernear.kubeflow import NAMES
from tests import ROOT
from tests.loopback.kfp import KfpServer

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/pipeline.yml").read_text())
STEPS = {step["name"]: step for step in WORKFLOW["jobs"]["publish"]["steps"] if "name" in step}
TRAIN, SERVE = (
    f"ghcr.io/owner/evernear-{name}@sha256:{digit * 64}" for name, digit in (("train", "a"), ("serve", "b"))
)
REQUEST_TOKEN, IDENTITY, AUDIENCE = "of-this-job", "signed.by.github", "https://kfp.example"


class _Issuer(BaseHTTPRequestHandler):
    """A token endpoint that issues the job's token for the audience that KFP expects."""

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        allowed = self.headers["Authorization"] == f"bearer {REQUEST_TOKEN}" and query["audience"] == [AUDIENCE]
        self.send_response(200 if allowed else 403)
        self.end_headers()
        self.wfile.write(json.dumps({"value": IDENTITY} if allowed else {"message": "no"}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Issuer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/token?api-version=2.0"
    server.shutdown()
    server.server_close()


@pytest.fixture
def guarded_kfp() -> Iterator[KfpServer]:
    """A server that accepts only GitHub's token."""
    with KfpServer(token=IDENTITY) as server:
        yield server


def run_step(name: str, kfp: KfpServer, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step's script with ``variables`` as the values of its expressions."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "output")}
    environment |= dict.fromkeys(STEPS[name]["env"], "") | {"EVERNEAR_PIPELINE__ENDPOINT": kfp.url, "KFP_AUDIENCE": ""}
    environment |= {"EVERNEAR_PIPELINE__NAMESPACE": "", "EVERNEAR_PIPELINE__UI_URL": ""}
    environment |= {"GITHUB_SHA": "5b67dc9f1c0b6c0f", "GITHUB_RUN_ID": "4711", **variables}
    environment |= {"GITHUB_ACTIONS": "true", "GITHUB_ACTOR": "ada", "GITHUB_EVENT_NAME": "push"}
    script = tmp_path / "step.sh"
    script.write_text(STEPS[name]["run"].replace("run.json", str(tmp_path / "run.json")))
    return subprocess.run(
        ["bash", "-e", script],  # GitHub's default shell
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_push_uploads_and_starts_one_run_with_github_token(guarded_kfp: KfpServer, issuer: str, tmp_path: Path) -> None:
    identity = {
        "KFP_AUDIENCE": AUDIENCE,
        "ACTIONS_ID_TOKEN_REQUEST_TOKEN": REQUEST_TOKEN,
        "ACTIONS_ID_TOKEN_REQUEST_URL": issuer,
    }
    images = {"TRAIN_IMAGE": TRAIN, "SERVE_IMAGE": SERVE}
    defaults = "store=s3://ours data.source=s3://images\n  target=local\n"  # may span several lines
    completed = run_step("Upload the pipelines", guarded_kfp, tmp_path, PARAMETERS=defaults, **images, **identity)
    assert completed.returncode == 0, completed.stderr
    assert re.search(r"continuous-training 5b67dc9f1c0b6c0f-[0-9a-f]{8}: uploaded", completed.stdout)
    assert f"::add-mask::{IDENTITY}" in completed.stdout

    start = {"PIPELINE": "continuous-training", "PARAMETERS": "train.epochs=3"}
    completed = run_step("Start a run", guarded_kfp, tmp_path, **start, **identity)
    assert completed.returncode == 0, completed.stderr
    (run,) = guarded_kfp.runs
    # A second start with the same key returns this run.
    assert run.resource["display_name"] == "continuous-training [github-4711]"
    assert run.parameters["settings"] == {"train": {"epochs": 3}}
    assert run.parameters["started_by"] == "GitHub Actions (push of commit 5b67dc9f1c0b by ada, workflow run 4711)"
    assert (tmp_path / "output").read_text().startswith(f"url={guarded_kfp.url}")
    compiled = run.compiled().read_text()
    assert TRAIN in compiled
    inputs = next(yaml.safe_load_all(compiled))["root"]["inputDefinitions"]["parameters"]
    assert inputs["serving_image"]["defaultValue"] == SERVE
    assert [inputs[name]["defaultValue"] for name in ("store", "source", "target")] == [
        "s3://ours",
        "s3://images",
        "local",
    ]


def test_every_pipeline_can_be_started_by_hand() -> None:
    inputs = WORKFLOW[True]["workflow_dispatch"]["inputs"]  # YAML reads the key "on" as true
    assert sorted(inputs["pipeline"]["options"]) == sorted(NAMES)


def test_job_without_a_github_token_fails(guarded_kfp: KfpServer, issuer: str, tmp_path: Path) -> None:
    wrong = {"KFP_AUDIENCE": AUDIENCE, "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "x", "ACTIONS_ID_TOKEN_REQUEST_URL": issuer}
    completed = run_step("Upload the pipelines", guarded_kfp, tmp_path, TRAIN_IMAGE=TRAIN, SERVE_IMAGE=SERVE, **wrong)
    assert completed.returncode == 22, "curl's exit code for an HTTP error"
    assert not guarded_kfp.calls


def test_job_conditions_use_no_environment_variables() -> None:
    """GitHub evaluates the condition of a job before the variables of its environment are
    available."""
    in_environment = [job for job in WORKFLOW["jobs"].values() if "environment" in job]
    assert in_environment
    assert not [job["if"] for job in in_environment if "vars." in job.get("if", "")]


def test_job_fails_if_the_server_rejects_its_token(guarded_kfp: KfpServer, tmp_path: Path) -> None:
    images = {"TRAIN_IMAGE": TRAIN, "SERVE_IMAGE": SERVE}
    completed = run_step("Upload the pipelines", guarded_kfp, tmp_path, KFP_TOKEN="an old one", **images)
    assert completed.returncode == 4
    assert "Traceback" not in completed.stderr
