"""Print how dense the code is, how many choices it offers and what a reader must learn. Fail if a
count exceeds its limit, or if a list differs from the tree.

Lower a limit when its count falls. A commit that raises one, or adds to a list, says what users
gain.
"""

import ast
import re
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
from evernear.maintenance.kinds import KINDS
from evernear.settings import Settings

LIMITS = {
    "settings": 129,
    "commands": 37,
    "options": 166,
    "error classes": 23,
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
LEARNED = {
    "servers": """console/server.py serving/http/app.py serving/torchserve.py triggers/slack/server.py
        triggers/watch/watcher.py""",
    "lock files": """requirements/build.lock requirements/main.lock requirements/torch-backend.lock
        requirements/torch.lock tests/integrations/kserve/requirements-clients.lock
        tests/integrations/mlflow/requirements-mlflow.lock tests/repository/deploy/kustomize/package-lock.json""",
    "environments": "actionlint axe clients core kustomize main mlflow",
    "formats of documents": """Answer AuditEvent BakeState Breach DatasetHead Evaluation Examples IndexDescription
        LabeledQuery Manifest NearDuplicatePairs NodeLog NodeTask PartsRecord Period Plan Pointer Promotion Record
        ReleaseManifest Renames ReplayExamples Report Request RunOutcome ScheduleState StepRecord StepResult StopRecord
        StoreIdentity Submission Suspects Verdict _Holder""",
    "kinds of records in a store": """_evernear.txt checkpoints datasets doctor.json embeddings live-labels maintenance
        parts queries releases review runs store.json triggers weights""",
}
"""What a reader must learn, as the tree has it."""
_SERVER = re.compile(r"^def (create|start)_server\(|\bstart_http_server\(", re.MULTILINE)


def main() -> None:
    counts = dict(chain(_code(), _choices(), _learned()))
    width = max(map(len, counts))
    for name, count in counts.items():
        print(f"{name:{width}}  {count:>9,.4g}" if isinstance(count, float) else f"{name:{width}}  {count:>9,}")
    if grown := [
        f"{name} {count} > {LIMITS[name]}" for name, count in counts.items() if count > LIMITS.get(name, count)
    ]:
        sys.exit(f"Larger than .ci/size.py allows: {'; '.join(grown)}.")


def _code() -> Iterator[tuple[str, float]]:
    sources = _texts("src/*.py", ":!*_pb2.py")  # which are generated
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


def _texts(*patterns: str) -> list[str]:
    return [Path(name).read_text() for name in _files(*patterns)]


def _files(*patterns: str) -> list[str]:
    names = subprocess.run(["git", "ls-files", "-z", *patterns], capture_output=True, check=True, text=True).stdout
    return [name for name in names.split("\0") if name]


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


def _learned() -> Iterator[tuple[str, float]]:
    root = "src/evernear/"
    sources = {name.removeprefix(root): Path(name).read_text() for name in _files(f"{root}*.py")}
    environments = re.findall(r"^\.venv/(?:(\w+)/)?\.installed:", Path("Makefile").read_text(), re.MULTILINE)
    documents = re.findall(r"^class (\w+)\((?:Document|Promotion)\b", "\n".join(sources.values()), re.MULTILINE)
    found = {
        "servers": {name for name, text in sources.items() if _SERVER.search(text)},
        "lock files": set(_files("*.lock", "*-lock.json")),
        "environments": {name or "main" for name in environments},
        "formats of documents": set(documents),
        "kinds of records in a store": {pattern.partition("/")[0] for pattern in KINDS},
    }
    for name, words in LEARNED.items():
        if changed := sorted(found[name].symmetric_difference(words.split())):
            sys.exit(f"The {name} in .ci/size.py differ from the tree: {', '.join(changed)}.")
        yield name, len(found[name])


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
