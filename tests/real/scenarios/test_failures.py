"""Runs that cannot succeed: one error message, an exit code, and no partial results."""

import subprocess

import pytest

from tests.real.scenarios.workspace import COMMAND_TIMEOUT_S, EVERNEAR, Workspace, write_digits


def test_missing_relative_folder_is_named_with_the_current_directory(workspace: Workspace) -> None:
    code, message = workspace.refused("run", "--preset", "quick", "--source", "folder:images")
    assert code == 3
    assert str(workspace.directory / "images") in message
    assert not list(workspace.workdir.glob("store/releases/**/*.mar"))


def test_disk_full(workspace: Workspace) -> None:
    """The steps on small disks are in tests/slow/scenarios/test_full_disk.py."""
    write_digits(workspace.directory / "images")
    workspace.workdir.mkdir()
    mounted = f"mount -t tmpfs -o size=4k none {workspace.workdir} || exit 77; "
    command = f"{EVERNEAR} run --preset quick; code=$?; ls {workspace.workdir}/store/releases/champion.json; exit $code"
    completed = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted + command],
        env=workspace.environment,
        cwd=workspace.directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
    )
    if completed.returncode == 77 or "unshare" in completed.stderr:
        pytest.skip("no disk can be mounted here")
    assert completed.returncode == 4, completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr
    assert " full" in completed.stderr.splitlines()[-2], completed.stderr
    assert "champion.json" not in completed.stdout
