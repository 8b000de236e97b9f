"""The Dockerfiles, checked without Docker."""

import fnmatch
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from evernear.cli.app import app
from tests import ROOT
from tests.repository.images.dockerfile import FILES, ancestry, sources, stages

VARIANTS = [
    ("Dockerfile.serve", {}),
    ("Dockerfile.serve", {"EXTRA": "prep"}),
    ("Dockerfile.train", {}),
    ("Dockerfile.train", {"EXTRAS": "pipeline,heic"}),
]
IDS = ["serve", "prep", "train", "triggers"]


@pytest.mark.parametrize("file", FILES)
def test_hadolint_passes(file: str) -> None:
    completed = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), ROOT / file], capture_output=True, text=True
    )
    assert (completed.returncode, completed.stdout) == (0, "")


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
    assert copied == ["--from=package /opt/package /opt/evernear"]
    assert "build" not in [stage.name for stage in ancestry(file, "", **arguments)]


@pytest.mark.parametrize(("file", "arguments"), VARIANTS, ids=IDS)
def test_image_has_the_shared_layer_of_torch_if_it_needs_torch(file: str, arguments: dict[str, str]) -> None:
    """A layer is the same in two images if its instructions, and all that they are based on or
    mount, are the same."""
    names = [stage.name for stage in ancestry(file, "", **arguments)]
    extras = stages(file, **arguments)["dependencies"].variables["EXTRAS"].split(",")
    assert ("torch" in names) == any("torch==" in package for extra in extras for package in packages_of(extra))
    assert sources(file, "torch", **arguments) == sources("Dockerfile.train", "torch")


def test_workflow_builds_images_with_torch_from_the_layers_of_the_training_image() -> None:
    """Each job has a new builder, which would make a layer with other timestamps."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())["jobs"]
    for name, job in jobs.items():
        arguments = dict(item.split("=") for item in job["with"].get("build-args", "").split())
        has_torch = "torch" in [stage.name for stage in ancestry(job["with"]["dockerfile"], "", **arguments)]
        expected = ("train", "${{ needs.train.outputs.reference }}") if has_torch and name != "train" else (None, None)
        assert (job.get("needs"), job["with"].get("layers-of")) == expected
    image = yaml.safe_load((ROOT / ".github/workflows/image.yml").read_text())["jobs"]["image"]
    (build,) = [step["with"] for step in image["steps"] if step.get("id") == "build"]
    assert "format('type=registry,ref={0}', inputs.layers-of)" in build["cache-from"]
    assert "type=inline" in build["cache-to"]


@pytest.mark.parametrize("file", FILES)
def test_every_package_is_installed_from_a_lock(file: str) -> None:
    commands = [
        part.strip() for stage in stages(file).values() for text in stage.all("RUN") for part in text.split("&&")
    ]
    installing = [shlex.split(command) for command in commands if re.search(r"pip install", command)]
    assert len(installing) == 4
    for words in installing:
        locked = {"--require-hashes", "--constraints"} & set(words)
        assert locked or words[-2:] == ["--no-deps", "dist/*.whl"], words
    (dependencies,) = stages(file)["dependencies"].all("RUN")
    assert "else set -- --require-hashes; fi" in dependencies


def packages_of(extra: str) -> list[str]:
    """The requirements of an extra, and of the extras of evernear that it names."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    nested = {package: re.fullmatch(r"evernear\[(\w+)\]", package) for package in known[extra]}
    return [name for package, match in nested.items() for name in (packages_of(match[1]) if match else [package])]


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
    assert [name for name in requirers("requirements/main.lock") if GPU.match(name)] == []
    packages = requirers("requirements/torch.lock")
    gpu = {name: by for name, by in packages.items() if GPU.match(name)}
    assert len([name for name in gpu if name.startswith("nvidia-")]) > 10
    assert all(by <= {"torch", *gpu} for by in gpu.values()), gpu
    for file in FILES:
        (stage,) = [stage for stage in stages(file).values() if stage.name == "dependencies"]
        assert stage.variables["TORCH_BACKEND"] == "cpu"


def pins(lock: str) -> dict[str, set[str]]:
    """The lines of a lock that pin a package, by its name, without markers of Python versions of
    other images."""
    lines = re.findall(r"^([a-z0-9-]+)(?:\[\S+\])?(==[^ ;\\\n]+)", (ROOT / lock).read_text(), re.M)
    return {name: {version for other, version in lines if other == name} for name, _ in lines}


def test_other_layers_replace_no_package_of_the_layer_of_torch() -> None:
    torch = pins("requirements/torch.lock")
    main = pins("requirements/main.lock")
    assert {name: pin for name, pin in main.items() if name in torch and pin != torch[name]} == {}


def test_lock_for_another_backend_has_the_rest_of_the_lock_of_torch() -> None:
    default, backend = (ROOT / f"requirements/torch{suffix}.lock" for suffix in ("", "-backend"))
    entries = re.split(r"\n(?=[a-z0-9])", default.read_text().strip())
    rest = [entry for entry in entries if not re.match(r"torch|triton|nvidia-|cuda-", entry)]
    inputs = [line for line in (ROOT / "requirements/torch.in").read_text().splitlines() if not line.startswith("#")]
    assert backend.read_text().strip() == "\n".join([*inputs, *rest])
    assert 5 < len(rest) < len(entries) - 10


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
        assert words[0] == "evernear"
        assert words[1] in commands | {"--help"}
    assert bool(health_checks) == (file == "Dockerfile.serve")


def test_each_variant_installs_existing_extras() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file, arguments in VARIANTS:
        extras = stages(file, **arguments)["dependencies"].variables["EXTRAS"].split(",")
        assert set(extras) <= set(known)
        assert ("pipeline" in extras) == (file == "Dockerfile.train")


def test_build_context_contains_exactly_the_copied_files() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    texts = [(word, text) for file in FILES for stage in stages(file).values() for word, text in stage.instructions]
    copied = {
        source for word, text in texts if word == "COPY" and "--from=" not in text for source in text.split()[:-1]
    }
    mounted = {source for _, text in texts for source in re.findall(r"--mount=type=bind,source=([^, ]+)", text)}
    assert copied == {"src", "pipelines/golden", "pyproject.toml", "README.md", "requirements/*.lock"} | {
        "requirements/build.lock"
    }
    assert all(any(fnmatch.fnmatch(source, pattern) for pattern in sent) for source in copied | mounted)
    assert sent <= copied
    assert all(any(ROOT.glob(pattern)) for pattern in sent)
    assert set(lines[1:]) - {f"!{name}" for name in sent} == {"**/__pycache__", "**/*.java"}
