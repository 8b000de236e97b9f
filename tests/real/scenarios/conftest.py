"""Working directories of runs that end with a release in the registry."""

from pathlib import Path

import pytest

from tests.real.scenarios.workspace import Workspace, write_digits


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path, EVERNEAR_TARGET="registry")


@pytest.fixture
def digits_workspace(workspace: Workspace) -> Workspace:
    write_digits(workspace.directory / "images")
    return workspace
