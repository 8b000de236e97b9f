"""Failures: killed runs that resume, and a crashed server."""

import json
import shutil
from pathlib import Path

import psutil
import pytest

from evernear.serving.configuration import MAIN_CLASS
from tests.real.scenarios.workspace import COMMAND_TIMEOUT_S, Workspace, step_processes, write_digits

STEPS = (
    "ingest",
    "validate",
    "train",
    "probe",
    "export",
    "embed",
    "index",
    "evaluate",
    "gate",
    "archive",
    "deploy",
    "notify",
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=["forks", "fresh"])
def workspace(tmp_path: Path, request: pytest.FixtureRequest) -> Workspace:
    """With both ways to start a step."""
    write_digits(tmp_path / "images")
    workspace = Workspace(tmp_path, EVERNEAR_TARGET="registry")
    if request.param == "fresh":
        workspace.start_steps_afresh()
    return workspace


def facts(workspace: Workspace, result: dict) -> tuple[str, str]:
    """The dataset's digest and the hash of the weights, which are equal for runs with the same data
    and settings."""
    dataset = json.loads(Path(result["paths"]["train.trained"], "network.json").read_text())
    return dataset["dataset_digest"], dataset["weights_sha256"]


def kill_at(workspace: Workspace, step: str, victim: str) -> bool:
    """Start a run and kill -9 the command, or the step's own process, when ``step`` has started.

    Returns:
        Whether ``victim`` was killed; if its step ended too early,
        the command was killed instead.
    """
    with workspace.start("run", "--preset", "quick") as process:
        workspace.await_step(step, process)
        children = psutil.Process(process.pid).children(recursive=True)
        running = step_processes(process)
        (running[-1] if running and victim == "step" else process).kill()
        process.wait(COMMAND_TIMEOUT_S)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, "a step outlived its run"
    return victim == "command" or bool(running)


@pytest.mark.timeout(3600)  # two dozen runs
@pytest.mark.parametrize(("steps", "victim"), [(STEPS, "command"), (STEPS[:-1], "step")])
def test_rerun_after_a_kill_equals_an_uninterrupted_run(
    workspace: Workspace, tmp_path: Path, steps: tuple[str, ...], victim: str
) -> None:
    hits = [kill_at(workspace, step, victim) for step in steps]
    assert sum(hits) > len(steps) / 2, hits
    after_kills = workspace.run()
    unbroken = Workspace(tmp_path / "unbroken", EVERNEAR_TARGET="registry")
    unbroken.directory.mkdir()
    shutil.copytree(workspace.directory / "images", unbroken.directory / "images")
    result = unbroken.run()
    assert facts(workspace, after_kills) == facts(unbroken, result)
    assert after_kills["promoted"]
    assert result["promoted"]


def test_killed_step_fails_the_run_with_an_error_message(workspace: Workspace) -> None:
    with workspace.start("run", "--preset", "quick") as process:
        workspace.await_step("train", process)
        for running in step_processes(process):
            running.kill()
        output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 1
    assert "Traceback" not in output
    assert "The step was killed by SIGKILL" in output
    assert "run.html" in output


def test_temporary_files_are_removed_even_after_a_kill(workspace: Workspace) -> None:
    temporary = workspace.directory / "tmp"
    temporary.mkdir()
    workspace.environment["TMPDIR"] = str(temporary)
    kill_at(workspace, "ingest", "command")
    assert list(temporary.rglob("step-*"))
    # The next run also ends early: cleanup does not depend on the outcome.
    shutil.rmtree(workspace.directory / "images")
    assert workspace.process("run", "--preset", "quick").returncode != 0
    assert list(temporary.iterdir()) == []


def test_crashed_server_is_reported_and_restarts(workspace: Workspace) -> None:
    workspace.environment["EVERNEAR_TARGET"] = "local"
    image = str(next((workspace.directory / "images/3").iterdir()))
    try:
        first = workspace.run()
        for process in psutil.process_iter(["cmdline"]):
            if MAIN_CLASS in (process.info["cmdline"] or ()) and any(
                str(workspace.workdir) in word for word in process.info["cmdline"]
            ):
                process.kill()
                process.wait(10)
        assert workspace.refused("predict", image)[0] == 4
        assert json.loads(workspace.command("status", "--json").stdout)["server"] == "died"
        second = workspace.run()
        assert second["promoted"]
        assert second["release"] != first["release"]
        assert json.loads(workspace.command("predict", "--json", image).stdout)["version"] == second["release"]
    finally:
        workspace.command("stop")
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(workspace.workdir) in " ".join(p.info["cmdline"] or ())
    ]
