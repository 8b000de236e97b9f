"""Compile the pipelines to ``pipelines/golden/``; ``--check`` compares instead of writing.

The golden files name a placeholder image; `evernear.kubeflow.compiled` replaces it with a real one.
"""

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from evernear.common.disk import write_atomically
from evernear.common.output import print_line
from evernear.kubeflow import GOLDEN, PIPELINES


def main(arguments: list[str] | None = None) -> int:
    """Compile or check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.compile", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the golden files, write nothing")
    parser.add_argument("--output", type=Path, default=GOLDEN, help="directory of the compiled YAML")
    options = parser.parse_args(arguments)
    if options.check:
        return _check()
    options.output.mkdir(parents=True, exist_ok=True)
    compile_all(options.output)
    return 0


def compile_all(directory: Path) -> list[Path]:
    """Write ``<pipeline>.yaml`` for every pipeline, the same bytes each time; returns the paths."""
    from kfp import compiler

    paths = [directory / f"{name}.yaml" for name in PIPELINES]
    with tempfile.TemporaryDirectory() as scratch:
        for name, path in zip(PIPELINES, paths, strict=True):
            compiled = Path(scratch) / path.name
            compiler.Compiler().compile(getattr(import_module(f"pipelines.{name}"), name), str(compiled))
            # kfp's comment header lists defaults in the order of a hash map, which differs each time.
            lines = compiled.read_text().splitlines(keepends=True)
            write_atomically(path, "".join(line for line in lines if not line.startswith("#")))
    return paths


def _check() -> int:
    with tempfile.TemporaryDirectory() as directory:
        stale = [p.name for p in compile_all(Path(directory)) if p.read_bytes() != _golden(p.name)]
    if stale:
        print_line(f"Golden files are stale: {', '.join(stale)}; run `make golden` and commit them.", sys.stderr)
    return 1 if stale else 0


def _golden(name: str) -> bytes:
    path = GOLDEN / name
    return path.read_bytes() if path.exists() else b""


if __name__ == "__main__":
    sys.exit(main())
