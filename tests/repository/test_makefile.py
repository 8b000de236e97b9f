"""The Makefile in clones at paths, and with configurations of pip, as people have them.

A stand-in for uv, installed by the real pip, creates environments with the standard library.
"""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

UV = """\
#!/bin/sh -e
case "$1" in
venv)
    for last; do :; done
    "$PYTHON" -m venv --without-pip "$last"
    echo "$@" >> uv.log ;;
pip)
    case "$*" in *--editable*)
        for site in .venv/lib/python3*/site-packages; do printf '%s\\n' "$PWD" "$PWD/src" > "$site/_evernear.pth"; done
        printf '#!/bin/sh\\nprintf "%%s|" "$@"\\n' > .venv/bin/evernear
        chmod +x .venv/bin/evernear ;;
    esac ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "Büro & co; (a) it's $HOME\t`id`" / "evernear"
    for name in ("requirements/main.lock", "requirements/torch.lock", "pyproject.toml", "src/evernear/__init__.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()
    shutil.copy(ROOT / "Makefile", clone)
    return clone


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with a package uv."""
    described = {
        "METADATA": "Metadata-Version: 2.1\nName: uv\nVersion: 1\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "uv-1-py3-none-any.whl", "w") as wheel:
        for name, text in described.items():
            wheel.writestr(f"uv-1.dist-info/{name}", text)
        script = zipfile.ZipInfo("uv-1.data/scripts/uv")
        script.external_attr = 0o100755 << 16
        wheel.writestr(script, UV)
    return tmp_path


def make(clone: Path, *words: str, **variables: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(clone), **variables}
    done = subprocess.run(["make", *words], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo_runs_at_any_path_with_any_configuration_of_pip(clone: Path, index: Path) -> None:
    elsewhere = {"PIP_TARGET": "target", "PIP_PREFIX": "prefix", "PIP_ROOT": "root", "PIP_USER": "1"}
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": index.as_uri(), **elsewhere}
    output = make(clone, "demo", "SOURCE=folder:my $$(photos); it's", "KEEP=1", LC_ALL="C", **pip)
    assert output.splitlines()[-1] == "demo|--source|folder:my $(photos); it's|--workdir|evernear-work-folder|--keep|"
    assert not any((clone / name).exists() for name in elsewhere.values())
    assert (clone / "uv.log").read_text().startswith("venv --quiet --allow-existing --relocatable ")

    moved = clone.rename(clone.with_name("moved"))
    assert make(moved, "demo").splitlines()[-1] == "demo|--source|digits|--workdir|evernear-work|"
    imported = "import evernear; print(evernear.__file__.encode())"
    done = subprocess.run(
        [moved / ".venv" / "bin" / "python", "-c", imported], env={"LC_ALL": "C"}, cwd="/", capture_output=True
    )
    assert done.stdout.decode().strip() == repr(os.fsencode(moved / "src/evernear/__init__.py")), done.stderr
