"""A compiled pipeline as a process of this machine, at paths as people have them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kfp import compiler, dsl

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
