"""The compiled pipeline: byte-stable, and what the design says of it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "pipelines/golden/continuous_training.yaml"
COMPONENTS = sorted(path for path in (ROOT / "components").glob("*.py") if path.name != "__init__.py")
SPEC, PLATFORM = list(yaml.safe_load_all(GOLDEN.read_text()))
TASKS = SPEC["root"]["dag"]["tasks"]
INNER = {
    name: task for part in SPEC["components"].values() for name, task in part.get("dag", {}).get("tasks", {}).items()
}


def compile_to(directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.compile", "--output", str(directory), *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory.parent, env=environment)


def test_compiling_is_byte_stable_and_the_golden_file_is_fresh(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        directory = tmp_path / seed
        assert compile_to(directory, PYTHONHASHSEED=seed).returncode == 0
        assert (directory / GOLDEN.name).read_bytes() == GOLDEN.read_bytes()


def test_a_cluster_gets_the_image_by_digest_only(tmp_path: Path) -> None:
    image = "registry.example/evernear-train@sha256:" + "ab" * 32
    assert compile_to(tmp_path / "out", "--image", image).returncode == 0
    spec = next(yaml.safe_load_all((tmp_path / "out" / GOLDEN.name).read_text()))
    images = {part["container"]["image"] for part in spec["deploymentSpec"]["executors"].values()}
    assert images == {image}
    refused = compile_to(tmp_path / "tag", "--image", "registry.example/evernear-train:latest")
    assert refused.returncode == 2
    assert "is not a digest" in refused.stderr
    assert not (tmp_path / "tag").exists()


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: path.stem)
def test_a_component_is_one_call_into_evernear(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 25
    calls = [
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "steps"
    ]
    assert calls == [path.stem]


def test_every_component_is_a_task_of_its_own_name() -> None:
    assert {path.stem for path in COMPONENTS} == {name for name in TASKS | INNER if "-" not in name}


def test_every_parameter_is_described_and_has_a_default() -> None:
    for name, parameter in SPEC["root"]["inputDefinitions"]["parameters"].items():
        assert parameter.get("description"), name
        assert "defaultValue" in parameter or parameter.get("isOptional"), name


def test_only_functions_of_their_inputs_are_cached() -> None:
    cached = {name for name, task in (TASKS | INNER).items() if task.get("cachingOptions", {}).get("enableCache")}
    assert cached == {"train", "export", "embed", "index", "probe"}


def test_every_parameter_that_a_task_takes_reaches_the_group_it_stands_in() -> None:
    """kfp compiles a limit by parameter without handing the parameter down; the run then fails before the task."""
    for name, part in {**SPEC["components"], "root": SPEC["root"]}.items():
        given = set(part.get("inputDefinitions", {}).get("parameters", {}))
        for task in part.get("dag", {}).get("tasks", {}).values():
            inputs = task.get("inputs", {}).get("parameters", {}).values()
            taken = {value["componentInputParameter"] for value in inputs if "componentInputParameter" in value}
            assert taken <= given, name


def test_the_exit_step_runs_whatever_happens() -> None:
    assert TASKS["notify"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_the_gate_branches_on_one_bool() -> None:
    gate = SPEC["components"]["comp-gate"]["outputDefinitions"]["parameters"]
    assert {name: parameter["parameterType"] for name, parameter in gate.items()} == {"Output": "BOOLEAN"}
    assert {"archive", "deploy"} == {
        name
        for part in SPEC["components"].values()
        for task in part.get("dag", {}).get("tasks", {}).values()
        if "triggerPolicy" in task and "condition" in task["triggerPolicy"]
        for name in SPEC["components"][task["componentRef"]["name"]]["dag"]["tasks"]
    }


def test_no_secret_is_a_parameter_and_every_step_may_reach_the_store() -> None:
    executors = PLATFORM["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {name.removeprefix("exec-") for name in executors} == {path.stem for path in COMPONENTS}
    for config in executors.values():
        variables = {key["envVar"] for secret in config["secretAsEnv"] for key in secret["keyToEnv"]}
        assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= variables
    assert not [name for name in SPEC["root"]["inputDefinitions"]["parameters"] if "key" in name or "password" in name]
