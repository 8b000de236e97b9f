"""docs/extending.md is correct: its files and changed lines fit the tree, each example touches few
files, and its commands run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import ROOT

FILES_MAX = 4
COPIED = ("src", "components", "pipelines")


class Example(NamedTuple):
    heading: str
    files: dict[str, str]
    """Content of each new file."""
    changes: list[tuple[str, str, str]]
    """Path, lines, and the lines that replace them."""
    commands: str

    def paths(self) -> set[str]:
        return {*self.files, *(path for path, _, _ in self.changes)}

    def apply(self, tree: Path) -> None:
        for path, content in self.files.items():
            assert not (tree / path).exists()
            (tree / path).parent.mkdir(exist_ok=True)
            (tree / path).write_text(content)
        for path, before, after in self.changes:
            text = (tree / path).read_text()
            assert text.count(f"\n{before}") == 1, f"{path} has these lines {text.count(before)} times:\n{before}"
            (tree / path).write_text(text.replace(f"\n{before}", f"\n{after}"))


def examples() -> list[Example]:
    return [example(text) for text in (ROOT / "docs" / "extending.md").read_text().split("\n## ")[1:]]


def example(section: str) -> Example:
    files: dict[str, str] = {}
    changes: list[tuple[str, str, str]] = []
    commands = ""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", section, re.M | re.S):
        path, _, content = block.removeprefix("# ").partition("\n")
        if language == "sh":
            commands += block
        elif language == "diff":
            changes += [(path, *sides(hunk)) for hunk in content.split("...\n")]
        else:
            files[path] = content
    return Example(section.partition("\n")[0], files, changes, commands)


def sides(hunk: str) -> tuple[str, str]:
    lines = hunk.splitlines(keepends=True)
    assert all(line[0] in " +-" for line in lines)
    before, after = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
    return before, after


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.heading)
def test_extension_is_small_and_fits_the_tree(checkout: Path, example: Example) -> None:
    assert 0 < len(example.paths()) <= FILES_MAX
    assert example.commands
    example.apply(checkout)
    for path in example.paths():
        if path.endswith(".py"):
            compile((checkout / path).read_text(), path, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.heading)
def test_extension_commands_run(checkout: Path, example: Example) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{checkout / 'src'}:{checkout}",
    }
    example.apply(checkout)
    completed = subprocess.run(
        ["sh", "-euc", example.commands], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
