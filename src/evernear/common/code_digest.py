"""A hash of the code that computes a stored result, which is not reused when the code changes."""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = "evernear"
ROOT = Path(__file__).parents[1]
EXCLUDED = frozenset(
    f"{PACKAGE}.{name}"
    for name in (
        "common.code_digest",
        "common.processes",
        "data.ledger",
        "data.manifest",
        "data.sources",
        "data.writer",
        "common.disk",
        "errors",
        "common.frozen",
        "common.output",
        "common.progress",
        "settings",
        "common.store",
    )
)
"""Modules that only move bytes, messages and settings, or create a dataset, which has a digest."""


@cache
def code_digest(module: str, libraries: tuple[str, ...] = ()) -> str:
    """The sha256 of the source of ``module`` and all its evernear imports, except `EXCLUDED`, and
    of the versions of ``libraries``. Comments, docstrings and formatting do not count."""
    sha256 = hashlib.sha256()
    for name, tree in sorted(_closure(module).items()):
        sha256.update(f"{name}\n{ast.unparse(_without_docstrings(tree))}\n".encode())
    for library in libraries:
        sha256.update(f"{library} {_installed(library)}\n".encode())
    return sha256.hexdigest()


def _closure(module: str) -> dict[str, ast.Module]:
    """The syntax trees of ``module`` and its imports, by name."""
    trees: dict[str, ast.Module] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        file = None if name in trees or _is_excluded(name) else _source(name)
        if file is not None:
            trees[name] = ast.parse(file.read_bytes())
            pending += _imports(trees[name])
    return trees


def _is_excluded(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:length]) in EXCLUDED for length in range(1, len(parts) + 1))


def _source(module: str) -> Path | None:
    """The file of a module, or None if the name is not one, as ``evernear.data.shards.Dataset``.
    `importlib.util.find_spec` would import the parent packages, and with them timm, in seconds."""
    path = ROOT.joinpath(*module.split(".")[1:])
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names that ``tree`` imports, even inside functions. Some may not be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from _ours(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from _ours([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])


def _ours(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{PACKAGE}.")]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_text = [isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in node.body]
            node.body = [n for n, text in zip(node.body, is_text, strict=True) if not text] or [ast.Pass()]
    return tree


def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
