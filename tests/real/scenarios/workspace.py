"""Runs the ``evernear`` command in a separate working directory with separate ports."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from evernear.common.progress import EVENTS_VARIABLE
from tests.command_line import evernear
from tests.digits import load_digits
from tests.ports import free_ports

EVERNEAR = str(Path(sys.executable).parent / "evernear")
COMMAND_TIMEOUT_S = 1200.0
"""On a busy processor, a run of digits takes minutes."""
PORTS = ("inference_port", "management_port", "metrics_port", "grpc_inference_port", "grpc_management_port")

NO_FORKSERVER = """
from multiprocessing import context
context._concrete_contexts["forkserver"] = context._concrete_contexts["spawn"]
"""


class Workspace:
    """A working directory with its settings and ports."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.directory = directory
        self.workdir = directory / "work"
        self.environment = {
            **os.environ,
            # The runs are short and the test splits small; other tests cover the gate.
            "EVERNEAR_GATE__ACCURACY_FLOOR": "0.8",
            "EVERNEAR_GATE__BEAT_BASELINE": "false",
            "EVERNEAR_TRAIN__EPOCHS": "6",
            "EVERNEAR_TRAIN__BATCH_SIZE": "64",
            "EVERNEAR_WORKDIR": str(self.workdir),
            "EVERNEAR_DATA__SOURCE": f"folder:{directory / 'images'}",
            **{
                f"EVERNEAR_SERVING__{name.upper()}": str(port)
                for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)
            },
            **variables,
        }

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``evernear WORDS`` in the tests' own process, which has already imported torch."""
        return evernear(*words, environment=self.environment, cwd=self.directory)

    def process(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run the installed ``evernear WORDS`` to its end."""
        return subprocess.run(
            [EVERNEAR, *words],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the installed ``evernear WORDS`` and do not wait."""
        return subprocess.Popen(
            [EVERNEAR, *words],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, command: str = "run") -> dict[str, Any]:
        """Run ``evernear run --json`` or a similar ``command``, which must succeed; return its
        result."""
        completed = self.process(command, "--preset", "quick", "--json", *words)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return json.loads(completed.stdout.splitlines()[-1])

    def refused(self, *words: str) -> tuple[int, str]:
        """Run a command that must fail with one error message; return exit code and message."""
        completed = self.command(*words)
        assert completed.returncode != 0, completed.stdout
        assert "Traceback" not in completed.stdout + completed.stderr
        errors = [line for line in completed.stderr.splitlines() if line.startswith("evernear: ")]
        assert len(errors) == 1, completed.stderr
        return completed.returncode, errors[0]

    def start_steps_afresh(self) -> None:
        """Run each step in a new Python, as where processes cannot be forked safely."""
        site = self.directory / "site"
        site.mkdir()
        site.joinpath("sitecustomize.py").write_text(NO_FORKSERVER)
        path = filter(None, [str(site), self.environment.get("PYTHONPATH")])
        self.environment["PYTHONPATH"] = os.pathsep.join(path)

    def pipeline(self, name: str, **arguments: object) -> dict[str, Any]:
        """Run a compiled pipeline on this machine and return its outcome."""
        root = self.directory / f"{name}-{time.monotonic_ns()}"
        root.mkdir()
        order = json.dumps({"pipeline": name, "pipeline_root": str(root), "arguments": arguments})
        with (
            (root / "log.txt").open("w") as log,
            subprocess.Popen(
                [sys.executable, "-m", "evernear.kubeflow.local_pipeline"],
                cwd=self.directory,
                env={**self.environment, EVENTS_VARIABLE: str(root / "events.jsonl")},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            ) as process,
        ):
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
            process.wait(COMMAND_TIMEOUT_S)  # stdin stays open, because the process ends when it closes
        return json.loads(next(root.glob("*/notify/outcome")).read_text())

    def await_step(self, step: str, process: subprocess.Popen[str], timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Wait until the newest run has started ``step``."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if f'"step":"{step}","kind":"started"' in self.events():
                return
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            time.sleep(0.02)
        raise AssertionError(f"{step} did not start in {timeout_s} s")

    def events(self) -> str:
        """The newest run's event file."""
        files = sorted(self.workdir.glob("runs/*/events.jsonl"))
        return files[-1].read_text() if files else ""


def step_processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the running steps of ``evernear run``."""
    with suppress(psutil.NoSuchProcess):
        for pipeline in psutil.Process(process.pid).children():
            children = {child: " ".join(child.cmdline()) for child in pipeline.children()}
            forks = [fork for child, words in children.items() if "forkserver" in words for fork in child.children()]
            return forks or [child for child, words in children.items() if "--multiprocessing-fork" in words]
    return []


def write_negatives(directory: Path, label: str, numbers: range) -> None:
    """Images of an additional class: scikit-learn's zeros, inverted to black on white."""
    images, targets = load_digits()
    directory.joinpath(label).mkdir(parents=True, exist_ok=True)
    for number in np.flatnonzero(targets == 0)[numbers]:
        pixels = 255 - (images[number] * 255 / 16).astype(np.uint8)
        Image.fromarray(pixels).save(directory / label / f"{number}.png")


def write_digits(directory: Path, labels: str = "0123", per_class: int = 120, shuffle_labels: bool = False) -> None:
    """scikit-learn's digits as PNG files, one folder per class; ``shuffle_labels`` assigns random
    classes."""
    images, targets = load_digits()
    rng = np.random.default_rng(0)
    for label in labels:
        for number in np.flatnonzero(targets == int(label))[:per_class]:
            folder = directory / (rng.choice(list(labels)) if shuffle_labels else label)
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (images[number] * 255 / 16).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
