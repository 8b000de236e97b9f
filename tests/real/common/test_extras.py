"""A missing library is named together with the extra that has it."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from evernear.common.extras import missing_library
from tests import ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SUBMODULES = {
    "kfp-kubernetes": "kfp.kubernetes",
    "opentelemetry-sdk": "opentelemetry.sdk.trace",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "kserve": "kserve",
}
"""Modules of distributions that share a package with another one or are not in this environment."""


def names(extra: str) -> set[str]:
    """The distributions of an extra and of those that it contains."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        nested = re.fullmatch(r"evernear\[(.+)\]", requirement)
        found |= names(nested[1]) if nested else {re.split(r"[<>=;\s\[]", requirement)[0]}
    return found


def module_of(distribution: str) -> str:
    normal = distribution.lower().replace("-", "_")
    modules = [
        module
        for module, of in packages_distributions().items()
        if normal in {each.lower().replace("-", "_") for each in of}
    ]
    named = [module for module in modules if module == normal or not module.startswith("_")]
    return SUBMODULES.get(distribution) or next((each for each in named if each == normal), named[0])


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_library_of_each_extra_is_named_with_an_extra_that_has_it(extra: str) -> None:
    for distribution in names(extra):
        module = module_of(distribution)
        sentence = str(missing_library(ModuleNotFoundError(f"No module named {module!r}", name=module)))
        proposed = re.fullmatch(
            rf"{re.escape(module)} is not installed; run `pip install 'evernear\[(.+)\]'`\.", sentence
        )
        assert proposed, sentence
        assert any(distribution in names(each) for each in proposed[1].split(",")), sentence


def test_missing_module_of_evernear_is_a_bug() -> None:
    assert missing_library(ModuleNotFoundError(name="evernear.gone")) is None


COMMANDS = {
    "kfp": (["run", "--source", "digits"], "pipeline"),
    "torch": (["run", "--source", "digits"], "train"),
    "starlette": (["console", "--workdir", "."], "pipeline"),
    "slack_bolt": (["slack"], "pipeline"),
    "fastapi": (["prep"], "prep"),
    "kfp_server_api": (["pipeline", "status"], "pipeline"),
    "kubernetes": (["deployment", "render", "--set", "target=kubernetes"], "pipeline"),
    "optuna": (["tune", "--source", "digits"], "tune"),
}


@pytest.mark.parametrize("library", COMMANDS)
def test_command_without_its_extra_says_what_to_install(library: str, tmp_path: Path) -> None:
    words, extra = COMMANDS[library]
    program = f"import sys; sys.modules[{library!r}] = None; from evernear.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True)
    pattern = (
        rf"evernear: {library}[\w.]* is not installed; run `pip install 'evernear\[(?:\w+,)*{extra}(?:,\w+)*\]'`\.\n"
    )
    assert re.fullmatch(pattern, done.stderr), done.stderr
    assert done.returncode in (1, 2)
    assert not list(tmp_path.iterdir()), "nothing is begun"


def test_kserve_servers_say_what_to_install() -> None:
    command = [sys.executable, "-m", "evernear.serving.kserve.predictor"]  # this environment has no kserve
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "evernear: kserve is not installed; run `pip install 'evernear[model,kserve]'`.\n"
