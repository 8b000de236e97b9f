"""Compile the pipelines to ``pipelines/golden/``; ``--check`` compares instead of writing.

The golden files name a placeholder image; ``--image REF@sha256:... --output DIR`` compiles for a cluster.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def main(arguments: list[str] | None = None) -> int:
    """Compile or check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.compile", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the golden files, write nothing")
    parser.add_argument("--image", help="training image by digest, REF@sha256:...")
    parser.add_argument("--output", type=Path, default=GOLDEN, help="directory of the compiled YAML")
    options = parser.parse_args(arguments)
    if options.image is not None:
        if not re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", options.image):
            print(f"--image {options.image} is not a digest; give REF@sha256:<64 hex digits>.", file=sys.stderr)
            return 2
        os.environ["TRAIN_IMAGE"] = options.image  # components read it when they are imported
    if options.check:
        return _check()
    options.output.mkdir(parents=True, exist_ok=True)
    compile_all(options.output)
    return 0


def compile_all(directory: Path) -> list[Path]:
    """Write ``<pipeline>.yaml`` for every pipeline into ``directory``, byte-stable; returns the paths."""
    from kfp import compiler

    from pipelines.continuous_training import continuous_training

    path = directory / "continuous_training.yaml"
    compiler.Compiler().compile(continuous_training, str(path))
    # kfp's comment header prints defaults in the order of a hash map, another one each time.
    body = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#")]
    path.write_text("".join(body))
    return [path]


def _check() -> int:
    with tempfile.TemporaryDirectory() as directory:
        stale = [p.name for p in compile_all(Path(directory)) if p.read_bytes() != _golden(p.name)]
    if stale:
        print(f"Golden files are stale: {', '.join(stale)}; run `make golden` and commit them.", file=sys.stderr)
    return 1 if stale else 0


def _golden(name: str) -> bytes:
    path = GOLDEN / name
    return path.read_bytes() if path.exists() else b""


if __name__ == "__main__":
    sys.exit(main())
