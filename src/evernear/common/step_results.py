"""Results of steps, so that no run repeats work whose inputs have not changed.

::

    checkpoints/<key>/<file>
    checkpoints/<key>/result.json    the summary, the output and the sha256 of each file

The key is a hash of everything that determines the result: data, settings, weights and code.
``result.json`` is written last, so an incomplete result is not read. Results may be deleted.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from evernear.common.disk import sha256_file
from evernear.common.frozen import Document
from evernear.common.store import Store
from evernear.errors import IntegrityError, MissingObjectError

CHECKPOINTS = "checkpoints/"
RESULT = "result.json"
REUSED = "an earlier run computed this from the same images, settings and code"


class StepResult(Document):
    summary: str
    output: dict[str, Any] = {}
    """What the step returns or records, as JSON."""
    files: dict[str, str] = {}
    """The sha256 of each file in the step's output directory."""


class Computed(NamedTuple):
    summary: str
    output: dict[str, Any]
    reusable: bool = True
    """Whether only the inputs determined the result, and not, for example, a lack of time."""


def result_key(result: str, code: tuple[str, ...], libraries: tuple[str, ...], **inputs: JsonValue) -> str:
    """A hash of the result's name, ``inputs``, ``code`` and ``libraries`` (`code_digest`)."""
    document = {"result": result, "code": code_digest(code, libraries), "inputs": inputs}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def compute_once(store: Store, key: str, directory: Path | None, compute: Callable[[], Computed]) -> Computed:
    """The stored result of ``key``, or that of ``compute``, which is then stored. The result's
    files are in ``directory``, unless it is None. A damaged one is computed again."""
    with suppress(IntegrityError, MissingObjectError):
        stored = _restore(store, key, directory)
        return Computed(f"{stored.summary}; {REUSED}", stored.output)
    computed = compute()
    if computed.reusable:
        paths = sorted(path for path in directory.iterdir() if path.is_file()) if directory else []
        for path in paths:
            store.put(f"{CHECKPOINTS}{key}/{path.name}", path)
        files = {path.name: sha256_file(path) for path in paths}
        result = StepResult(summary=computed.summary, output=computed.output, files=files)
        store.put(f"{CHECKPOINTS}{key}/{RESULT}", result.to_json())
    return computed


def _restore(store: Store, key: str, directory: Path | None) -> StepResult:
    result = StepResult.from_json(store.get(f"{CHECKPOINTS}{key}/{RESULT}"), key)
    if directory:
        for name, sha256 in result.files.items():
            store.fetch(f"{CHECKPOINTS}{key}/{name}", directory / name, sha256)
    return result


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
