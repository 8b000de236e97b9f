"""A hash of the code that computes a stored result, which is not reused when the code changes."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def code_digest(paths: tuple[str, ...], libraries: tuple[str, ...] = ()) -> str:
    """The sha256 of the Python files in ``paths`` of this package, which are files or folders, and
    of the versions of ``libraries``."""
    sha256 = hashlib.sha256()
    for path in paths:
        files = sorted((ROOT / path).rglob("*.py")) or [ROOT / path]
        for file in files:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            sha256.update(f"{file.relative_to(ROOT).as_posix()} {content}\n".encode())
    for library in libraries:
        sha256.update(f"{library} {_installed(library)}\n".encode())
    return sha256.hexdigest()


def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
