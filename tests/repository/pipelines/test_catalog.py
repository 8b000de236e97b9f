"""The components and pipelines in the form of kubeflow/pipelines-components."""

import ast
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from evernear.errors import DataError
from evernear.kubeflow import GOLDEN
from pipelines import catalog

COMPONENTS = {path.stem for path in (catalog.ROOT / "components").glob("[a-z]*.py")}
SEMANTIC_VERSION = re.compile(r"(==|>=|<=)?\d+\.\d+\.\d+")
COMPILE = """
import importlib, sys
from pathlib import Path
from kfp import compiler
for path in map(Path, sys.argv[1:]):
    module = importlib.import_module(".".join(path.parts))
    compiler.Compiler().compile(getattr(module, path.name), f"{path.parts[1]}-{path.name}.yaml")
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of all assets in an empty checkout, which is importable as ``kfp_components``."""
    return catalog.write_catalog(tmp_path_factory.mktemp("catalog") / "kfp_components", "train@sha256:1", ["someone"])


def module_of(asset: Path) -> Path:
    return asset / ("component.py" if "components" in asset.parts else "pipeline.py")


def test_every_component_and_pipeline_is_in_the_catalog(assets: list[Path]) -> None:
    assert {path.name for path in assets if "components" in path.parts} == COMPONENTS
    assert {path.name for path in assets if "pipelines" in path.parts} == {path.stem for path in GOLDEN.glob("*.yaml")}


def test_metadata_follows_the_schema_of_the_catalog(assets: list[Path]) -> None:
    """The rules of validate_metadata.py: fields and their order, stability, semantic versions, a
    recent date."""
    for asset in assets:
        metadata = yaml.safe_load((asset / "metadata.yaml").read_text())
        assert list(metadata) == ["name", "stability", "dependencies", "lastVerified", "tags"]
        assert metadata["name"] == asset.name
        assert metadata["stability"] in ("experimental", "alpha", "beta", "stable")
        dependencies = metadata["dependencies"]["kubeflow"]
        assert [each["name"] for each in dependencies] == ["Pipelines"]
        assert all(SEMANTIC_VERSION.fullmatch(each["version"]) for each in dependencies)
        assert abs(datetime.now(UTC) - metadata["lastVerified"]) < timedelta(days=2)
        for directory in (asset, asset.parent):
            assert "approvers:\n  - someone\n" in (directory / "OWNERS").read_text()


def test_code_imports_only_what_the_catalog_allows(assets: list[Path]) -> None:
    """The rules of check_imports.py: at module level kfp, the standard library, and in pipelines
    kfp_components."""
    checkout = assets[0].parents[3]
    for path in checkout.rglob("*.py"):
        allowed = {"kfp", *sys.stdlib_module_names} | ({"kfp_components"} if "pipelines" in path.parts[-6:] else set())
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).split(".")[0] in allowed, path
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path


def test_components_describe_every_parameter(assets: list[Path]) -> None:
    for asset in (each for each in assets if "components" in each.parts):
        (function,) = (n for n in ast.parse(module_of(asset).read_text()).body if isinstance(n, ast.FunctionDef))
        arguments = (ast.get_docstring(function) or "").partition("Args:\n")[2]
        assert re.findall(r"^ +(\w+): \w", arguments, re.MULTILINE) == [each.arg for each in function.args.args]


def test_pipelines_of_the_catalog_are_those_of_the_tree(assets: list[Path]) -> None:
    checkout = assets[0].parents[3]
    modules = [str(each.relative_to(checkout.parent)) for each in assets]
    environment = os.environ | {"PYTHONPATH": str(checkout.parent)}
    subprocess.run([sys.executable, "-c", COMPILE, *modules], cwd=checkout.parent, env=environment, check=True)
    for golden in GOLDEN.glob("*.yaml"):
        expected, *platform = yaml.load_all(golden.read_text(), yaml.CSafeLoader)
        compiled, *platform_of_catalog = yaml.load_all(
            (checkout.parent / f"pipelines-{golden.stem}.yaml").read_text(), yaml.CSafeLoader
        )
        assert compiled["root"] == expected["root"]
        assert platform_of_catalog == platform
        executors = compiled["deploymentSpec"]["executors"].values()
        assert {each["container"]["image"] for each in executors} == {"train@sha256:1"}
    assert len([*checkout.parent.glob("components-*.yaml")]) == len(COMPONENTS)


def test_undescribed_parameter_is_an_error() -> None:
    source = 'from components import component\n\n\n@component\ndef step(color: str):\n    """Do it."""\n'
    with pytest.raises(DataError, match=r"ARGUMENTS has no description of color of step\.$"):
        catalog.component("step", source, "image")
