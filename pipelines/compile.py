"""Compile the pipelines to ``pipelines/golden/``; ``--check`` compares instead of writing.

The golden files name a placeholder image. With ``--image``, the golden files are written for a cluster, as
``evernear pipeline upload`` would upload them.
"""

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from evernear.common.disk import write_atomically
from evernear.common.output import print_line
from evernear.errors import EvernearError, SettingsError
from evernear.kubeflow import GOLDEN, PIPELINES
from evernear.settings import load


def main(arguments: list[str] | None = None) -> int:
    """Compile or check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.compile", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the golden files, write nothing")
    parser.add_argument("--output", type=Path, help="directory of the compiled YAML (default: the golden files')")
    cluster = parser.add_argument_group("for a cluster")
    cluster.add_argument("pipelines", nargs="*", metavar="PIPELINE", help="pipelines to include (default: all)")
    cluster.add_argument("--image", metavar="REF@sha256:...", help="training image by digest")
    cluster.add_argument("--set", action="append", metavar="KEY=VALUE", help="as for `evernear pipeline upload`")
    cluster.add_argument("--config", type=Path, help="settings file (TOML)")
    cluster.add_argument("--kubernetes-native", action="store_true", help="write Pipeline and PipelineVersion objects")
    cluster.add_argument("--version", help="name of the version in the objects (default: the git commit)")
    cluster.add_argument("--namespace", default="", help="namespace of the objects")
    options = parser.parse_args(arguments)
    if options.image:
        return _for_cluster(options)
    options.output = options.output or GOLDEN
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


def _for_cluster(options: argparse.Namespace) -> int:
    """Write the golden files with the image and the defaults in ``options``; returns the exit code."""
    from evernear.kubeflow.publish import as_manifests, compile_pipelines, default_version, words_of_section

    try:
        of_cluster, defaults = words_of_section(options.set or ())
        settings = load(config=options.config, overrides=of_cluster, remembered=False).pipeline
        compiled = compile_pipelines(options.pipelines, options.image, defaults, settings)
        if options.kubernetes_native:
            version = default_version(options.version, settings, defaults)
            compiled = {name: as_manifests(each, version, options.namespace) for name, each in compiled.items()}
        for name, content in compiled.items():
            _write((options.output or Path()) / f"{name}.yaml", content)
    except EvernearError as error:
        print_line(str(error), sys.stderr)
        return error.exit_code
    return 0


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise SettingsError(f"Cannot write {path}: {error.strerror}.") from None
    print_line(str(path))


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
