"""Write the components and pipelines in the form of the catalog kubeflow/pipelines-components.

    python -m pipelines.catalog CHECKOUT --image REF@sha256:... --approver NAME

``CHECKOUT`` is a clone of https://github.com/kubeflow/pipelines-components. Everything is generated from the components
and pipelines of this repository: the imports and the decorator change, and docstrings get the catalog's ``Args:``. The
scripts of the checkout then write the READMEs and the list of packages.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from evernear.common.disk import write_atomically
from evernear.common.output import print_line
from evernear.errors import DataError, EvernearError
from evernear.kubeflow import PLACEHOLDER_IMAGE

ROOT = Path(__file__).parent.parent
NAME = "evernear"
"""The subcategory, so that our assets stay together within each category."""
CATEGORIES = {
    "components": {
        "data_processing": ("ingest", "validate"),
        "training": ("train", "export", "reuse", "embed", "probe", "index"),
        "evaluation": ("evaluate", "gate"),
        "deployment": ("archive", "deploy", "promote", "rollback", "predict", "notify"),
    },
    "pipelines": {"training": ("continuous_training", "reindex"), "deployment": ("promote", "rollback", "predict")},
}
SHARED = ("tasks", "release", "champion")
"""Modules that several pipelines import."""
ARGUMENTS = {
    "confusion": "Confusion matrix of the candidate.",
    "curves": "Training curves.",
    "dataset": "Snapshot of the dataset: a reference to shards in the store.",
    "embeddings": "Embeddings of gallery and query.",
    "evaluation": "Metrics of candidate and champion.",
    "images": "Images to recognize: s3://bucket/prefix.",
    "index": "FAISS index with labels and the open-set threshold.",
    "metrics": "Metrics of the candidate.",
    "network": "TorchScript network.",
    "nodes": "Pods that share the work.",
    "open_set": "Open-set threshold, and how well it separates unseen classes.",
    "out": "Folder of the Parquet files: s3://bucket/prefix.",
    "outcome": "Outcome of the run.",
    "page": "Run page: outcome, metrics, mistakes and lineage as one HTML file.",
    "pipeline": "Name of the pipeline.",
    "preset": "Settings that come with evernear: best, fast, frozen, photos or quick. Empty: the defaults.",
    "reason": "Reason for the champion's history.",
    "release": "A release; for promote, rollback and predict its version.",
    "report": "Findings of the validation.",
    "roc": "ROC curve of the rejection of unseen classes.",
    "run": "Id of the run.",
    "serving_image": "Image of the serving pods by digest; required for target kubernetes.",
    "settings": "Settings of the run; for the first step of a pipeline those that differ from the defaults.",
    "source": "Images: s3://bucket/prefix with one folder per class, digits, or mnist.",
    "started_by": "Who or what started the run, for the champion's history.",
    "status": "Final status of the run.",
    "store": "Object store of datasets and releases: s3://bucket/prefix or file:///path.",
    "target": "Where a promoted release goes: registry, kubernetes or local.",
    "train_accelerators": "Number of GPUs of the steps that train, as text.",
    "trained": "Weights of the trained network.",
    "verdict": "Promote or hold, with reasons.",
}
"""Descriptions of the components' parameters and artifacts, for the catalog's READMEs."""


METADATA = """\
---
name: {name}
stability: beta
dependencies:
  kubeflow:
    - name: Pipelines
      version: ">=2.17.0"
lastVerified: {verified}
tags:
  - {category}
  - image_recognition
  - continuous_training
"""
"""The catalog prescribes the fields and their order."""


def main(arguments: list[str] | None = None) -> int:
    """Write the catalog; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.catalog", description=__doc__)
    parser.add_argument("checkout", type=Path, help="clone of kubeflow/pipelines-components")
    parser.add_argument("--image", default=PLACEHOLDER_IMAGE, help="evernear's train image by digest")
    parser.add_argument("--approver", action="append", help="GitHub name for OWNERS; may be repeated")
    options = parser.parse_args(arguments)
    try:
        assets = write_catalog(options.checkout, options.image, options.approver or [NAME])
        if (options.checkout / "scripts/generate_readme").is_dir():
            finish(options.checkout, assets)
    except EvernearError as error:
        print_line(str(error), sys.stderr)
        return error.exit_code
    print_line(f"{len(assets)} components and pipelines are in {options.checkout}.")
    return 0


