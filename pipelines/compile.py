"""Compile the pipelines to ``pipelines/golden/``; ``--check`` compares instead of writing.

The golden files name a placeholder image. A cluster gets them with an image by digest, from `evernear pipeline
compile` or `evernear pipeline upload`.
"""

import argparse
import importlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evernear.errors import SettingsError
from evernear.output import print_line
from evernear.store import write_atomically

if TYPE_CHECKING:
    from evernear.triggers.runs import Parameter

GOLDEN = Path(__file__).parent / "golden"
MODULES = ("continuous_training", "reindex", "rollback", "promote")
"""Each holds a pipeline function of its own name; the pipeline's name has hyphens for the underscores."""
NAMES = tuple(module.replace("_", "-") for module in MODULES)


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
    """Write ``<pipeline>.yaml`` for every pipeline into ``directory``, byte-stable; returns the paths."""
    from kfp import compiler

    paths = [directory / f"{module}.yaml" for module in MODULES]
    with tempfile.TemporaryDirectory() as scratch:
        for module, path in zip(MODULES, paths, strict=True):
            compiled = Path(scratch) / path.name
            compiler.Compiler().compile(getattr(importlib.import_module(f"pipelines.{module}"), module), str(compiled))
            # kfp's comment header prints defaults in the order of a hash map, another one each time.
            lines = compiled.read_text().splitlines(keepends=True)
            write_atomically(path, "".join(line for line in lines if not line.startswith("#")))
    return paths


def for_cluster(pipeline: str, image: str) -> bytes:
    """The golden file of ``pipeline`` with ``image`` in it.

    Raises:
        SettingsError: there is no such pipeline, or ``image`` is no digest.
    """
    from components import IMAGE

    if pipeline not in NAMES:
        raise SettingsError(f"There is no pipeline {pipeline!r}; known: {', '.join(NAMES)}.")
    if not re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", image):
        raise SettingsError(
            f"The image {image!r} is not named by digest; give REF@sha256:<64 hex digits>, "
            "since KFP's cache does not see what changes behind a tag."
        )
    golden = GOLDEN / f"{pipeline.replace('-', '_')}.yaml"
    return golden.read_bytes().replace(IMAGE.encode(), image.encode())


def parameters_of(compiled: bytes) -> "Sequence[Parameter]":
    """The parameters of a compiled pipeline."""
    from pipelines.client import parameters_in

    return parameters_in(next(yaml.safe_load_all(compiled))["root"])


def with_defaults(compiled: bytes, defaults: Mapping[str, Any]) -> bytes:
    """``compiled`` with other defaults for some of its parameters: those of the place where it will run."""
    if not defaults:
        return compiled
    documents = list(yaml.safe_load_all(compiled))
    parameters = documents[0]["root"]["inputDefinitions"]["parameters"]
    for name, value in defaults.items():
        parameters[name]["defaultValue"] = value
    return yaml.safe_dump_all(documents, sort_keys=True).encode()


def as_manifests(compiled: bytes, version: str, namespace: str = "") -> bytes:
    """``compiled`` as the Pipeline and PipelineVersion that a KFP in Kubernetes-native mode takes from ``kubectl``."""
    from kfp import compiler, components
    from kfp.compiler.compiler_utils import KubernetesManifestOptions

    information = next(yaml.load_all(compiled, Loader=yaml.CSafeLoader))["pipelineInfo"]
    options = KubernetesManifestOptions(
        pipeline_display_name=information.get("displayName"),
        pipeline_version_name=version_name(information["name"], version),
        pipeline_version_display_name=version,
        namespace=namespace or None,
        include_pipeline_manifest=True,
    )
    pipeline = components.load_component_from_text(compiled.decode())
    pipeline.description = information.get("description")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "manifests.yaml"
        compiler.Compiler().compile(
            pipeline, str(path), kubernetes_manifest_options=options, kubernetes_manifest_format=True
        )
        return path.read_bytes()


def version_name(pipeline: str, version: str) -> str:
    """The name of a pipeline version in KFP: unlike its display name, unique in the namespace."""
    return f"{pipeline}-{version}"


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
