"""A compiled pipeline as a process of this machine, at paths as people have them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kfp import compiler, dsl

import evernear.embedding  # noqa: F401 - sets the variables of torch
from tests import ROOT

AWKWARD = 'my drive (Büro) & co; it\'s $HOME `id` "a" * \\ #%\t'


@dsl.component(base_image="python", install_kfp_package=False)
def echo(text: str, written: dsl.Output[dsl.Artifact]):
    import os
    import sys

    with open(written.path, "w", encoding="utf-8") as file:  # noqa: PTH123 - as the component's whole code
        file.write("\n".join([text, sys.executable, os.environ["TMPDIR"], os.environ["_KFP_RUNTIME"]]))


@dsl.pipeline(name="echo")
def echo_twice(text: str):
    echo(text=text).set_env_variable("CLUSTER", "1")


def environment_at(directory: Path) -> Path:
    """The Python of a virtual environment in ``directory`` with the packages of this one."""
    installed = Path(sys.executable).parents[1]
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    for name in ("pyvenv.cfg", "lib"):
        (directory / name).symlink_to(installed / name)
    return directory / "bin" / "python"


def test_no_shell_reads_the_paths_and_values_of_a_step(tmp_path: Path) -> None:
    root = tmp_path / AWKWARD
    python, temporary = environment_at(root / ".venv"), root / "tmp"
    temporary.mkdir()
    compiler.Compiler().compile(echo_twice, str(tmp_path / "echo.yaml"))
    text = f"{root}/python3: python3 -m pip install $(id)"
    order = {"pipeline": str(tmp_path / "echo.yaml"), "pipeline_root": str(root), "arguments": {"text": text}}
    # The environment of a checkout finds it beside itself, and so not through these links.
    checkout = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    with subprocess.Popen(
        [python, "-m", "evernear.kubeflow.local_pipeline"],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": checkout},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        output = process.stdout.read()  # the process ends when its input closes
        assert process.wait() == 0, output
    (written,) = root.glob("*/echo/written")
    assert written.read_text() == "\n".join([text, str(python), str(temporary), "true"])
    assert not list(temporary.iterdir())


FACTS = """
import atexit, json, multiprocessing, os, sys
from evernear.kubeflow.local_pipeline import server_threads

def facts():
    print("FACTS" + json.dumps({
        "process": os.getpid(),
        "words": sys.argv[1:],
        "torch": "torch" in sys.modules,
        "server": os.environ.get("OF_SERVER"),
        "step": os.environ.get("OF_STEP"),
        "of_import": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "forked": multiprocessing.parent_process() is not None,
        "daemon": multiprocessing.current_process().daemon,
        "threads": server_threads(),
        "group": os.getpgid(0),
    }))
    atexit.register(print, "EXIT")
"""
RUN_TWO_STEPS = f"""
import json, os, sys
from evernear.kubeflow import local_pipeline

os.environ["OF_SERVER"] = "1"  # the server inherits it, and the steps do not
words = ["--executor_input", json.dumps({{"inputs": {{}}, "outputs": {{"outputFile": "./out.json"}}}})]
for number in "12":
    with local_pipeline.start_step({FACTS!r}, [*words, "--function_to_execute", "facts"],
                                   {{**os.environ, "OF_STEP": number}} | {{"OF_SERVER": ""}}) as (process, output):
        while part := os.read(output.fileno(), 8192):
            sys.stdout.buffer.write(part)
    assert process.exitcode == 0, process.exitcode
print("GROUP", os.getpgid(0))
"""


def two_steps(directory: Path, **site: str) -> list[dict[str, Any]]:
    """What two steps in a row report, with the modules ``site`` on the path of Python."""
    for name, source in site.items():
        directory.joinpath(f"{name}.py").write_text(source)
    output = subprocess.run(
        [sys.executable, "-c", RUN_TWO_STEPS],
        env={name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
        | {"PYTHONPATH": str(directory)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.returncode == 0, output.stdout + output.stderr
    assert output.stdout.count("EXIT") == 2, "what a library registers to run at the end runs"
    facts = [json.loads(line.removeprefix("FACTS")) for line in output.stdout.splitlines() if line.startswith("FACTS")]
    for number, step in enumerate(facts, 1):
        assert (step["server"], step["step"], step["daemon"]) == ("", str(number), False)
        assert step["words"][0] == "--component_module_path"
        assert f"GROUP {step['group']}" in output.stdout, "a kill of the run's group reaches the step"
    assert facts[0]["process"] != facts[1]["process"]
    return facts


linux = pytest.mark.skipif(sys.platform != "linux", reason="steps are forks only on Linux")


@linux
def test_steps_are_forks_of_a_server_with_one_thread(tmp_path: Path) -> None:
    """Before the first fork and after it."""
    for step in two_steps(tmp_path):
        assert step["torch"]
        assert step["of_import"] == os.environ["ONEDNN_MAX_CPU_ISA"], "the import in the server has set it"
        assert step["forked"]
        assert step["threads"] == 1


@pytest.mark.slow
def test_steps_of_a_server_with_other_threads_start_afresh(tmp_path: Path) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    for step in two_steps(tmp_path, sitecustomize=thread):
        assert not step["forked"]
        assert not step["torch"]


@pytest.mark.slow
def test_steps_start_afresh_without_a_server(tmp_path: Path) -> None:
    """A user's module that hides a library may end it."""
    for step in two_steps(tmp_path, torch="raise SystemExit('this is my own torch.py')"):
        assert not step["torch"]
        assert step["threads"] == 1
