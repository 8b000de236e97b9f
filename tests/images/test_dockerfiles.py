"""The Dockerfiles, checked without Docker."""

import fnmatch
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from evernear.cli.app import app
from tests.images.dockerfile import FILES, ROOT, stages

VARIANTS = [
    ("Dockerfile.serve", {}),
    ("Dockerfile.serve", {"EXTRA": "prep"}),
    ("Dockerfile.serve", {"EXTRA": "kserve"}),
    ("Dockerfile.train", {}),
    ("Dockerfile.train", {"EXTRAS": "triggers,pipeline,console"}),
]
IDS = ["serve", "prep", "kserve", "train", "triggers"]


@pytest.mark.parametrize("file", FILES)
def test_hadolint_passes(file: str) -> None:
    completed = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), ROOT / file], capture_output=True, text=True
    )
    assert (completed.returncode, completed.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES)
def test_hadolint_detects_a_planted_violation(file: str, tmp_path: Path) -> None:
    violating = (ROOT / file).read_text().replace(" --no-cache-dir", "")
    (tmp_path / file).write_text(violating)
    completed = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), tmp_path / file], capture_output=True, text=True
    )
    assert "DL3042" in completed.stdout


@pytest.mark.parametrize(("file", "arguments"), VARIANTS, ids=IDS)
def test_image_runs_as_an_unprivileged_numeric_user(file: str, arguments: dict[str, str]) -> None:
    by_name = stages(file, **arguments)
    stage = by_name[""]
    words = list(stage.instructions)
    while stage.base in by_name:
        stage = by_name[stage.base]
        words = stage.instructions + words
    assert [text for word, text in words if word == "USER"] == ["65532:65532"]
    after = words[[word for word, _ in words].index("USER") :]
    assert "RUN" not in [word for word, _ in after]
    assert stage.base == "python:3.11-slim-bookworm"


@pytest.mark.parametrize("file", FILES)
def test_base_image_can_be_pinned_by_digest(file: str) -> None:
    pinned = f"python:3.11-slim-bookworm@sha256:{'0' * 64}"
    by_name = stages(file, PYTHON_IMAGE=pinned)
    assert {stage.base for stage in by_name.values()} - set(by_name) == {pinned}


@pytest.mark.parametrize(("file", "arguments"), VARIANTS, ids=IDS)
def test_only_the_virtual_environment_is_copied_from_build_stages(file: str, arguments: dict[str, str]) -> None:
    """The final stages copy no other file of a build stage."""
    by_name = stages(file, **arguments)
    copied = [text for stage in by_name.values() for text in stage.all("COPY") if "--from=" in text]
    assert copied == [
        "--from=dependencies /opt/evernear /opt/evernear",
        "--from=package /opt/package /opt/evernear",
    ]


@pytest.mark.parametrize("file", FILES)
def test_every_package_is_installed_from_a_lock(file: str) -> None:
    commands = [
        part.strip() for stage in stages(file).values() for text in stage.all("RUN") for part in text.split("&&")
    ]
    installing = [shlex.split(command) for command in commands if re.search(r"pip install", command)]
    assert len(installing) == 3
    for words in installing:
        locked = {"--require-hashes", "--constraints"} & set(words)
        assert locked or words[-2:] == ["--no-deps", "dist/*.whl"], words
    backend = next(text for stage in stages(file).values() for text in stage.all("RUN") if "TORCH_BACKEND" in text)
    assert "else set -- --require-hashes --constraints requirements-torch.lock; fi" in backend


GPU = re.compile(r"(nvidia|cuda|triton)(-|$)")


def requirers(lock: str) -> dict[str, set[str]]:
    """The locked packages, and which packages require each, by the lock's comments."""
    packages: dict[str, set[str]] = {}
    for entry in re.split(r"\n(?=[a-z0-9])", (ROOT / lock).read_text()):
        comments = " ".join(re.findall(r"^ +#(.*)$", entry, re.M))
        packages[entry.partition("==")[0].partition("[")[0]] = set(comments.replace("via", "", 1).split())
    return packages


def test_only_torch_of_the_default_index_brings_gpu_packages() -> None:
    """PyTorch's CPU build requires none, so a CPU image contains no nvidia-*."""
    for lock in ("requirements.lock", "requirements-kserve.lock"):
        assert [name for name in requirers(lock) if GPU.match(name)] == []
    packages = requirers("requirements-torch.lock")
    gpu = {name: by for name, by in packages.items() if GPU.match(name)}
    assert len([name for name in gpu if name.startswith("nvidia-")]) > 10
    assert all(by <= {"torch", *gpu} for by in gpu.values()), gpu
    for file in FILES:
        (stage,) = [stage for stage in stages(file).values() if stage.name == "dependencies"]
        assert stage.variables["TORCH_BACKEND"] == "cpu"


@pytest.mark.parametrize("file", FILES)
def test_no_secret_is_a_build_argument_or_variable(file: str) -> None:
    names = re.findall(r"(\w+)=", (ROOT / file).read_text())
    assert not [name for name in names if re.search("TOKEN|SECRET|PASSWORD|KEY", name)]


@pytest.mark.parametrize(("file", "arguments"), VARIANTS, ids=IDS)
def test_commands_and_health_checks_exist(file: str, arguments: dict[str, str]) -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    last = stages(file, **arguments)[""]
    last = last if last.instructions else stages(file, **arguments)[last.base]
    health_checks = [text.partition("CMD ")[2] for text in last.all("HEALTHCHECK")]
    for text in [*last.all("CMD"), *health_checks]:
        words = shlex.split(text.strip("[]").replace(",", " "))
        if words[0] == "evernear":
            assert words[1] in commands | {"--help"}
        else:
            assert words[:3] == ["python", "-m", "evernear.serving.kserve.predictor"]
    assert bool(health_checks) == (file == "Dockerfile.serve" and arguments.get("EXTRA") != "kserve")


def test_each_variant_installs_existing_extras() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file, arguments in VARIANTS:
        extras = stages(file, **arguments)["dependencies"].variables["EXTRAS"].split(",")
        assert set(extras) <= set(known)
        assert ("pipeline" in extras) == (file == "Dockerfile.train")


def test_installed_package_has_one_top_level_name() -> None:
    """A user may have packages that are called pipelines or components, too."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {
        "packages": ["src/evernear"],
        "force-include": {"pipelines/golden": "evernear/kubeflow/golden"},
    }


def test_build_context_contains_exactly_the_copied_files() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for file in FILES
        for stage in stages(file).values()
        for text in stage.all("COPY")
        if "--from=" not in text
        for source in text.split()[:-1]
    }
    assert copied == {"src", "pipelines/golden", "pyproject.toml", "README.md", "requirements*.lock"} | {
        "requirements-build.lock"
    }
    assert all(any(fnmatch.fnmatch(source, pattern) for pattern in sent) for source in copied)
    assert sent <= copied
    assert all(any(ROOT.glob(pattern)) for pattern in sent)
    assert set(lines[1:]) - {f"!{name}" for name in sent} == {"**/__pycache__", "**/*.java"}
