"""docs/extending.md is correct: each diff applies to the tree, touches few files,
and its commands run.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FILES_MAX = 4
COPIED = ("src", "components", "pipelines")


class Example(NamedTuple):
    heading: str
    diff: str
    commands: str

    @property
    def files(self) -> set[str]:
        return set(re.findall(r"^\+\+\+ b/(.+)$", self.diff, re.M))


def examples() -> list[Example]:
    sections = (ROOT / "docs" / "extending.md").read_text().split("\n## ")[1:]

    def blocks(section: str, language: str) -> str:
        return "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S))

    return [Example(s.partition("\n")[0], blocks(s, "diff"), blocks(s, "sh")) for s in sections]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "tree"


def apply(diff: str, tree: Path) -> None:
    subprocess.run(["git", "apply", "--whitespace=error", "-"], cwd=tree, input=diff, text=True, check=True)


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.heading)
def test_extension_diff_is_small_and_applies(tree: Path, example: Example) -> None:
    assert len(example.files) <= FILES_MAX
    apply(example.diff, tree)
    for file in example.files:
        if file.endswith(".py"):
            compile((tree / file).read_text(), file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.heading)
def test_extension_commands_run(tree: Path, tmp_path: Path, example: Example) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tree / 'src'}:{tree}",
    }
    apply(example.diff, tree)
    completed = subprocess.run(
        ["sh", "-euc", example.commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
