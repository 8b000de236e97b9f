"""Print how dense the code is and how many choices it offers. Fail if a count exceeds its limit.

Lower a limit when its count falls. A commit that raises one says what users gain.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from itertools import chain
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, TypeGuard

import typer
import yaml
from pydantic import BaseModel

from evernear import errors
from evernear.cli.app import app
from evernear.cli.options import local_settings
from evernear.settings import Settings

LIMITS = {
    "settings": 128,
    "commands": 36,
    "options": 164,
    "error classes": 22,
    "exit codes": 6,
    "parameters of continuous-training": 8,
    "parameters of reindex": 7,
    "parameters of predict": 5,
    "parameters of promote": 6,
    "parameters of rollback": 6,
    "mean length of a line of code": 48.2,
    "statements per line of code": 0.8,
    "lines of a function, 95th percentile": 26,
}


def main() -> None:
    counts = dict(chain(_code(), _choices()))
    width = max(map(len, counts))
    for name, count in counts.items():
        print(f"{name:{width}}  {count:>9,.4g}" if isinstance(count, float) else f"{name:{width}}  {count:>9,}")
    if grown := [f"{name} {count} > {LIMITS[name]}" for name, count in counts.items() if count > LIMITS[name]]:
        sys.exit(f"Larger than .ci/size.py allows: {'; '.join(grown)}.")


def _code() -> Iterator[tuple[str, float]]:
    sources = _texts("src/*.py")
    nodes = [node for text in sources for node in ast.walk(ast.parse(text))]
    code = list(chain.from_iterable(map(_code_lines, sources)))
    yield "mean length of a line of code", mean(map(len, code))
    yield "statements per line of code", sum(_is_statement(node) for node in nodes) / len(code)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name.endswith("Error")]
    yield "error classes", sum(_is_exception(node) for node in classes)
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    yield "lines of a function, 95th percentile", round(quantiles(lengths, n=20)[-1])


def _code_lines(text: str) -> list[str]:
    """The lines of ``text`` that are neither blank nor only a comment or a docstring."""
    documented = {
        number
        for node in ast.walk(ast.parse(text))
        if _is_docstring(node)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return [line for number, line in lines if number not in documented and line.strip() and line.strip()[0] != "#"]


def _is_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt) and not _is_docstring(node)


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_exception(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id.endswith(("Error", "Exception")) for base in node.bases)


def _texts(pattern: str) -> list[str]:
    names = subprocess.run(["git", "ls-files", "-z", pattern], capture_output=True, check=True, text=True).stdout
    return [Path(name).read_text() for name in names.split("\0") if name]


def _choices() -> Iterator[tuple[str, float]]:
    yield "settings", _settings(Settings)
    visible = list(_commands(typer.main.get_command(app)))
    yield "commands", len(visible)
    shared = signature(local_settings).parameters  # declared once, accepted by nearly every command
    own = [option for command in visible for option in command.params if option.name not in shared]
    yield "options", len(own) + len(shared)
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EvernearError)
    ]
    yield "exit codes", len({kind.exit_code for kind in kinds})
    for path in sorted(Path("pipelines/golden").glob("*.yaml")):
        pipeline = next(yaml.safe_load_all(path.read_text()))
        yield f"parameters of {path.stem.replace('_', '-')}", len(pipeline["root"]["inputDefinitions"]["parameters"])


def _settings(section: type[BaseModel]) -> int:
    nested = (field.annotation for field in section.model_fields.values())
    return sum(_settings(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else 1 for kind in nested)


def _commands(command: Any) -> Iterator[Any]:
    """The visible commands below ``command``, of the classes in typer's copy of click."""
    if command.hidden:
        return
    if getattr(command, "invoke_without_command", True):  # a command, or a group that does something without one
        yield command
    for child in getattr(command, "commands", {}).values():
        yield from _commands(child)


if __name__ == "__main__":
    main()
