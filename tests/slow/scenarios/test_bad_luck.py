"""Failures: killed runs that resume, and a crashed server."""

import json
import shutil
from pathlib import Path

import psutil
import pytest

from evernear.serving.configuration import MAIN_CLASS
from tests.real.scenarios.workspace import COMMAND_TIMEOUT_S, Workspace, step_processes

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
def each_workspace(digits_workspace: Workspace, request: pytest.FixtureRequest) -> Workspace:
    """With both ways to start a step."""
    if request.param == "fresh":
        digits_workspace.start_steps_afresh()
    return digits_workspace


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
    each_workspace: Workspace, tmp_path: Path, steps: tuple[str, ...], victim: str
) -> None:
    hits = [kill_at(each_workspace, step, victim) for step in steps]
    assert sum(hits) > len(steps) / 2, hits
    after_kills = each_workspace.run()
    unbroken = Workspace(tmp_path / "unbroken", EVERNEAR_TARGET="registry")
    unbroken.directory.mkdir()
    shutil.copytree(each_workspace.directory / "images", unbroken.directory / "images")
    result = unbroken.run()
    assert facts(each_workspace, after_kills) == facts(unbroken, result)
    assert after_kills["promoted"]
    assert result["promoted"]


def test_killed_step_fails_the_run_with_an_error_message(each_workspace: Workspace) -> None:
    with each_workspace.start("run", "--preset", "quick") as process:
        each_workspace.await_step("train", process)
        for running in step_processes(process):
            running.kill()
        output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 1
    assert "Traceback" not in output
    assert "The step was killed by SIGKILL" in output
    assert "run.html" in output


def test_temporary_files_are_removed_even_after_a_kill(each_workspace: Workspace) -> None:
    temporary = each_workspace.directory / "tmp"
    temporary.mkdir()
    each_workspace.environment["TMPDIR"] = str(temporary)
    kill_at(each_workspace, "ingest", "command")
    assert list(temporary.rglob("step-*"))
    # The next run also ends early: cleanup does not depend on the outcome.
    shutil.rmtree(each_workspace.directory / "images")
    assert each_workspace.process("run", "--preset", "quick").returncode != 0
    assert list(temporary.iterdir()) == []


def test_crashed_server_is_reported_and_restarts(each_workspace: Workspace) -> None:
    each_workspace.environment["EVERNEAR_TARGET"] = "local"
    image = str(next((each_workspace.directory / "images/3").iterdir()))
    try:
        first = each_workspace.run()
        for process in psutil.process_iter(["cmdline"]):
            if MAIN_CLASS in (process.info["cmdline"] or ()) and any(
                str(each_workspace.workdir) in word for word in process.info["cmdline"]
            ):
                process.kill()
                process.wait(10)
        assert each_workspace.refused("predict", image)[0] == 4
        assert json.loads(each_workspace.command("status", "--json").stdout)["server"] == "died"
        second = each_workspace.run()
        assert second["promoted"]
        assert second["release"] != first["release"]
        assert json.loads(each_workspace.command("predict", "--json", image).stdout)["version"] == second["release"]
    finally:
        each_workspace.command("stop")
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(each_workspace.workdir) in " ".join(p.info["cmdline"] or ())
    ]
