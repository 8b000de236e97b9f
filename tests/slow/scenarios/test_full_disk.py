"""Every step on disks of growing size reports the same error until it has enough space."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.real.scenarios.workspace import COMMAND_TIMEOUT_S, Workspace, write_digits
from tests.slow.scenarios.on_small_disks import NO_MOUNT

pytestmark = pytest.mark.slow
# `validate`, which writes only a one-page report, fits on the smallest disk.
STEPS = (
    "ingest",
    "train",
    "train, two processes",
    "export",
    "reuse",
    "embed",
    "probe",
    "index",
    "evaluate",
    "gate",
    "archive",
    "deploy",
    "notify",
)


@pytest.fixture(scope="module")
def finished_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A successful run."""
    directory = tmp_path_factory.mktemp("earlier")
    write_digits(directory / "images")
    workspace = Workspace(directory, EVERNEAR_TARGET="registry")
    (directory / "result.json").write_text(json.dumps(workspace.run()))
    return workspace


@pytest.mark.parametrize("step", STEPS)
def test_step_reports_a_full_disk(finished_workspace: Workspace, tmp_path: Path, step: str) -> None:
    script = ["-m", "tests.slow.scenarios.on_small_disks", step]
    paths = [
        str(finished_workspace.directory / "result.json"),
        str(finished_workspace.directory / "images"),
        str(tmp_path),
    ]
    completed = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, *script, *paths],
        cwd=ROOT,
        env=finished_workspace.environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    if completed.returncode == NO_MOUNT or "unshare" in completed.stderr:
        pytest.skip("no disk can be mounted here")
    assert completed.returncode == 0, completed.stderr
    attempts = [json.loads(line) for line in completed.stdout.splitlines()]
    assert attempts[-1]["code"] == 0, attempts[-1]
    assert len(attempts) > 1, "the smallest disk was large enough"
    for attempt in attempts[:-1]:
        last = attempt["said"].splitlines()[-1]
        assert attempt["code"] == 4, attempt
        assert last.startswith("evernear: "), attempt
        assert " full" in last, attempt
        assert "Traceback" not in attempt["said"], attempt
