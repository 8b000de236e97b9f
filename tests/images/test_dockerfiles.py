"""The Dockerfiles, as far as they can be judged without Docker."""

import fnmatch
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dockerfile import FILES, ROOT, stages

from evernear.cli import app

VARIANTS = [
    ("Dockerfile.serve", {}),
    ("Dockerfile.serve", {"EXTRA": "prep"}),
    ("Dockerfile.serve", {"EXTRA": "kserve"}),
    ("Dockerfile.train", {}),
    ("Dockerfile.train", {"EXTRAS": "triggers,pipeline"}),
]
IDS = ["serve", "prep", "kserve", "train", "triggers"]


@pytest.mark.parametrize("file", FILES)
def test_hadolint_finds_nothing(file: str) -> None:
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), ROOT / file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES)
def test_hadolint_is_asked_in_earnest(file: str, tmp_path: Path) -> None:
    spoilt = (ROOT / file).read_text().replace(" --no-cache-dir", "")
    (tmp_path / file).write_text(spoilt)
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), tmp_path / file], capture_output=True, text=True)
    assert "DL3042" in done.stdout


@pytest.mark.parametrize(("file", "arguments"), VARIANTS, ids=IDS)
def test_it_runs_as_a_user_of_no_rights_whose_number_kubernetes_can_see(file: str, arguments: dict[str, str]) -> None:
    found = stages(file, **arguments)
    stage = found[""]
    words = list(stage.instructions)
    while stage.base in found:
        stage = found[stage.base]
        words = stage.instructions + words
    assert [text for word, text in words if word == "USER"] == ["65532:65532"]
    after = words[[word for word, _ in words].index("USER") :]
    assert "RUN" not in [word for word, _ in after]
    assert stage.base == "python:3.11-slim-bookworm"


@pytest.mark.parametrize("file", FILES)
def test_the_base_image_is_an_argument_for_a_digest(file: str) -> None:
    pinned = f"python:3.11-slim-bookworm@sha256:{'0' * 64}"
    found = stages(file, PYTHON_IMAGE=pinned)
    assert {stage.base for stage in found.values()} - set(found) == {pinned}


@pytest.mark.parametrize(("file", "arguments"), VARIANTS, ids=IDS)
def test_only_the_environment_of_the_build_leaves_it(file: str, arguments: dict[str, str]) -> None:
    """What the last stages take over: the virtual environment, and no file of a build stage beside it."""
    found = stages(file, **arguments)
    copied = [text for stage in found.values() for text in stage.all("COPY") if "--from=" in text]
    assert copied == [
        "--from=dependencies /opt/evernear /opt/evernear",
        "--from=package /opt/package /opt/evernear",
    ]


@pytest.mark.parametrize("file", FILES)
def test_every_package_is_checked_against_a_lock(file: str) -> None:
    commands = [
        part.strip() for stage in stages(file).values() for text in stage.all("RUN") for part in text.split("&&")
    ]
    installing = [shlex.split(command) for command in commands if re.search(r"pip install", command)]
    assert len(installing) == 3
    for words in installing:
        held = {"--require-hashes", "--constraints"} & set(words)
        assert held or words[-2:] == ["--no-deps", "dist/*.whl"], words
    backend = next(text for stage in stages(file).values() for text in stage.all("RUN") if "TORCH_BACKEND" in text)
    assert "else set -- --require-hashes --constraints requirements-torch.lock; fi" in backend


@pytest.mark.parametrize("file", FILES)
def test_no_secret_is_an_argument_or_stays_in_the_environment(file: str) -> None:
    names = re.findall(r"(\w+)=", (ROOT / file).read_text())
    assert not [name for name in names if re.search("TOKEN|SECRET|PASSWORD|KEY", name)]


@pytest.mark.parametrize(("file", "arguments"), VARIANTS, ids=IDS)
def test_it_starts_and_asks_what_evernear_has(file: str, arguments: dict[str, str]) -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    last = stages(file, **arguments)[""]
    last = last if last.instructions else stages(file, **arguments)[last.base]
    asked = [text.partition("CMD ")[2] for text in last.all("HEALTHCHECK")]
    for text in [*last.all("CMD"), *asked]:
        words = shlex.split(text.strip("[]").replace(",", " "))
        if words[0] == "evernear":
            assert words[1] in commands | {"--help"}
        else:
            assert words[:3] == ["python", "-m", "evernear.serving.kserve.predictor"]
    assert bool(asked) == (file == "Dockerfile.serve" and arguments.get("EXTRA") != "kserve")


def test_each_variant_installs_extras_that_there_are() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file, arguments in VARIANTS:
        extras = stages(file, **arguments)["dependencies"].variables["EXTRAS"].split(",")
        assert set(extras) <= set(known)
        assert ("pipeline" in extras) == (file == "Dockerfile.train")


def test_docker_is_sent_what_is_copied_and_nothing_else() -> None:
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
    assert copied == {"src", "components", "pipelines", "pyproject.toml", "README.md", "requirements*.lock"} | {
        "requirements-build.lock"
    }
    assert all(any(fnmatch.fnmatch(source, pattern) for pattern in sent) for source in copied)
    assert sent <= copied
    assert all(any(ROOT.glob(pattern)) for pattern in sent)
    assert set(lines[1:]) - {f"!{name}" for name in sent} == {"**/__pycache__", "**/*.java"}
