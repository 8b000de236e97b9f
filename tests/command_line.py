"""Run the ``evernear`` command in the test process, which has already imported the command's
modules."""

import io
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from evernear.cli.app import main


def evernear(
    *arguments: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command with ``environment`` added to the process's."""
    command = ["evernear", *map(str, arguments)]
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", command)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return subprocess.CompletedProcess(command, code or 0, output.getvalue(), errors.getvalue())
