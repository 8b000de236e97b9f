"""A missing library is named together with the extra that has it."""

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
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
}
"""Modules of distributions that share a package with another one or are not in this environment."""


def names(extra: str) -> set[str]:
    """The distributions of an extra and of those that it contains."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        nested = re.fullmatch(r"evernear\[(.+)\]", requirement)
        found |= names(nested[1]) if nested else {re.split(r"[<>=;\s\[]", requirement)[0]}
    return found


installed = cache(packages_distributions)  # reads a thousand files


def module_of(distribution: str) -> str:
    normal = distribution.lower().replace("-", "_")
    modules = [
        module for module, of in installed().items() if normal in {each.lower().replace("-", "_") for each in of}
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


PROGRAM = """
import json, os, sys
from pathlib import Path
import evernear.cli.app
from evernear.__main__ import main

for library, words in json.loads(sys.argv[1]).items():
    if not os.fork():
        Path(library).mkdir()
        os.dup2(os.open(f"{library}.stderr", os.O_WRONLY | os.O_CREAT), 2)
        os.chdir(library)
        sys.modules[library] = None
        sys.argv = ["evernear", *words]
        main()
    Path(f"{library}.status").write_text(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with stderr and exit status of each command. Each is a fork of a process that has
    imported what they share."""
    directory = tmp_path_factory.mktemp("extras")
    words = json.dumps({library: words for library, (words, _) in COMMANDS.items()})
    subprocess.run([sys.executable, "-c", PROGRAM, words], cwd=directory, check=True)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("library", COMMANDS)
def test_command_without_its_extra_says_what_to_install(library: str, ended: Path) -> None:
    _, extra = COMMANDS[library]
    stderr = (ended / f"{library}.stderr").read_text()
    pattern = (
        rf"evernear: {library}[\w.]* is not installed; run `pip install 'evernear\[(?:\w+,)*{extra}(?:,\w+)*\]'`\.\n"
    )
    assert re.fullmatch(pattern, stderr), stderr
    assert (ended / f"{library}.status").read_text() in ("1", "2")
    assert not list((ended / library).iterdir()), "nothing is begun"