def write_catalog(checkout: Path, image: str, approvers: list[str]) -> list[Path]:
    """Write every component and pipeline with its metadata; returns their directories.

    Raises:
        DataError: a parameter of a component is not described in `ARGUMENTS`.
    """
    verified = datetime.now(UTC).strftime("%Y-%m-%dT00:00:00Z")
    owners = "---\napprovers:\n" + "".join(f"  - {name}\n" for name in approvers)
    written: list[Path] = []
    for kind, category, name in _assets():
        directory = checkout / kind / category / NAME / name
        source = (ROOT / kind / f"{name}.py").read_text()
        module = kind.removesuffix("s")
        code = component(name, source, image) if kind == "components" else pipeline(source)
        files = {
            directory.parent / "__init__.py": f'"""{category.replace("_", " ").capitalize()} of evernear."""\n',
            directory.parent / "OWNERS": owners,
            directory / "__init__.py": f'"""{name}."""\n\nfrom .{module} import {name}\n\n'
            f'__all__ = ["{name}"]\n',
            directory / f"{module}.py": code,
            directory / "metadata.yaml": METADATA.format(name=name, category=category, verified=verified),
            directory / "OWNERS": owners,
            directory / "tests" / "__init__.py": "",
            directory / "tests" / f"test_{name}.py": _test_of(name, module),
        }  # fmt: skip
        _write(files)
        written.append(directory)
    shared = checkout / "pipelines" / "training" / NAME / "shared"
    modules = {shared / f"{name}.py": pipeline((ROOT / "pipelines" / f"{name}.py").read_text()) for name in SHARED}
    _write({shared / "__init__.py": '"""Tasks that several pipelines share."""\n', **modules})
    return written


def component(name: str, source: str, image: str) -> str:
    """The text of ``component.py``: `source` with kfp's own decorator, and a docstring that describes parameters.

    Raises:
        DataError: a parameter is not described in `ARGUMENTS`.
    """
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    names = [argument.arg for argument in function.args.args]
    if missing := sorted({*names} - {*ARGUMENTS}):
        raise DataError(f"pipelines/catalog.py: ARGUMENTS has no description of {', '.join(missing)} of {name}.")
    arguments = "".join(f"        {each}: {ARGUMENTS[each]}\n" for each in names)
    summary = ast.get_docstring(function, clean=False) or ""
    text = source.replace(f'"""{summary}"""', f'"""{summary.rstrip()}\n\n    Args:\n{arguments}    """')
    text = text.replace("from components import component\n", "" if "from kfp" in source else "from kfp import dsl\n")
    return _tidy(
        text.replace("@component\n", f'@dsl.component(\n    base_image="{image}",\n    install_kfp_package=False,\n)\n')
    )


def pipeline(source: str) -> str:
    """The text of a pipeline, or of a module that pipelines share, with imports from the catalog's package."""
    for kind, category, name in _assets():
        if kind == "components":
            source = source.replace(
                f"from components.{name} import", f"from kfp_components.components.{category}.{NAME}.{name} import"
            )
    for name in SHARED:
        source = source.replace(
            f"from pipelines.{name} import", f"from kfp_components.pipelines.training.{NAME}.shared.{name} import"
        )
    return _tidy(source)


def finish(checkout: Path, assets: list[Path]) -> None:
    """Format the code as the checkout does, and let its scripts write the READMEs and the list of packages.

    Raises:
        DataError: one of them fails.
    """
    generated = sorted({str(path.parent.relative_to(checkout)) for path in assets})
    _run(checkout, "ruff", "check", "--fix", *generated)
    _run(checkout, "ruff", "format", *generated)
    for directory in assets:
        kind = directory.relative_to(checkout).parts[0].removesuffix("s")
        _run(checkout, "scripts.generate_readme", f"--{kind}", str(directory.relative_to(checkout)), "--fix")
    _run(checkout, "scripts.sync_packages.sync_packages")


def _run(checkout: Path, module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"{module} of {checkout} failed: {done.stderr.strip() or done.stdout.strip()}")


def _assets() -> Iterator[tuple[str, str, str]]:
    """Kind, category and name of every component and pipeline."""
    for kind, categories in CATEGORIES.items():
        for category, names in categories.items():
            for name in names:
                yield kind, category, name


def _tidy(source: str) -> str:
    """Remove comments for our own tools."""
    return re.sub(r"  # (fmt|pyright)\b.*", "", source)


def _test_of(name: str, module: str) -> str:
    return f'''"""Tests of {name}."""

from kfp import compiler

from ..{module} import {name}


def test_compiles(tmp_path):
    """The compiler accepts it."""
    compiler.Compiler().compile({name}, str(tmp_path / "{name}.yaml"))
    assert (tmp_path / "{name}.yaml").stat().st_size > 0
'''


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


if __name__ == "__main__":
    sys.exit(main())
