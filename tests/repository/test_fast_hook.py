"""`tests/fast/conftest.py` refuses what makes tests slow or unsteady."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT

SLOW = '''
import asyncio, os, socket, subprocess, time

def test_subprocess(): subprocess.run(["true"])
def test_fork(): os.fork() or os._exit(0)
def test_server(): socket.create_server(("127.0.0.1", 0))
def test_client(): socket.socket().connect(("127.0.0.1", 9))
def test_host(): socket.getaddrinfo("localhost", 80)
def test_sleep(): time.sleep(0)
def test_torch(): import torch
def test_part_of_torch(): from torch.nn import functional

def test_loop():
    """A socket pair is allowed."""
    asyncio.run(asyncio.sleep(0))
'''


def run_pytest(directory: Path, *options: str) -> str:
    """The output of pytest for ``directory`` as tests/fast."""
    shutil.copy(ROOT / "tests" / "fast" / "conftest.py", directory)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", *options, directory]
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def test_slow_actions_and_imports_are_refused(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "test_import.py").write_text("import torchvision\n")
    output = run_pytest(tmp_path, "--continue-on-collection-errors")
    refused = set(re.findall(r"Failed: (\S+) may not (.*): move it to tests/real\.$", output, re.M))
    assert sorted(refused) == [
        ("test_import.py", "import torchvision"),
        ("test_slow.py::test_client", "connect a socket"),
        ("test_slow.py::test_fork", "start a process"),
        ("test_slow.py::test_host", "look up a host"),
        ("test_slow.py::test_part_of_torch", "import torch"),
        ("test_slow.py::test_server", "listen on a socket"),
        ("test_slow.py::test_sleep", "sleep"),
        ("test_slow.py::test_subprocess", "start a process"),
        ("test_slow.py::test_torch", "import torch"),
    ], output
    assert "1 passed" in output


def test_torch_of_a_plugin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("import sys\nsys.modules['torch'] = sys\n")
    (tmp_path / "test_fast.py").write_text("def test_nothing(): pass\n")
    assert "torch is loaded, although all tests are in tests/fast." in run_pytest(tmp_path, "-p", "plugin")
